"""Decodes image bytes to the pixels that an image transform needs, as fast as possible without visible loss.

A JPEG is decoded at ½, ¼ or ⅛ of its size if that still has more pixels than needed, and then resized with torch's
vectorized kernel. Its 8-bit results differ from Pillow's by one grey level. Everything else (other formats, CMYK,
damaged but readable files) goes through `load_image`.

Shapes: H and W, height and width.
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
from vitrail.processing.image_layout import PIL_RESAMPLING, Rectangle, Resample, ResolutionPolicy, Size
from vitrail.processing.image_loading import MAX_PIXELS, load_image
from vitrail.processing.resolution_policies import CropPolicy, LetterboxPolicy, NaFlexPolicy, NaivePolicy, NativePolicy

# Decoding to barely more than the target size (900 → 225 → 224) reduced one of six photographs to 37 dB against full
# decoding. With a margin of an eighth, the minimum was about 40 dB. `perf/shards.py` measures it for 1024 → 224.
DECODE_MARGIN = 1.125

_ORIENTATION = 0x0112
_UPRIGHT = {  # EXIF orientation → function that turns (H, W, 3) upright
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
    """Random resized crop: a rectangle of random area and aspect ratio, resized to image_size × image_size.

    `area` is a range of fractions of the image area. `horizontal_flip` mirrors half of the images, which makes "left
    of" in captions wrong.
    """

    image_size: int = 224
    area: tuple[float, float] = (0.35, 1.0)
    aspect_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    horizontal_flip: bool = False
    resample: Resample = "bicubic"

    def __post_init__(self) -> None:
        if (
            self.image_size < 1
            or not 0 < self.area[0] <= self.area[1] <= 1
            or not 0 < self.aspect_ratio[0] <= self.aspect_ratio[1]
        ):
            raise ConfigError(
                f"RandomCrop has image_size {self.image_size}, area {self.area}, aspect_ratio {self.aspect_ratio}",
                "give a size of at least 1, and ranges from low to high; areas are within 0 … 1",
            )

    def sample_crop(self, height: int, width: int, seed: tuple[int, ...]) -> tuple[Rectangle, bool]:
        """Sample the rectangle, and whether it is mirrored. The result is a function of `seed`."""
        random = np.random.default_rng(seed).random(5)
        area = height * width * (self.area[0] + random[0] * (self.area[1] - self.area[0]))
        low, high = (math.log(a) for a in self.aspect_ratio)
        aspect = math.exp(low + random[1] * (high - low))  # width / height; wide and tall are equally likely
        h, w = math.sqrt(area / aspect), math.sqrt(area * aspect)
        fit = min(1.0, height / h, width / w)  # an elongated image does not contain a square of its area
        h, w = max(1, round(h * fit)), max(1, round(w * fit))
        top, left = int(random[2] * (height - h + 1)), int(random[3] * (width - w + 1))
        return (top, left, h, w), bool(self.horizontal_flip and random[4] < 0.5)


# Transforms that give one view. Recipes select them by their tags.
ImageTransform: TypeAlias = NaivePolicy | CropPolicy | LetterboxPolicy | NativePolicy | NaFlexPolicy | RandomCrop


class _Shape(NamedTuple):
    """Transform of an upright image: crop to `source`, resize, crop to `window`, mirror."""

    source: Rectangle
    resized: Size
    window: Rectangle
    mirrored: bool


def decode_image(data: bytes, transform: ImageTransform | None = None, seed: tuple[int, ...] = (0,)) -> np.ndarray:
    """Decode an image, upright, as uint8 (H, W, 3): whole, or transformed. `seed` determines a random transform.

    Raises `ImageError` if the image cannot be decoded.
    """
    if transform is not None and data[:2] == b"\xff\xd8":
        pixels = _decode_downscaled(data, transform, seed)
        if pixels is not None:
            return pixels
    image = load_image(data)
    if transform is None:
        return np.array(image)
    if isinstance(transform, ResolutionPolicy):
        return np.array(transform.apply(image)[0])
    (top, left, height, width), mirrored = transform.sample_crop(image.height, image.width, seed)
    box = (left, top, left + width, top + height)
    pixels = np.array(
        image.resize((transform.image_size, transform.image_size), PIL_RESAMPLING[transform.resample], box)
    )
    return pixels[:, ::-1].copy() if mirrored else pixels


def require_simplejpeg() -> Any:
    """Import simplejpeg, or raise `DataError`. There is no fallback, because another decoder gives slightly different
    pixels."""
    try:
        import simplejpeg
    except ImportError:
        raise DataError(
            "decoding JPEGs needs simplejpeg, which is not installed", "pip install 'vitrail[data]'"
        ) from None
    return simplejpeg


def _decode_downscaled(data: bytes, look: ImageTransform, chance: tuple[int, ...]) -> np.ndarray | None:
    """Decode a JPEG at reduced size and transform it. None if the image needs `load_image`."""
    simplejpeg = require_simplejpeg()
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        orientation = _read_orientation(data)
    except Exception:  # either decoder may raise anything on a damaged header; `load_image` reports the error
        return None
    if colours not in ("YCbCr", "Gray", "RGB") or height * width > MAX_PIXELS:
        return None
    upright = (width, height) if orientation >= 5 else (height, width)
    if isinstance(look, RandomCrop):
        shape = _sample_shape(look, *upright, chance)
    else:
        shape = _get_policy_shape(look, *upright)  # pyrefly: ignore (frozen structs have a hash)
    if shape is None:
        return None
    factor = _choose_factor(shape, height, width, exact=orientation > 1)
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=-(-height // factor), min_width=-(-width // factor))
    except ValueError:  # damaged; Pillow tolerates more
        return None
    pixels = _UPRIGHT[orientation](pixels)
    extent = (upright[0] / factor, upright[1] / factor)  # size of the image, which may end inside the last pixel
    if shape.source != (0, 0, *upright):
        top, left, height, width = _scale_rectangle(shape.source, factor, extent)
        pixels, extent = pixels[top : top + height, left : left + width], (height, width)
    pixels = _resize(pixels, extent, shape.resized, look.resample)
    top, left, height, width = shape.window
    pixels = pixels[top : top + height, left : left + width]
    return np.ascontiguousarray(pixels[:, ::-1] if shape.mirrored else pixels)


@functools.lru_cache(maxsize=4096)
def _get_policy_shape(look: ResolutionPolicy, height: int, width: int) -> _Shape | None:
    """Return what a policy does, or None if it pads or resamples in a way that torch does not support."""
    view = look.layout(height, width).views[0]
    (tall, wide), top, left = view.resized_size, -view.offset[0], -view.offset[1]
    inside = 0 <= top <= tall - view.canvas_size[0] and 0 <= left <= wide - view.canvas_size[1]
    if look.resample == "lanczos" or view.source != (0, 0, height, width) or not inside:
        return None
    return (
        _Shape(view.source, view.resized_size, (top, left, *view.canvas_size), False)
        if tall * wide <= MAX_PIXELS
        else None
    )


def _sample_shape(look: RandomCrop, height: int, width: int, chance: tuple[int, ...]) -> _Shape | None:
    source, mirrored = look.sample_crop(height, width, chance)
    size = (look.image_size, look.image_size)
    return None if look.resample == "lanczos" else _Shape(source, size, (0, 0, *size), mirrored)


def _choose_factor(shape: _Shape, height: int, width: int, *, exact: bool) -> int:
    """Return by how much the image may be downscaled in decoding.

    `exact`: only factors that divide the size, because a rotation would move a partial pixel to the front.
    """
    for factor in (8, 4, 2):
        enough = all(shape.source[2 + i] >= factor * DECODE_MARGIN * shape.resized[i] for i in (0, 1))
        if enough and not (exact and (height % factor or width % factor)):
            return factor
    return 1


def _scale_rectangle(source: Rectangle, factor: int, extent: tuple[float, float]) -> Rectangle:
    """Return the rectangle in whole pixels of the downscaled image."""
    corner, sides = [], []
    for start, side, limit in zip(source[:2], source[2:], map(int, extent), strict=True):
        sides.append(max(1, min(round(side / factor), limit)))
        corner.append(min(round(start / factor), limit - sides[-1]))
    return corner[0], corner[1], sides[0], sides[1]


def _resize(pixels: np.ndarray, extent: tuple[float, float], size: Size, resample: Resample) -> np.ndarray:
    """Resize (H, W, 3) to (*size, 3), where the image covers only `extent` of the input."""
    shape = pixels.shape[:2]
    if shape == extent == size:
        return pixels
    x = torch.from_numpy(np.ascontiguousarray(pixels))[None].permute(0, 3, 1, 2)  # (1, 3, H, W), channels last
    if shape == extent:
        y = functional.interpolate(x, size, mode=resample, antialias=True)
    else:  # torch derives the size from the scales, rounded down: add a little, so that no pixel is lost
        scales = [(1 + 1e-6) * side / end for side, end in zip(size, extent, strict=True)]
        y = functional.interpolate(x, scale_factor=scales, mode=resample, antialias=True)
    return y[0].permute(1, 2, 0).numpy()


def _read_orientation(data: bytes) -> int:
    """Return the EXIF orientation, 1 … 8. Pillow parses it only if the file has an EXIF segment."""
    position = 2
    while data[position : position + 1] == b"\xff" and data[position + 1] not in (0xDA, 0xD9):
        if data[position + 1] == 0xE1:
            value = Image.open(io.BytesIO(data), formats=("JPEG", "MPO")).getexif().get(_ORIENTATION, 1)
            return value if value in _UPRIGHT else 1
        position += (
            1 if data[position + 1] == 0xFF else 2 + max(2, int.from_bytes(data[position + 2 : position + 4], "big"))
        )
    return 1
