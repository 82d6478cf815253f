"""All images of a source at one size in one tensor, with a record of each. Built once and cached in one file.

Shapes: N images, C channels (RGB, and opacity if any image has some), S pixels a side.
"""

import hashlib
import json
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitrail.data.image_readers import ImageRecord, open_images
from vitrail.data.image_readers.class_images import READERS as CLASSES
from vitrail.data.image_readers.class_images import ClassImagesReader, SplitName
from vitrail.data.image_readers.emoji import EXCLUDED_KEYS, MISNAMED_TONES, VENDORS
from vitrail.data.image_readers.rgba import trim_rgba
from vitrail.data.sources import SOURCES, get_cache_folder, get_source
from vitrail.data.sources.progress_bar import progress_bar
from vitrail.errors import DataError, ImageError

_FORMAT = "vitrail collection 2"


@dataclass(frozen=True, eq=False)
class ImageCollection:
    """Images of one size, and what is known of each."""

    records: tuple[ImageRecord, ...]
    pixels: Tensor  # uint8 (N, C, S, S)

    def __len__(self) -> int:
        return len(self.records)

    def save(self, path: Path) -> None:
        """Write a safetensors file. Pixels and records are compressed with zlib."""
        compressed = zlib.compress(self.pixels.numpy().tobytes(), level=4)
        metadata = {"format": _FORMAT, "shape": json.dumps(list(self.pixels.shape))}
        records = msgspec.json.encode(self.records)
        tensors = {"pixels": compressed, "abouts": zlib.compress(records)}
        save_file(
            {name: torch.frombuffer(bytearray(x), dtype=torch.uint8) for name, x in tensors.items()}, path, metadata
        )

    @classmethod
    def load(cls, path: Path) -> "ImageCollection":
        """Read a file written by `save`. Raise `DataError` for any other file."""
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise ValueError("unknown format")
                texts, flat = (
                    zlib.decompress(file.get_tensor(name).numpy().tobytes()) for name in ("abouts", "pixels")
                )
            shape = json.loads(metadata["shape"])
            pixels = torch.frombuffer(bytearray(flat), dtype=torch.uint8).view(shape)
            image_records = msgspec.json.decode(texts, type=tuple[ImageRecord, ...])
            if len(shape) != 4 or len(image_records) != len(pixels):
                raise ValueError(f"{len(image_records)} records do not fit images of shape {shape}")
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError, zlib.error) as error:
            raise DataError(
                f"{path} is not an image collection: {error}", "delete the file; it is rebuilt on the next use"
            ) from None
        return cls(image_records, pixels)


def load_collection(name: str, image_size: int, trim: bool = False) -> ImageCollection:
    """Load the images of a source (`vitrail data list`) or a folder at one size. The first call fetches and caches
    them.

    Images that are not square are resized to a square. With `trim`, images with opacity are first cropped to the square
    around their opaque part. Unreadable images are left out and counted.
    """
    if image_size < 1:
        raise DataError(f"image_size is {image_size}", "use at least 1")
    if name in CLASSES:  # these are arrays already
        return _collect_class_images(name, image_size)
    version = _version_hash(name, image_size, trim)
    path = (
        get_cache_folder() / "collections" / f"{Path(name).name.replace(':', '-')}-{image_size}-{version}.safetensors"
    )
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        _collect_images(name, image_size, trim).save(partial)
        partial.replace(path)
    return ImageCollection.load(path)


def _version_hash(name: str, image_size: int, trim: bool) -> str:
    """Hash everything that determines the collection: source version, corrections by its reader, or the files of a
    folder."""
    parts: list[object] = [_FORMAT, name, image_size, *(["trim"] if trim else [])]
    parts += [corrections[name] for corrections in (EXCLUDED_KEYS, MISNAMED_TONES) if name in corrections]
    if name in SOURCES:
        specs = [get_source(part) for part in ((name, "emojibase") if name in VENDORS else (name,))]
        parts += [(spec.package, spec.version) for spec in specs]
    elif Path(name).is_dir():
        files = sorted(path for path in Path(name).rglob("*") if path.is_file())
        parts += [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _collect_class_images(name: str, image_size: int) -> ImageCollection:
    reader = open_images(name)
    assert isinstance(reader, ClassImagesReader)
    parts: tuple[SplitName, ...] = ("train", "test")
    images = torch.cat([torch.from_numpy(reader.load_split(part).images) for part in parts]).permute(0, 3, 1, 2)
    if images.shape[-1] != image_size:
        resized = [
            F.interpolate(some.float(), (image_size, image_size), mode="bicubic", antialias=True)
            for some in images.split(4096)
        ]
        images = torch.cat([some.round().clamp(0, 255).to(torch.uint8) for some in resized])
    return ImageCollection(tuple(reader.get_record(item) for item in range(len(reader))), images.contiguous())


def _collect_images(name: str, image_size: int, trim: bool) -> ImageCollection:
    reader, image_records, images, unreadable = open_images(name), [], [], []
    with progress_bar(f"reading {name}", len(reader), unit="image") as progress:
        for item in range(len(reader)):
            record = reader.get_record(item)
            try:
                rgba = reader.load_rgba(item, image_size)
                if trim and (rgba[..., 3] < 255).any():
                    rgba = trim_rgba(reader.load_rgba(item, 2 * image_size), image_size)
                images.append(_resize_to_square(rgba, image_size))
                image_records.append(record)
            except ImageError:
                unreadable.append(record.id)
            progress.update()
    if unreadable:
        sys.stderr.write(
            f"{name}: skipped {len(unreadable)} of {len(reader)} images that cannot be read: {unreadable[0]}, …\n"
        )
    if not images:
        raise DataError(f"{name} has no readable image", "check the files, or fetch the source again")
    pixels = np.stack(images)
    opaque = bool((pixels[:, 3] == 255).all())
    return ImageCollection(tuple(image_records), torch.from_numpy(pixels[:, :3].copy() if opaque else pixels))


def _resize_to_square(rgba: np.ndarray, image_size: int) -> np.ndarray:
    """Resize (H, W, 4) to (4, S, S)."""
    if rgba.shape[:2] != (image_size, image_size):
        rgba = np.asarray(Image.fromarray(rgba).resize((image_size, image_size), Image.Resampling.LANCZOS))
    return rgba.transpose(2, 0, 1)
