"""`vitrail import` and `vitrail export`: models between Hugging Face's layout and our own."""

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from safetensors import SafetensorError
from torch import Tensor, nn
from tqdm import tqdm

from vitrail import hub
from vitrail.errors import ConfigError
from vitrail.hub.configs import THEIRS, Found, find, resolve
from vitrail.hub.files import Weights, read_json
from vitrail.hub.folders import build, family_of
from vitrail.processing.text import Tokenizer

Out = Annotated[Path, Parameter(alias="-o")]
PATIENCE = 2.0  # seconds before a bar is shown
GLANCE = 0.2  # seconds between two looks at what is written


def take(source: str, /, *, out: Out) -> None:
    """Write a model of Hugging Face's, or of one file, in our own format, with its tokenizer.

    Example: vitrail import llava-hf/llava-1.5-7b-hf -o out/llava

    Parameters
    ----------
    source
        A folder, a hub id, a .gguf file or a llama2.c .bin file.
    out
        The folder to make.
    """
    out = _free(out)
    found = find(resolve(source), own=False)
    model, words = _read(found)
    with _new(out, model) as folder:
        hub.save(model, folder, words)
    _say(out, f"{type(model).__name__} from {found.family.name if found.family else source}", model, words)


def give(model: str, /, *, out: Out, family: str | None = None) -> None:
    """Write a model of ours in Hugging Face's layout, with its tokenizer.

    Example: vitrail export out/llava -o out/llava-hf

    Parameters
    ----------
    model
        A folder of ours, or the name of a model that ships.
    out
        The folder to make.
    family
        As which family (llava, qwen3, …): the first that the model fits unless given.
    """
    out = _free(out)
    found = find(resolve(model))
    family_of(found.model, found.config, family)  # refuses before anything is read
    loaded, words = _read(found)
    with _new(out, loaded) as folder:
        left_out = hub.to_hf(loaded, folder, family=family, tokenizer=words)
    about = read_json(out / THEIRS)
    named = next(str(about[key]) for key in ("model_type", "architecture", "_class_name") if key in about)
    _say(out, f"{named} from {type(loaded).__name__}", loaded, words)
    for lacking in left_out:
        print(f"  {lacking}")


def _free(out: Path) -> Path:
    """The folder to make, by its whole path; one that is taken is refused."""
    out = out.absolute()
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ConfigError(f"{out} is there already", "remove it first, or give another folder")
    return out


# ---- reading and writing ----------------------------------------------------------------------------------------


def _read(found: Found) -> tuple[Any, Tokenizer | None]:
    """A model and, if it has one, its tokenizer."""
    path = found.path
    words = hub.tokenizer(path) if path.is_file() or (path / "tokenizer.json").exists() else None
    if path.is_file():
        return build(found, None, "cpu"), words
    with _bar("reading", sum(file.stat().st_size for file in path.glob("*.safetensors"))) as bar:
        return build(found._replace(weights=lambda: _Told(path, bar)), None, "cpu"), words


class _Told(Weights):
    """Weights that tell a bar what was read of them."""

    def __init__(self, path: Path, bar: "tqdm[Any]"):
        super().__init__(path)
        self.bar = bar

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        self.bar.update(tensor.nbytes)
        return tensor


@contextmanager
def _new(out: Path, model: nn.Module) -> Iterator[Path]:
    """A folder that gets its name only when it is whole."""
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        with _watched(partial, sum(tensor.nbytes for tensor in model.state_dict().values())):
            yield partial
        partial.replace(out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{out} cannot be written: {error}", "give another folder, or make room") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _watched(folder: Path, total: int) -> Iterator[None]:
    """A bar that follows how much lies in a folder: what writes safetensors says nothing until it has."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(GLANCE):
            look()

    def look() -> None:
        bar.update(min(_bytes(folder), total) - bar.n)

    with _bar("writing", total) as bar:
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
        look()


def _bar(what: str, total: int) -> "tqdm[Any]":
    return tqdm(
        total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, disable=None, delay=PATIENCE, leave=False
    )


def _bytes(folder: Path) -> int:
    total = 0
    for file in folder.iterdir():
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # it got its name meanwhile
            continue
    return total


def _say(out: Path, what: str, model: nn.Module, words: Tokenizer | None) -> None:
    files = sorted(file for file in out.iterdir() if file.is_file())
    width = max(len(file.name) for file in files)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{out}: {what}, {parameters:,} parameters, {_size(_bytes(out))}")
    for file in files:
        print(f"  {file.name:{width}}  {_size(file.stat().st_size):>9}")
    if words is None:
        print("  no tokenizer.json came with it, and none was written")


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
