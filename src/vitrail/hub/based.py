"""A model that stands on another: of the part it took from there only the difference is kept.

A folder says so in vitrail.json, as `base`: which part, of which model (a package's name, or a folder), and the
checksum of that model's weights. A tensor of the part is kept as NAME:added, what it differs by, or not at all where it
is the base's own. A difference is small, so that in 8 bits it is nearer to the truth than the weight would be.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import Config
from vitrail.errors import CheckpointError, ConfigError, VitrailError
from vitrail.hub.configs import OWN, resolve
from vitrail.hub.files import read_json

ADDED = ":added"
CHUNK = 1 << 20
Load = Callable[[str], Any]


class Base(Config):
    start: str
    sha256: str
    part: str = "decoder"

    @classmethod
    def of(cls, start: str) -> "Base":
        return cls(start, checksum(resolve(start)))

    def tensors(self, load: Load) -> Mapping[str, Tensor]:
        """The base's own, by the names they have in the model that stands on it; refused where it is another now."""
        try:
            found = checksum(resolve(self.start))
        except VitrailError as error:
            raise CheckpointError(
                f"this model stands on {self.start}, which is not there: {error.problem}", error.remedy
            ) from None
        if (resolve(self.start) / OWN).is_file() and base_of(resolve(self.start)) is not None:
            raise CheckpointError(f"{self.start} stands on another model itself", "name that one as the base")
        if found != self.sha256:
            raise CheckpointError(
                f"this model stands on {self.start} of sha256 {self.sha256[:16]}…, and the one here has {found[:16]}…",
                f"fetch {self.start} again, or the version that this model was made with",
            )
        return {f"{self.part}.{name}": tensor for name, tensor in load(self.start).state_dict().items()}


def base_of(folder: Path) -> Base | None:
    """What the model in a folder of ours stands on."""
    about = read_json(folder / OWN).get("base")
    try:
        return None if about is None else Base.read(about)
    except ConfigError as error:
        raise CheckpointError(f"{folder / OWN}: base: {error.problem}", error.remedy) from None


def checksum(path: Path) -> str:
    """Of a model's file, or of all safetensors of a folder."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            while data := stream.read(CHUNK):
                digest.update(data)
    return digest.hexdigest()


def apart(tensors: Iterable[tuple[str, Tensor]], base: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors as they are kept beside a base."""
    for name, tensor in tensors:
        if name not in base:
            yield name, tensor
            continue
        theirs = base[name]
        if theirs.shape != tensor.shape:
            raise CheckpointError(
                f"{name} is {tuple(tensor.shape)} here and {tuple(theirs.shape)} in the base",
                "name the one it came from",
            )
        if not torch.equal(theirs.to(tensor), tensor):
            yield name + ADDED, tensor.detach().float().cpu() - theirs.float().cpu()


def joined(tensors: Iterable[tuple[str, Tensor]], base: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """`apart` backwards: all tensors of the base's part, and the others."""
    added = set()
    for name, tensor in tensors:
        own = name.removesuffix(ADDED)
        if own == name:
            yield name, tensor
            continue
        if own not in base or base[own].shape != tensor.shape:
            raise CheckpointError(f"{name!r} is added to what the base does not have", "is it the right base?")
        added.add(own)
        yield own, base[own].float() + tensor.float()
    yield from ((name, tensor) for name, tensor in base.items() if name not in added)
