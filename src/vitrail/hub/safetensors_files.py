"""Read and write safetensors files, single or in shards. Files are validated before they are used."""

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.file_reading import read_json_file

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz")
SHARD_BYTES = 4 * 2**30
MAX_HEADER_BYTES = 100_000_000  # as in safetensors itself
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_STEMS = ("model", "diffusion_pytorch_model")
"""Stems of weights files: transformers and timm, diffusers."""


class SafetensorsWeights:
    """Tensors of a folder or of one .safetensors file, read one at a time."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._where: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open: dict[Path, Any] = {}
        for file in _list_files(self.path):
            for name, entry in _read_header(file).items():
                if name in self._where:
                    raise CheckpointError(
                        f"{self.path}: tensor {name!r} is stored in {self._where[name].name} and in {file.name}",
                        "remove the file that does not belong to the checkpoint",
                    )
                self._where[name], self._shapes[name] = file, entry.shape

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self._shapes[name]

    def get_file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._where[name]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._where:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}", "check that the checkpoint is complete and of this kind"
            )
        file = self._where[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            return self._open[file].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name!r} of {file} cannot be read: {error}", "download it again") from None


def _list_files(path: Path) -> list[Path]:
    """List the safetensors files of a checkpoint. Raises an error for pickles."""
    if path.is_file():
        if path.suffix in PICKLE_SUFFIXES:
            raise _build_pickle_error(path)
        if path.suffix != ".safetensors":
            kinds = "give the folder of a checkpoint, a .gguf file, or a .bin file of llama2.c"
            raise CheckpointError(f"{path} is not a model file", kinds)
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist", "check the path")
    stem = next(
        (stem for stem in WEIGHTS_STEMS if (path / f"{stem}.safetensors.index.json").exists()), WEIGHTS_STEMS[0]
    )
    index = path / f"{stem}.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise CheckpointError(f"{index} is not an index of shards: weight_map must name files", "download it again")
        files = [path / name for name in sorted(set(names.values()))]
        for file in files:
            if file.parent.resolve() != path.resolve():
                raise CheckpointError(f"{index} points outside its folder: {file.name}", "do not trust this checkpoint")
            if not file.is_file():
                raise CheckpointError(f"{index} lists the shard {file.name}, which is missing", f"download {file}")
        return files
    files = [path / f"{stem}.safetensors" for stem in WEIGHTS_STEMS if (path / f"{stem}.safetensors").exists()][:1]
    files = files or sorted(path.glob("*.safetensors"))
    if not files:
        pickles = [f for f in sorted(path.iterdir()) if f.suffix in PICKLE_SUFFIXES]
        if pickles:
            raise _build_pickle_error(pickles[0])
        raise CheckpointError(f"{path} contains no .safetensors file", "download the weights, model.safetensors")
    return files


def _build_pickle_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle, which can execute arbitrary code when it is opened",
        "use the .safetensors version, or convert it on an isolated machine",
    )


_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _TensorEntry(msgspec.Struct):
    """Header entry of a tensor."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


def _read_header(file: Path) -> dict[str, _TensorEntry]:
    """Read the header of a file and check that the file contains all tensors that the header declares."""
    decode_entry = msgspec.json.Decoder(_TensorEntry).decode
    if not file.is_file():
        raise CheckpointError(f"{file} is not a regular file", "give a file on disk")
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > size - 8:
            raise CheckpointError(f"{file} is truncated or not a safetensors file", "download it again")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file} has a header of {length:,} bytes, more than the {MAX_HEADER_BYTES:,} of the format",
                "download it again",
            )
        try:
            header = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            tensors = {name: decode_entry(entry) for name, entry in header.items()}
        except (ValueError, RecursionError):  # not JSON, not UTF-8, wrong types
            raise CheckpointError(
                f"{file} is not a safetensors file: its header cannot be read", "download it again"
            ) from None
    data_bytes = size - 8 - length
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].data_offsets[1]):
        if (end := entry.data_offsets[1]) > data_bytes:
            raise CheckpointError(
                f"{file} is truncated: tensor {name!r} ends at byte {end:,} of the data, which has {data_bytes:,}",
                "download it again",
            )
    return tensors


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES, stem: str = WEIGHTS_STEMS[0]
) -> None:
    """Write STEM.safetensors, or shards and their index if there are more than `shard_bytes` bytes.

    Files get their final names, and old files are removed, only after all are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    remaining = shard_bytes
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if parts[-1] and size > remaining:
            parts.append({})
            remaining = shard_bytes
        parts[-1][name] = tensor.detach().cpu().contiguous()
        remaining -= size
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
        partial.chmod(mode)  # safetensors 0.8 creates files that only their owner can read
    index = folder / f"{stem}.safetensors.index.json"
    stale = {
        path
        for any_stem in WEIGHTS_STEMS
        for path in folder.glob(f"{any_stem}*.safetensors*")
        if path.suffix != ".partial"
    }
    for name in names:
        (folder / f"{name}.partial").replace(folder / name)
    if count > 1:
        weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        total = sum(t.numel() * t.element_size() for part in parts for t in part.values())
        write_json(index, {"metadata": {"total_size": total}, "weight_map": weight_map})
        stale.discard(index)
    for path in stale - {folder / name for name in names}:
        path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        data = read_json_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", "give the folder of a checkpoint") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}", "download it again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not contain a JSON object", "download it again")
    return data


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON object to a file, in one step."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=2) + "\n")
    partial.replace(path)
