"""A picture's bytes → the pixels a policy asks for, as fast as they can be had without losing any that show.

A JPEG is decoded at ½, ¼ or ⅛ of its size where that still leaves more pixels than are asked for, and then resized with
torch's vectorised kernel, whose 8-bit results differ from Pillow's by a grey level. Everything else (other formats,
CMYK, damaged files that can still be read) goes through `load_image`.

H, W height and width
"""

import functools
import io
import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from vitrail.config import Config
from vitrail.errors import ConfigError, DataError
from vitrail.processing.cut import RESAMPLE, Policy, Rectangle, Resample, Size
from vitrail.processing.images import MAX_PIXELS, load_image
from vitrail.processing.resolution import Crop, Letterbox, NaFlex, Naive, Native

# Decoded to hardly more than the size asked for (900 → 225 → 224), one of six photographs fell to 37 dB against a whole
# decode; with an eighth more to spare the least was about 40 dB. `perf/shards.py` prints it for 1024 → 224.
SPARE = 1.125

_ORIENTATION = 0x0112
_UPRIGHT = {  # EXIF orientation → what brings (H, W, 3) upright
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a[::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a[:, ::-1].swapaxes(0, 1),
}


class RandomCrop(Config, tag_field="policy", tag="random"):
    """A rectangle of a random share of the picture's area and a random shape, resized to size × size. With `flip` half
    of them are mirrored, which also turns every "left of" in a caption into a lie."""

    size: int = 224
    area: tuple[float, float] = (0.35, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = False
    resample: Resample = "bicubic"

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 < self.area[0] <= self.area[1] <= 1 or not 0 < self.aspect[0] <= self.aspect[1]:
            raise ConfigError(
                f"RandomCrop: size {self.size}, area {self.area}, aspect {self.aspect}",
                "give a size of at least 1 and ranges from low to high, of areas within 0 … 1",
            )

    def draw(self, height: int, width: int, chance: tuple[int, ...]) -> tuple[Rectangle, bool]:
        """The rectangle, and whether it is mirrored: a function of `chance`."""
        random = np.random.default_rng(chance).random(5)
        area = height * width * (self.area[0] + random[0] * (self.area[1] - self.area[0]))
        low, high = (math.log(a) for a in self.aspect)
        aspect = math.exp(low + random[1] * (high - low))  # width / height, as likely wide as tall
        h, w = math.sqrt(area / aspect), math.sqrt(area * aspect)
        fit = min(1.0, height / h, width / w)  # a long picture has no square of its own area
        h, w = max(1, round(h * fit)), max(1, round(w * fit))
        top, left = int(random[2] * (height - h + 1)), int(random[3] * (width - w + 1))
        return (top, left, h, w), bool(self.flip and random[4] < 0.5)


# The policies that show one view. Their tags let a recipe name them.
Look: TypeAlias = Naive | Crop | Letterbox | Native | NaFlex | RandomCrop


class _Shape(NamedTuple):
    """What becomes of an upright picture: a rectangle of it, resized, of which a window is kept."""

    source: Rectangle
    resized: Size
    window: Rectangle
    mirrored: bool


def decode_picture(data: bytes, look: Look | None = None, chance: tuple[int, ...] = (0,)) -> np.ndarray:
    """The picture upright, as uint8 (H, W, 3), whole or as `look` shows it; `chance` decides what a random look does.

    An `ImageError` says why not.
    """
    if look is not None and data[:2] == b"\xff\xd8":
        pixels = _decode_small(data, look, chance)
        if pixels is not None:
            return pixels
    image = load_image(data)
    if look is None:
        return np.array(image)
    if isinstance(look, Policy):
        return np.array(look.apply(image)[0])
    (top, left, height, width), mirrored = look.draw(image.height, image.width, chance)
    box = (left, top, left + width, top + height)
    pixels = np.array(image.resize((look.size, look.size), RESAMPLE[look.resample], box))
    return pixels[:, ::-1].copy() if mirrored else pixels


def need_simplejpeg() -> Any:
    """The JPEG decoder. Without it pixels would be had more slowly, and be slightly different ones: so none are."""
    try:
        import simplejpeg
    except ImportError:
        raise DataError("reading JPEGs quickly needs simplejpeg", "pip install 'vitrail[data]'") from None
    return simplejpeg


def _decode_small(data: bytes, look: Look, chance: tuple[int, ...]) -> np.ndarray | None:
    """The look of a JPEG by way of a smaller picture; None where it must take the long way."""
    simplejpeg = need_simplejpeg()
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        turn = _orientation(data)
    except Exception:  # whatever either decoder raises on a damaged header: the long way says what is wrong
        return None
    if colours not in ("YCbCr", "Gray", "RGB") or height * width > MAX_PIXELS:
        return None
    upright = (width, height) if turn >= 5 else (height, width)
    if isinstance(look, RandomCrop):
        shape = _random_shape(look, *upright, chance)
    else:
        shape = _fixed_shape(look, *upright)  # pyrefly: ignore (frozen structs have a hash)
    if shape is None:
        return None
    factor = _factor(shape, height, width, exact=turn > 1)
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=-(-height // factor), min_width=-(-width // factor))
    except ValueError:  # damaged: Pillow forgives more
        return None
    pixels = _UPRIGHT[turn](pixels)
    extent = (upright[0] / factor, upright[1] / factor)  # of the picture, which may end inside the last pixel
    if shape.source != (0, 0, *upright):
        top, left, height, width = _shrunk(shape.source, factor, extent)
        pixels, extent = pixels[top : top + height, left : left + width], (height, width)
    pixels = _resize(pixels, extent, shape.resized, look.resample)
    top, left, height, width = shape.window
    pixels = pixels[top : top + height, left : left + width]
    return np.ascontiguousarray(pixels[:, ::-1] if shape.mirrored else pixels)


@functools.lru_cache(maxsize=4096)
def _fixed_shape(look: Policy, height: int, width: int) -> _Shape | None:
    """What a policy does, if it neither pads nor resamples in a way torch does not."""
    view = look.cut(height, width).views[0]
    (tall, wide), top, left = view.resized, -view.offset[0], -view.offset[1]
    inside = 0 <= top <= tall - view.canvas[0] and 0 <= left <= wide - view.canvas[1]
    if look.resample == "lanczos" or view.source != (0, 0, height, width) or not inside:
        return None
    return _Shape(view.source, view.resized, (top, left, *view.canvas), False) if tall * wide <= MAX_PIXELS else None


def _random_shape(look: RandomCrop, height: int, width: int, chance: tuple[int, ...]) -> _Shape | None:
    source, mirrored = look.draw(height, width, chance)
    size = (look.size, look.size)
    return None if look.resample == "lanczos" else _Shape(source, size, (0, 0, *size), mirrored)


def _factor(shape: _Shape, height: int, width: int, *, exact: bool) -> int:
    """How many times smaller the picture may be decoded. `exact`: without a rest, which turning would bring to the
    front, where it cannot be left out."""
    for factor in (8, 4, 2):
        enough = all(shape.source[2 + i] >= factor * SPARE * shape.resized[i] for i in (0, 1))
        if enough and not (exact and (height % factor or width % factor)):
            return factor
    return 1


def _shrunk(source: Rectangle, factor: int, extent: tuple[float, float]) -> Rectangle:
    """The rectangle in whole pixels of the smaller picture."""
    corner, sides = [], []
    for start, side, limit in zip(source[:2], source[2:], map(int, extent), strict=True):
        sides.append(max(1, min(round(side / factor), limit)))
        corner.append(min(round(start / factor), limit - sides[-1]))
    return corner[0], corner[1], sides[0], sides[1]


def _resize(pixels: np.ndarray, extent: tuple[float, float], size: Size, resample: Resample) -> np.ndarray:
    """(H, W, 3) → (*size, 3), where the picture reaches to `extent` only."""
    held = pixels.shape[:2]
    if held == extent == size:
        return pixels
    x = torch.from_numpy(np.ascontiguousarray(pixels))[None].permute(0, 3, 1, 2)  # (1, 3, H, W), channels last
    if held == extent:
        y = functional.interpolate(x, size, mode=resample, antialias=True)
    else:  # the size is then taken from the scales, rounded down: a little more than exact, so that none is lost
        scales = [(1 + 1e-6) * side / end for side, end in zip(size, extent, strict=True)]
        y = functional.interpolate(x, scale_factor=scales, mode=resample, antialias=True)
    return y[0].permute(1, 2, 0).numpy()


def _orientation(data: bytes) -> int:
    """1 … 8, as Pillow reads it; it is asked only where the file holds a segment that can say so."""
    at = 2
    while data[at : at + 1] == b"\xff" and data[at + 1] not in (0xDA, 0xD9):
        if data[at + 1] == 0xE1:
            said = Image.open(io.BytesIO(data), formats=("JPEG", "MPO")).getexif().get(_ORIENTATION, 1)
            return said if said in _UPRIGHT else 1
        at += 1 if data[at + 1] == 0xFF else 2 + max(2, int.from_bytes(data[at + 2 : at + 4], "big"))
    return 1
