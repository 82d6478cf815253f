"""Safetensors on disk: one file or shards, checked before they are trusted."""

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitrail.errors import CheckpointError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz")
SHARD = 4 * 2**30  # bytes a shard
INDEX = "model.safetensors.index.json"
STEMS = ("model", "diffusion_pytorch_model")
"""What files of weights are called: by transformers and timm, by diffusers."""


class Weights:
    """The tensors of a folder or of one .safetensors file, read one at a time."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._where: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file in _shards(self.path):
            for name in _header(file):
                if name in self._where:
                    raise CheckpointError(f"tensor {name!r} stands in {self._where[name].name} and in {file.name}")
                self._where[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._where:
            raise CheckpointError(f"{self.path} has no tensor {name!r}", "is it a checkpoint of this kind, and whole?")
        file = self._where[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            return self._open[file].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name!r} of {file} cannot be read: {error}") from None


def _shards(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint; a pickle is refused with the reason."""
    if path.is_file():
        if path.suffix in PICKLES:
            raise _refused(path)
        if path.suffix != ".safetensors":
            kinds = "give a model's folder, a .gguf file, or a .bin file of llama2.c"
            raise CheckpointError(f"{path} is no model file", kinds)
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist", "check the path")
    stem = next((stem for stem in STEMS if (path / f"{stem}.safetensors.index.json").exists()), STEMS[0])
    index = path / f"{stem}.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise CheckpointError(f"{index} is no index of shards: weight_map must name files", "fetch it again")
        files = [path / name for name in sorted(set(names.values()))]
        for file in files:
            if file.parent.resolve() != path.resolve():
                raise CheckpointError(f"{index} points outside its folder: {file.name}", "do not trust this checkpoint")
            if not file.is_file():
                raise CheckpointError(f"shard {file} is missing", "fetch the checkpoint again")
        return files
    files = [path / f"{stem}.safetensors" for stem in STEMS if (path / f"{stem}.safetensors").exists()][:1]
    files = files or sorted(path.glob("*.safetensors"))
    if not files:
        pickles = [f for f in sorted(path.iterdir()) if f.suffix in PICKLES]
        raise _refused(pickles[0]) if pickles else CheckpointError(f"{path} holds no .safetensors file")
    return files


def _refused(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is refused: a pickle runs whatever code its author put in it when it is opened",
        "use the .safetensors version, or convert it on a machine you can lose",
    )


def _header(file: Path) -> dict[str, Any]:
    """The tensors a file declares, after checking that it holds them: a short file names the first one it lacks."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        lead = stream.read(8)
        length = struct.unpack("<Q", lead)[0] if len(lead) == 8 else size
        if length > size - 8:
            raise CheckpointError(f"{file} is cut short or no safetensors file", "fetch it again")
        try:
            header = json.loads(stream.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            ends = {name: int(entry["data_offsets"][1]) for name, entry in tensors.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise CheckpointError(
                f"{file} is no safetensors file: its header cannot be read", "fetch it again"
            ) from None
    held = size - 8 - length
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if end > held:
            raise CheckpointError(
                f"{file} is cut short: tensor {name!r} ends at byte {end:,} of the data and {held:,} are there",
                "fetch it again",
            )
    return tensors


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], shard: int = SHARD, stem: str = STEMS[0]
) -> None:
    """Write STEM.safetensors, or shards and their index where there is more than `shard` bytes.

    The files get their names only when all are whole, and old ones go only then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    room = shard
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if parts[-1] and size > room:
            parts.append({})
            room = shard
        parts[-1][name] = tensor.detach().cpu().contiguous()
        room -= size
    count = len(parts)
    names = (
        [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        if count > 1
        else [f"{stem}.safetensors"]
    )
    for name, part in zip(names, parts, strict=True):
        partial = folder / f"{name}.partial"
        partial.touch()
        mode = partial.stat().st_mode
        save_file(part, partial, metadata={"format": "pt"})
        partial.chmod(mode)  # safetensors 0.8 makes files that only their owner may read
    index = folder / f"{stem}.safetensors.index.json"
    stale = {old for each in STEMS for old in folder.glob(f"{each}*.safetensors*") if old.suffix != ".partial"}
    for name in names:
        (folder / f"{name}.partial").replace(folder / name)
    if count > 1:
        places = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        total = sum(t.numel() * t.element_size() for part in parts for t in part.values())
        write_json(index, {"metadata": {"total_size": total}, "weight_map": places})
        stale.discard(index)
    for old in stale - {folder / name for name in names}:
        old.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", "give a folder with a model in it") from None
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}", "fetch it again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no JSON object", "fetch it again")
    return data


def write_json(path: Path, data: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=2) + "\n")
    partial.replace(path)
