"""Find the images to tokenize, and resize each to a multiple of a codec's downsample factor.

Shapes: H, W pixels.
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

from vitrail.codecs.codec import CodecModule
from vitrail.config import Config
from vitrail.data.formats.media_folders import IMAGE_SUFFIXES
from vitrail.data.shards.member_codecs import get_codec
from vitrail.data.shards.shard_index import INDEX_SUFFIX, ShardIndex, load_index
from vitrail.data.shards.shard_paths import expand_paths
from vitrail.data.sources.verification import CHECKSUM_SUFFIX
from vitrail.errors import ConfigError, DataError


class ImageResizeConfig(Config):
    """How an image is made divisible by the codec's downsample factor.

    cover  resize to cover `size` and crop the center; by default the codec's own size
    pad    keep the size, and repeat the right and bottom edges up to the next multiple; decoding restores the size
    crop   keep the size, and cut off the remaining pixels at the right and the bottom
    """

    how: Literal["cover", "pad", "crop"] = "cover"
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.how != "cover" and self.size is not None:
            raise ConfigError(f"resize mode {self.how!r} does not take a size", 'remove size, or use "cover"')

    def resolve_size(self, codec: CodecModule) -> "ImageResizeConfig":
        """Return a copy with its size set, checked against the codec's downsample factor."""
        if self.how != "cover":
            return self
        size = self.size or codec.image_size
        if any(side < 1 or side % codec.downsample_factor for side in size):
            raise ConfigError(
                f"images of {size[0]} × {size[1]} do not divide into codes of {codec.downsample_factor} × "
                f"{codec.downsample_factor} pixels",
                f"choose multiples of {codec.downsample_factor}",
            )
        return self.replace(size=size)

    def apply(self, image: Image.Image, factor: int) -> tuple[Tensor, tuple[int, int]]:
        """Return uint8 pixels (3, H, W) with sides divisible by `factor`, and the height and width of the image in
        them.
        """
        if self.how == "cover":
            assert self.size is not None
            pixels = _pixels(_cover(image, *self.size))
            return pixels, self.size
        pixels = _pixels(image)
        H, W = pixels.shape[1:]
        if self.how == "crop":
            H, W = H // factor * factor, W // factor * factor
            if not H or not W:
                raise DataError(f"is {image.height} × {image.width} pixels, smaller than a code of {factor} × {factor}")
            return pixels[:, :H, :W], (H, W)
        padding = (0, -W % factor, 0, -H % factor)
        if not any(padding):
            return pixels, (H, W)
        return F.pad(pixels[None].float(), padding, mode="replicate")[0].to(torch.uint8), (H, W)


def _cover(image: Image.Image, H: int, W: int) -> Image.Image:
    """Crop the largest centered part with the aspect ratio of H × W, and resize it."""
    scale = min(image.height / H, image.width / W)
    h, w = min(H * scale, image.height), min(W * scale, image.width)  # rounding may exceed the edge
    left, top = (image.width - w) / 2, (image.height - h) / 2
    box = (left, top, min(left + w, image.width), min(top + h, image.height))
    return image.resize((W, H), Image.Resampling.BICUBIC, box)


def _pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


# ---- finding images ---------------------------------------------------------------------------------------------


class ImageSource(NamedTuple):
    """Named image. `load` returns an argument of `load_image`: a path, or bytes."""

    name: str
    load: Callable[[], Path | bytes]


def find_images(paths: Sequence[str | Path]) -> list[ImageSource]:
    """Find the images of files, folders and shards in a stable order: as given, and sorted by name within each.

    The name of an image is its path relative to its folder, or its shard and key. With several inputs, the folder name
    comes first.
    """
    images: list[ImageSource] = []
    for argument in map(str, paths):
        path, prefix = Path(argument), f"{Path(argument).resolve().name}/" if len(paths) > 1 else ""
        if not _exists(path) and not set(argument) & set("*?[{"):
            raise DataError(f"{argument} does not exist", "give image files, folders, or shards")
        if path.is_file() and path.suffix != ".tar":
            images.append(ImageSource(_to_text(path.name), partial(Path, path)))
        elif path.is_dir() and not _has_only_shards(path):
            own = [
                ImageSource(_to_text(prefix + str(file.relative_to(path))), partial(Path, file))
                for file in _list_images(path)
            ]
            if not own:
                raise DataError(f"{path} has no images", f"add files that end in {', '.join(sorted(IMAGE_SUFFIXES))}")
            images += own
        else:
            for shard in expand_paths(argument):
                images += _find_in_shard(shard)
    duplicate = find_duplicate([image.name for image in images])
    if duplicate is not None:
        raise DataError(f"two images have the name {duplicate!r}", "tokenize them separately, or rename one")
    if not images:
        raise DataError("there are no images", "give image files, folders or shards")
    return images


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the name is too long
        return False


def _to_text(path: str) -> str:
    """Decode a path name as UTF-8, with replacement characters for invalid bytes."""
    return PurePath(os.fsencode(path).decode("utf-8", "replace")).as_posix()


def _has_only_shards(folder: Path) -> bool:
    """Whether a folder holds tar files and their indexes only."""
    endings = {path.suffix for path in folder.iterdir() if not path.name.startswith(".")} - {
        INDEX_SUFFIX,
        CHECKSUM_SUFFIX,
    }
    return endings == {".tar"}


def _list_images(folder: Path) -> list[Path]:
    """List the image files of a folder recursively, without hidden files and folders."""
    files = (path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    return sorted(path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _find_in_shard(path: Path) -> Iterator[ImageSource]:
    index = load_index(path)
    if index.faults:
        member, reason = index.faults[0]
        raise DataError(f"{path}: {member} {reason}", "repair the shard, or leave it out")
    for i in range(len(index)):
        yield ImageSource(_to_text(f"{path.stem}/{index.get_key(i)}"), partial(_read_shard_image, path, index, i))


def _read_shard_image(path: Path, index: ShardIndex, sample: int) -> bytes:
    """Read the bytes of the first image of a sample."""
    members = index.get_members(sample)
    for ending, (offset, length) in members.items():
        kind = get_codec(ending)
        if kind is not None and kind.decode is None:
            with path.open("rb") as file:
                return os.pread(file.fileno(), length, offset)
    raise DataError(f"has no image, only {', '.join(members)}")


def find_duplicate(names: Sequence[str]) -> str | None:
    """Return the first name that occurs twice, or None."""
    names_so_far: set[str] = set()
    for name in names:
        if name in names_so_far:
            return name
        names_so_far.add(name)
    return None
