"""A model that stands on another: of the part it took from there only the difference is kept.

A folder says so in vitrail.json, as `base`: which part, of which model (a package's name, or a folder), and the
checksums of that model's weights and of its words, which are not kept either where they are the same. A tensor of the
part is kept as NAME:added, what it differs by, or not at all where it is the base's own. A difference is small, so that
in 8 bits it is nearer to the truth than the weight would be.
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
from vitrail.hub.configs import OWN, resolve
from vitrail.hub.files import read_json

ADDED = ":added"
WORDS = "tokenizer.json"
CHUNK = 1 << 20
Load = Callable[[str], Any]


class Base(Config):
    start: str
    sha256: str
    words: str
    part: str = "decoder"

    @classmethod
    def of(cls, start: str) -> "Base":
        return cls(start, checksum(resolve(start)), checksum_words(resolve(start)))

    def tensors(self, load: Load) -> Mapping[str, Tensor]:
        """The base's own, by the names they have in the model that stands on it; refused where it is another now."""
        self._refuse_another(self.sha256, checksum(self.path()), "")
        return {f"{self.part}.{name}": tensor for name, tensor in load(self.start).state_dict().items()}

    def check_words(self) -> None:
        self._refuse_another(self.words, checksum_words(self.path()), "'s words")

    def path(self) -> Path:
        try:
            found = resolve(self.start)
        except VitrailError as error:
            raise CheckpointError(
                f"this model stands on {self.start}, which is not there: {error.problem}", error.remedy
            ) from None
        if (found / OWN).is_file() and "base" in read_json(found / OWN):
            raise CheckpointError(f"{self.start} stands on another model itself", "name that one as the base")
        return found

    def _refuse_another(self, wanted: str, found: str, what: str) -> None:
        if found != wanted:
            raise CheckpointError(
                f"this model stands on {self.start}{what} of sha256 {wanted[:16]}…, and the one here has {found[:16]}…",
                f"fetch {self.start} again, or the version that this model was made with",
            )


def base_of(folder: Path) -> Base | None:
    """What the model in a folder of ours stands on."""
    about = read_json(folder / OWN).get("base")
    try:
        found = None if about is None else Base.read(about)
    except ConfigError as error:
        raise CheckpointError(f"{folder / OWN}: base: {error.problem}", error.remedy) from None
    if found is not None:
        refuse_itself(folder, found.start)
    return found


def refuse_itself(folder: Path, start: str) -> None:
    if Path(start).resolve() == folder.resolve():
        raise CheckpointError(
            f"{folder} would stand on itself", "name the model that its decoder came from as the base"
        )


def checksum(path: Path) -> str:
    """Of a model's file, or of all safetensors of a folder."""
    return _digest([path] if path.is_file() else sorted(path.glob("*.safetensors")))


def checksum_words(path: Path) -> str:
    """Of the file that holds a model's words; of nothing where they are in the model's own, or nowhere."""
    file = path.with_name("tokenizer.bin") if path.is_file() else path / WORDS
    return _digest([file] if file.is_file() else [])


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
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
    """`apart` backwards: all tensors of the base's part, in the type that most of the others have, and the others."""
    kept = dict(tensors)
    whole = {name: tensor for name, tensor in kept.items() if not name.endswith(ADDED)}
    if twice := sorted(whole.keys() & base.keys()):
        raise CheckpointError(
            f"{twice[0]!r} is kept whole, and the base has it too", f"keep what differs, as {twice[0] + ADDED!r}"
        )
    yield from whole.items()
    types = Counter(tensor.dtype for tensor in whole.values() if tensor.is_floating_point())
    dtype = types.most_common(1)[0][0] if types else torch.float32
    for name, tensor in kept.items():
        own = name.removesuffix(ADDED)
        if own == name:
            continue
        if own not in base or base[own].shape != tensor.shape:
            raise CheckpointError(f"{name!r} is added to what the base does not have", "is it the right base?")
        yield own, (base[own].float() + tensor.float()).to(dtype)
    for name, tensor in base.items():
        if name + ADDED not in kept:
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
