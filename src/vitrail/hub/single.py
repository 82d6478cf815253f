"""Models that are one file: GGUF and llama2.c, by path or by the name of a package that holds one."""

from pathlib import Path

from vitrail.errors import CheckpointError
from vitrail.hub import gguf, gguf_models, llama2c, packages
from vitrail.hub.files import Weights
from vitrail.processing.text import Tokenizer

PICKLED = (b"PK", b"\x80")  # how torch's pickles begin: as a zip, or bare

Single = gguf_models.GGUFWeights | llama2c.Llama2c


def locate(name_or_path: str | Path) -> Path:
    """A path as it is; the name of a package becomes the file inside it, fetched when first asked for."""
    path = Path(name_or_path)
    return packages.fetch(str(name_or_path)) if str(name_or_path) in packages.PACKAGES and not path.exists() else path


def open_single(path: Path) -> Single:
    """The tensors of one file, told by its first bytes and its ending; what is neither kind is refused."""
    if _is_gguf(path):
        return gguf_models.GGUFWeights(path)
    if _is_llama2c(path):
        return llama2c.Llama2c(path)
    Weights(path)  # says why, if it is a pickle or unknown
    raise CheckpointError(f"{path} holds weights without a config", f"give the folder: {path.parent}")


def single_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer in a GGUF file, or the tokenizer.bin beside a llama2.c file; None for other files."""
    if _is_gguf(path):
        return gguf_models.read_tokenizer(path)
    return llama2c.read_tokenizer(path.with_name("tokenizer.bin")) if _is_llama2c(path) else None


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" or _begins(path).startswith(gguf.MAGIC)


def _is_llama2c(path: Path) -> bool:
    return path.suffix == ".bin" and not _begins(path).startswith(PICKLED)


def _begins(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(4)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", "check the path") from None
