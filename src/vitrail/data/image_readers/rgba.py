"""Image files as pixels with opacity: uint8 (H, W, 4)."""

import io
import math
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from vitrail.errors import DataError, ImageError
from vitrail.processing.image_loading import IMAGE_FORMATS, MAX_PIXELS, load_image

RASTER_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif")
READABLE_SUFFIXES = (*RASTER_SUFFIXES, ".svg")
MAX_IMAGE_SIZE = math.isqrt(MAX_PIXELS)
MIN_ALPHA = 32  # of 255; fainter pixels are the edge of a shadow
MAX_ZOOM = 1.5  # largest enlargement of a trimmed image: a small square and a large one are two emoji

# References of an SVG to files outside of it.
_EXTERNAL_REFERENCE = re.compile(r"""(href\s*=\s*)(?:"(?!\#|data:)[^"]*"|'(?!\#|data:)[^']*')""")


class ImageFileReader:
    """Base class of readers of image files. Subclasses set `paths`."""

    paths: list[Path]

    def __len__(self) -> int:
        return len(self.paths)

    def load_rgba(self, item: int, image_size: int | None = None) -> np.ndarray:
        return read_rgba(self.paths[item], image_size)


def read_rgba(path: Path, image_size: int | None = None) -> np.ndarray:
    """Read an image with a given longer side: SVG is rendered at this size, raster formats are resized."""
    return (
        _render_file(path, image_size) if path.suffix.lower() == ".svg" else resize_rgba(_open_raster(path), image_size)
    )


def resize_rgba(image: Image.Image, image_size: int | None) -> np.ndarray:
    """Resize an RGBA image to a given longer side, weighted by opacity."""
    _check_size(image_size)
    longer = max(image.size)
    if image_size is not None and image_size != longer:
        image = image.resize([max(1, round(n * image_size / longer)) for n in image.size], Image.Resampling.LANCZOS)
    return np.array(image)


def trim_rgba(rgba: np.ndarray, image_size: int) -> np.ndarray:
    """Crop (H, W, 4) to the opaque part in the centre of a square, and resize to (image_size, image_size, 4).

    Designs with wide margins become as large as those without. Give the input at about twice the size, because margins
    cost detail. A fully opaque image keeps its edges and aspect ratio, and is only resized.
    """
    _check_size(image_size)
    if (rgba[..., 3] == 255).all() or not (visible := rgba[..., 3] >= MIN_ALPHA).any():
        return resize_rgba(Image.fromarray(rgba), image_size)
    (top, bottom), (left, right) = (np.flatnonzero(visible.any(axis))[[0, -1]] + (0, 1) for axis in (1, 0))
    crop_size = max(int(bottom - top), int(right - left), math.ceil(max(visible.shape) / MAX_ZOOM))
    x, y = (round(float(first + last - crop_size) / 2) for first, last in ((left, right), (top, bottom)))
    # Outside of its edges the image is transparent.
    return resize_rgba(Image.fromarray(rgba).crop((x, y, x + crop_size, y + crop_size)), image_size)


def _check_size(side: int | None) -> None:
    if side is not None and not 1 <= side <= MAX_IMAGE_SIZE:
        raise ImageError(f"the longer side is {side} pixels", f"give 1 … {MAX_IMAGE_SIZE} pixels")


def _open_raster(path: Path) -> Image.Image:
    Image.init()
    formats = [name for name in IMAGE_FORMATS if name in Image.OPEN]
    # Damaged files raise many errors; `load_image` below reports what is wrong.
    with suppress(Exception), Image.open(path, formats=formats) as image:
        if image.has_transparency_data and image.width * image.height <= MAX_PIXELS:
            return ImageOps.exif_transpose(image).convert("RGBA")
    return load_image(path, frame=0).convert("RGBA")


def _render_file(path: Path, side: int | None) -> np.ndarray:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _render_error(str(path), error) from None
    return render_svg(text, side, str(path))


def render_svg(svg: str, image_size: int | None, name: str) -> np.ndarray:
    """Render an SVG text as pixels. `name` is used in error messages."""
    _check_size(image_size)
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        raise DataError(f"{name} needs resvg_py, which is not installed", "pip install 'vitrail[data]'") from None
    # System fonts are disabled, so that results are the same everywhere. Units such as millimetres need a dpi value.
    options = {"svg_string": _EXTERNAL_REFERENCE.sub(r'\1""', svg), "skip_system_fonts": True, "dpi": 96.0}
    try:
        if image_size is None:
            return _decode_png(svg_to_bytes(**options))
        # Width and height are a bounding box that keeps the aspect ratio; the result may be a pixel too high.
        pixels = _decode_png(svg_to_bytes(**options, width=image_size, height=image_size))
        return pixels if pixels.shape[0] <= image_size else _decode_png(svg_to_bytes(**options, height=image_size))
    except (OSError, ValueError) as error:
        raise _render_error(name, error) from None


def _render_error(name: str, error: Exception) -> ImageError:
    reason = " ".join(str(error).split())[:200]
    return ImageError(f"{name} cannot be rendered: {reason}", "check that it is a valid SVG")


def _decode_png(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        return np.array(image.convert("RGBA"))
