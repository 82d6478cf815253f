"""Which pictures become tokens, and how each is made one that a codec's factor divides.

H, W pixels
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitrail.codecs.codec import Codec
from vitrail.config import Config
from vitrail.data.formats.folders import PICTURES
from vitrail.data.shards.index import SUFFIX, Index, index_of
from vitrail.data.shards.kinds import kind_of
from vitrail.data.shards.paths import expand
from vitrail.errors import ConfigError, DataError


class Fit(Config):
    """How a picture is made one that the codec's factor divides.

    cover  resized to cover `size`, and what reaches beyond it cut off on both sides; the codec's own size unless given
    pad    as it is, its right and bottom edges repeated up to the next multiple; decoding gives its own size back
    crop   as it is, without the few pixels that are left over at the right and the bottom
    """

    how: Literal["cover", "pad", "crop"] = "cover"
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.how != "cover" and self.size is not None:
            raise ConfigError(f"fit {self.how!r} leaves pictures as large as they are", "leave the size out, or cover")

    def whole(self, codec: Codec) -> "Fit":
        """The same with its size said, checked against the codec's factor."""
        if self.how != "cover":
            return self
        size = self.size or codec.size
        if any(side < 1 or side % codec.factor for side in size):
            raise ConfigError(
                f"pictures of {size[0]} × {size[1]} do not divide into codes of {codec.factor} × {codec.factor} pixels",
                f"choose multiples of {codec.factor}",
            )
        return self.with_(size=size)

    def apply(self, image: Image.Image, factor: int) -> tuple[Tensor, tuple[int, int]]:
        """uint8 (3, H, W) with sides that `factor` divides, and the height and width that are the picture's."""
        if self.how == "cover":
            assert self.size is not None
            pixels = _pixels(_cover(image, *self.size))
            return pixels, self.size
        pixels = _pixels(image)
        H, W = pixels.shape[1:]
        if self.how == "crop":
            H, W = H // factor * factor, W // factor * factor
            if not H or not W:
                raise DataError(f"is {image.height} × {image.width}, less than a code of {factor} × {factor}")
            return pixels[:, :H, :W], (H, W)
        padding = (0, -W % factor, 0, -H % factor)
        return F.pad(pixels[None].float(), padding, mode="replicate")[0].to(torch.uint8), (H, W)


def _cover(image: Image.Image, H: int, W: int) -> Image.Image:
    """The largest part in the middle that has the shape of H × W, resized to it."""
    scale = min(image.height / H, image.width / W)
    h, w = min(H * scale, image.height), min(W * scale, image.width)  # a rounded product may lie beyond the edge
    left, top = (image.width - w) / 2, (image.height - h) / 2
    box = (left, top, min(left + w, image.width), min(top + h, image.height))
    return image.resize((W, H), Image.Resampling.BICUBIC, box)


def _pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


# ---- which pictures ---------------------------------------------------------------------------------------------


class Picture(NamedTuple):
    """`read` gives what `load_image` reads: a path, or bytes."""

    name: str
    read: Callable[[], Path | bytes]


def find_pictures(inputs: Sequence[str | Path]) -> list[Picture]:
    """The pictures of files, folders and shards, in an order that does not change: as given, and by name within.

    A picture's name is its path below its folder, or its shard and key; of several inputs a folder's name comes first.
    """
    found: list[Picture] = []
    for given in map(str, inputs):
        path, prefix = Path(given), f"{Path(given).resolve().name}/" if len(inputs) > 1 else ""
        if not _exists(path) and not set(given) & set("*?[{"):
            raise DataError(f"{given} does not exist", "give pictures, folders of them, or shards")
        if path.is_file() and path.suffix != ".tar":
            found.append(Picture(_said(path.name), partial(Path, path)))
        elif path.is_dir() and not _only_shards(path):
            own = [Picture(_said(prefix + str(file.relative_to(path))), partial(Path, file)) for file in _files(path)]
            if not own:
                raise DataError(f"{path} holds no pictures", f"they end in {', '.join(sorted(PICTURES))}")
            found += own
        else:
            for shard in expand(given):
                found += _of_shard(shard)
    twice = first_twice([picture.name for picture in found])
    if twice is not None:
        raise DataError(f"two pictures are called {twice!r}", "tokenize them apart, or rename one")
    if not found:
        raise DataError("no pictures are named", "give files, folders or shards")
    return found


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long for any file
        return False


def _said(path: str) -> str:
    """A name as text: the bytes of a path need not be any."""
    return PurePath(os.fsencode(path).decode("utf-8", "replace")).as_posix()


def _only_shards(folder: Path) -> bool:
    """Whether a folder holds tars, and beside their indexes nothing else."""
    endings = {path.suffix for path in folder.iterdir() if not path.name.startswith(".")} - {SUFFIX}
    return endings == {".tar"}


def _files(folder: Path) -> list[Path]:
    """Hidden files and folders are left alone."""
    files = (path for path in folder.rglob("*") if path.suffix.lower() in PICTURES and path.is_file())
    return sorted(path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _of_shard(path: Path) -> Iterator[Picture]:
    index = index_of(path)
    if index.faults:
        member, reason = index.faults[0]
        raise DataError(f"{path}: {member} {reason}", "mend the shard, or leave it out: it would not be whole")
    for i in range(len(index)):
        yield Picture(_said(f"{path.stem}/{index.key(i)}"), partial(_member, path, index, i))


def _member(path: Path, index: Index, sample: int) -> bytes:
    """The first picture of a sample."""
    members = index.members(sample)
    for ending, (offset, length) in members.items():
        kind = kind_of(ending)
        if kind is not None and kind.decode is None:
            with path.open("rb") as file:
                return os.pread(file.fileno(), length, offset)
    raise DataError(f"has no picture, only {', '.join(members)}")


def first_twice(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
