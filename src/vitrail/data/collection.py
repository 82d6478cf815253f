"""A source's pictures at one size in one tensor, with what is known of each: made once, kept in one file.

N pictures, C channels (red, green, blue; opacity where any picture has some), S side
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

from vitrail.data.pictures import About, pictures
from vitrail.data.pictures.classes import READERS as CLASSES
from vitrail.data.pictures.classes import Classes, Part
from vitrail.data.pictures.emoji import LEFT_OUT, MISNAMED, VENDORS
from vitrail.data.pictures.pixels import trimmed
from vitrail.data.sources import SOURCES, home, source
from vitrail.data.sources.progress import bar
from vitrail.errors import DataError, ImageError

_FORMAT = "vitrail collection 2"


@dataclass(frozen=True, eq=False)
class Collection:
    abouts: tuple[About, ...]
    pixels: Tensor  # uint8 (N, C, S, S)

    def __len__(self) -> int:
        return len(self.abouts)

    def save(self, path: Path) -> None:
        """safetensors, the pixels deflated."""
        flat = zlib.compress(self.pixels.numpy().tobytes(), level=4)
        about = {"format": _FORMAT, "shape": json.dumps(list(self.pixels.shape))}
        texts = msgspec.json.encode(self.abouts)
        tensors = {"pixels": flat, "abouts": zlib.compress(texts)}
        save_file({name: torch.frombuffer(bytearray(x), dtype=torch.uint8) for name, x in tensors.items()}, path, about)

    @classmethod
    def load(cls, path: Path) -> "Collection":
        """A file that `save` wrote; anything else is refused."""
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise ValueError("it is not one")
                texts, flat = (
                    zlib.decompress(file.get_tensor(name).numpy().tobytes()) for name in ("abouts", "pixels")
                )
            shape = json.loads(metadata["shape"])
            pixels = torch.frombuffer(bytearray(flat), dtype=torch.uint8).view(shape)
            abouts = msgspec.json.decode(texts, type=tuple[About, ...])
            if len(shape) != 4 or len(abouts) != len(pixels):
                raise ValueError(f"{len(abouts)} pictures are described, and there are {shape}")
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError, zlib.error) as error:
            raise DataError(f"{path} is no collection of pictures: {error}", "remove it; it is made again") from None
        return cls(abouts, pixels)


def collection(name: str, side: int, trim: bool = False) -> Collection:
    """The pictures of a source (`vitrail data list`) or a folder, at one size: fetched and made the first time.

    What is not square is squashed, as our towers see all pictures, or with `trim` cut to the square around what is
    opaque, where a picture has opacity. Those that cannot be read are left out, and counted.
    """
    if side < 1:
        raise DataError(f"pictures of {side} pixels", "give at least 1")
    if name in CLASSES:  # arrays already
        return _of_classes(name, side)
    made_of = _made_of(name, side, trim)
    file = home() / "collections" / f"{Path(name).name.replace(':', '-')}-{side}-{made_of}.safetensors"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        _gathered(name, side, trim).save(partial)
        partial.replace(file)
    return Collection.load(file)


def _made_of(name: str, side: int, trim: bool) -> str:
    """Another version of a source, what its reader mends, or another file in a folder, makes another collection."""
    parts: list[object] = [_FORMAT, name, side, *(["trim"] if trim else [])]
    parts += [mended[name] for mended in (LEFT_OUT, MISNAMED) if name in mended]
    if name in SOURCES:
        rows = [source(part) for part in ((name, "emojibase") if name in VENDORS else (name,))]
        parts += [(row.package, row.version) for row in rows]
    elif Path(name).is_dir():
        files = sorted(path for path in Path(name).rglob("*") if path.is_file())
        parts += [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _of_classes(name: str, side: int) -> Collection:
    opened = pictures(name)
    assert isinstance(opened, Classes)
    parts: tuple[Part, ...] = ("train", "test")
    images = torch.cat([torch.from_numpy(opened.part(part).images) for part in parts]).permute(0, 3, 1, 2)
    if images.shape[-1] != side:
        small = [
            F.interpolate(some.float(), (side, side), mode="bicubic", antialias=True) for some in images.split(4096)
        ]
        images = torch.cat([some.round().clamp(0, 255).to(torch.uint8) for some in small])
    return Collection(tuple(opened.about(item) for item in range(len(opened))), images.contiguous())


def _gathered(name: str, side: int, trim: bool) -> Collection:
    opened, abouts, cells, lost = pictures(name), [], [], []
    with bar(f"gathering {name}", len(opened), unit="picture") as progress:
        for item in range(len(opened)):
            about = opened.about(item)
            try:
                rgba = opened.rgba(item, side)
                if trim and (rgba[..., 3] < 255).any():
                    rgba = trimmed(opened.rgba(item, 2 * side), side)
                cells.append(_squared(rgba, side))
                abouts.append(about)
            except ImageError:
                lost.append(about.id)
            progress.update()
    if lost:
        sys.stderr.write(
            f"{name}: {len(lost)} of {len(opened)} pictures cannot be read and are left out: {lost[0]}, …\n"
        )
    if not cells:
        raise DataError(f"{name} holds no picture that can be read", "check the files, or fetch it again")
    pixels = np.stack(cells)
    opaque = bool((pixels[:, 3] == 255).all())
    return Collection(tuple(abouts), torch.from_numpy(pixels[:, :3].copy() if opaque else pixels))


def _squared(rgba: np.ndarray, side: int) -> np.ndarray:
    """(H, W, 4) → (4, S, S)"""
    if rgba.shape[:2] != (side, side):
        rgba = np.asarray(Image.fromarray(rgba).resize((side, side), Image.Resampling.LANCZOS))
    return rgba.transpose(2, 0, 1)
