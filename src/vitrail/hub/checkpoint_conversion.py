"""Convert checkpoints between the Hugging Face layout and Vitrail's format, with their tokenizers."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor, nn

from vitrail import hub
from vitrail.data.sources.hub_snapshots import list_commits
from vitrail.data.sources.progress_bar import progress_bar
from vitrail.errors import ConfigError
from vitrail.hub.checkpoint_info import (
    HF_CONFIG_FILE,
    NATIVE_CONFIG_FILE,
    CheckpointInfo,
    find_checkpoint,
    resolve_path,
)
from vitrail.hub.peft_adapters import load_adapter
from vitrail.hub.pretrained import build_model, find_family
from vitrail.hub.safetensors_files import SafetensorsWeights, read_json, write_json
from vitrail.processing.tokenizer import Tokenizer
from vitrail.training.lora import merge_lora

POLL_SECONDS = 0.2  # seconds between updates of the bar


class Conversion(NamedTuple):
    """A finished conversion.

    folder       the new checkpoint
    description  kind of the new checkpoint, and of the old one
    warnings     what the new layout cannot hold
    """

    folder: Path
    description: str
    model: nn.Module
    tokenizer: Tokenizer | None
    warnings: list[str]


def import_checkpoint(source: str | Path, out: str | Path) -> Conversion:
    """Convert a Hugging Face model, a GGUF file or a llama2.c file to Vitrail's format."""
    out = _check_unused_folder(Path(out))
    found = find_checkpoint(resolve_path(source), native=False)
    model, tokenizer = _load_model_and_tokenizer(found)
    with _atomic_folder(out, model) as folder:
        hub.save(model, folder, tokenizer)
        _record_source(folder / NATIVE_CONFIG_FILE, source)
    origin = found.family.name if found.family else source
    return Conversion(out, f"{type(model).__name__} from {origin}", model, tokenizer, [])


def _record_source(file: Path, source: str | Path) -> None:
    """Record the hub id and the commit that a checkpoint was converted from."""
    repository = str(source).partition("@")[0]
    if (commit := list_commits().get(repository)) is not None and not Path(source).exists():
        write_json(file, {**read_json(file), "source": {"name": repository, "revision": commit}})


def export_checkpoint(
    model: str | Path, out: str | Path, *, family: str | None = None, adapter: str | Path | None = None
) -> Conversion:
    """Convert a model to the Hugging Face layout; by default of the first family that fits the model.

    `adapter` is the folder of a PEFT LoRA adapter, which is merged into the weights.
    """
    out = _check_unused_folder(Path(out))
    found = find_checkpoint(resolve_path(model))
    find_family(found.model_class, found.config, family)  # refuses an unsupported model before weights are read
    loaded, tokenizer = _load_model_and_tokenizer(found)
    if adapter is not None:
        merge_lora(load_adapter(loaded, adapter))
    with _atomic_folder(out, loaded) as folder:
        warnings = hub.to_hf(loaded, folder, family=family, tokenizer=tokenizer)
    config = read_json(out / HF_CONFIG_FILE)
    kind = next(str(config[key]) for key in ("model_type", "architecture", "_class_name") if key in config)
    return Conversion(out, f"{kind} from {type(loaded).__name__}", loaded, tokenizer, list(warnings))


def _check_unused_folder(out: Path) -> Path:
    """Return the absolute path of the folder to create. An existing folder must be empty."""
    out = out.absolute()
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ConfigError(f"{out} already exists", "remove it first, or give another folder")
    return out


def _load_model_and_tokenizer(info: CheckpointInfo) -> tuple[Any, Tokenizer | None]:
    """Load a model and, if it has one, its tokenizer."""
    path = info.path
    tokenizer = hub.load_tokenizer(path) if path.is_file() or (path / "tokenizer.json").exists() else None
    if path.is_file():
        return build_model(info, None, "cpu"), tokenizer
    with progress_bar("reading", sum(file.stat().st_size for file in path.glob("*.safetensors"))) as bar:
        open_weights = info.open_weights
        return build_model(
            info._replace(open_weights=lambda: _WeightsWithProgress(open_weights(), bar)), None, "cpu"
        ), tokenizer


class _WeightsWithProgress(SafetensorsWeights):
    """Weights that update a progress bar as tensors are read."""

    def __init__(self, weights: Any, bar: Any):
        self.path, self.weights, self.bar = weights.path, weights, bar

    def __contains__(self, name: str) -> bool:
        return name in self.weights

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def get_shape(self, name: str) -> tuple[int, ...]:
        return self.weights.get_shape(name)

    def get_file(self, name: str) -> Path:
        return self.weights.get_file(name)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.weights[name]
        self.bar.update(tensor.nbytes)
        return tensor


@contextmanager
def _atomic_folder(out: Path, model: nn.Module) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `out` when it is complete."""
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        with _folder_size_bar(partial, sum(tensor.nbytes for tensor in model.state_dict().values())):
            yield partial
        partial.replace(out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{out} cannot be written: {error}", "give another folder, or free disk space") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _folder_size_bar(folder: Path, total: int) -> Iterator[None]:
    """Show a progress bar of the size of a folder, because saving safetensors reports no progress."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            look()

    def look() -> None:
        bar.update(min(count_bytes(folder), total) - bar.n)

    with progress_bar("writing", total) as bar:
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
        look()


def count_bytes(folder: Path) -> int:
    """Count the bytes of the files of a folder."""
    total = 0
    for file in folder.iterdir():
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # renamed in the meantime
            continue
    return total
