"""Delta checkpoints: one part of the model is stored as its difference from a base model.

`base` in vitrail.json names the part, the base model (a package model or a folder) and the checksums of its weights and
of its tokenizer. The tokenizer is not stored either if it is that of the base. A tensor of the part is stored as
NAME:added, its difference from the base, or not at all if it is unchanged. Differences are small, so 8 bits represent
them more precisely than they represent the weights.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import Config
from vitrail.errors import CheckpointError, ConfigError, VitrailError
from vitrail.hub.checkpoint_info import NATIVE_CONFIG_FILE, resolve_path, resolve_reference
from vitrail.hub.safetensors_files import read_json

DELTA_SUFFIX = ":added"
TOKENIZER_FILE = "tokenizer.json"
CHUNK_BYTES = 1 << 20
LoadFn = Callable[[Path], Any]


class BaseCheckpoint(Config):
    """The base model of a delta checkpoint."""

    name_or_path: str
    weights_sha256: str
    tokenizer_sha256: str
    part: str = "decoder"

    @classmethod
    def from_model(cls, name_or_path: str) -> "BaseCheckpoint":
        """Describe a model as base, with its current checksums."""
        return cls(
            name_or_path, checksum_weights(resolve_path(name_or_path)), checksum_tokenizer(resolve_path(name_or_path))
        )

    def load_tensors(self, load: LoadFn, folder: Path) -> Mapping[str, Tensor]:
        """Load the tensors of the base under their names in the model. Raises an error if its checksum changed."""
        path = self.resolve_path(folder)
        self._check_sha256(self.weights_sha256, checksum_weights(path), "")
        return {f"{self.part}.{name}": tensor for name, tensor in load(path).state_dict().items()}

    def check_tokenizer(self, folder: Path) -> None:
        """Raise an error if the tokenizer of the base changed."""
        self._check_sha256(self.tokenizer_sha256, checksum_tokenizer(self.resolve_path(folder)), " with a tokenizer")

    def resolve_path(self, folder: Path) -> Path:
        """Return the local path of the base of the delta checkpoint in `folder`."""
        try:
            path = resolve_reference(self.name_or_path, folder)
        except VitrailError as error:
            raise CheckpointError(
                f"the base model {self.name_or_path} is missing: {error.problem}", error.remedy
            ) from None
        if (path / NATIVE_CONFIG_FILE).is_file() and "base" in read_json(path / NATIVE_CONFIG_FILE):
            raise CheckpointError(f"the base model {self.name_or_path} is a delta checkpoint itself", "use its base")
        return path

    def _check_sha256(self, expected: str, actual: str, file_name: str) -> None:
        if actual != expected:
            raise CheckpointError(
                f"the base model is {self.name_or_path}{file_name} of sha256 {expected[:16]}…, but the local one has "
                f"{actual[:16]}…",
                f"download {self.name_or_path} again, in the version that this model was trained from",
            )


def read_base(folder: Path) -> BaseCheckpoint | None:
    """Read the base of a native checkpoint; None if it has none."""
    metadata = read_json(folder / NATIVE_CONFIG_FILE).get("base")
    try:
        base = None if metadata is None else BaseCheckpoint.from_dict(metadata)
    except ConfigError as error:
        raise CheckpointError(f"{folder / NATIVE_CONFIG_FILE}: base: {error.problem}", error.remedy) from None
    if base is not None:
        check_base_is_other(folder, base.name_or_path)
    return base


def check_base_is_other(folder: Path, base: str) -> None:
    """Raise an error if a checkpoint names itself as its base."""
    if Path(base).resolve() == folder.resolve():
        raise CheckpointError(f"{folder} would be its own base", "give the model that its decoder was started from")


def checksum_weights(path: Path) -> str:
    """Return the SHA-256 of a model file, or of all safetensors files of a folder."""
    return _digest([path] if path.is_file() else sorted(path.glob("*.safetensors")))


def checksum_tokenizer(path: Path) -> str:
    """Return the SHA-256 of the tokenizer file, or of nothing if the model file contains it or there is none."""
    file = path.with_name("tokenizer.bin") if path.is_file() else path / TOKENIZER_FILE
    return _digest([file] if file.is_file() else [])


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while data := stream.read(CHUNK_BYTES):
                digest.update(data)
    return digest.hexdigest()


def subtract_base(tensors: Iterable[tuple[str, Tensor]], base: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors as a delta checkpoint stores them."""
    for name, tensor in tensors:
        if name not in base:
            yield name, tensor
            continue
        base_tensor = base[name]
        if base_tensor.shape != tensor.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)} here and {tuple(base_tensor.shape)} in the base",
                "give the model that it was started from",
            )
        if not torch.equal(base_tensor.to(tensor), tensor):
            yield name + DELTA_SUFFIX, tensor.detach().float().cpu() - base_tensor.float().cpu()


def add_base(tensors: Iterable[tuple[str, Tensor]], base: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a delta checkpoint: the inverse of `subtract_base`.

    Tensors of the base get the dtype that most other tensors have.
    """
    stored = dict(tensors)
    full = {name: tensor for name, tensor in stored.items() if not name.endswith(DELTA_SUFFIX)}
    if duplicates := sorted(full.keys() & base.keys()):
        raise CheckpointError(
            f"{duplicates[0]!r} is stored in full, but the base has it",
            f"store the difference as {duplicates[0] + DELTA_SUFFIX!r}",
        )
    yield from full.items()
    types = Counter(tensor.dtype for tensor in full.values() if tensor.is_floating_point())
    dtype = types.most_common(1)[0][0] if types else torch.float32
    for name, tensor in stored.items():
        base_name = name.removesuffix(DELTA_SUFFIX)
        if base_name == name:
            continue
        if base_name not in base or base[base_name].shape != tensor.shape:
            raise CheckpointError(f"{name!r} has no matching tensor in the base", "check the base")
        yield base_name, (base[base_name].float() + tensor.float()).to(dtype)
    for name, tensor in base.items():
        if name + DELTA_SUFFIX not in stored:
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
