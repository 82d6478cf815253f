"""A picture's file as pixels with opacity: uint8 (H, W, 4)."""

import io
import math
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from vitrail.errors import DataError, ImageError
from vitrail.processing.images import FORMATS, MAX_PIXELS, load_image

RASTER = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif")
SUFFIXES = (*RASTER, ".svg")
MAX_SIDE = math.isqrt(MAX_PIXELS)
OPAQUE = 32  # of 255: what is fainter is the end of a shadow
CLOSEST = 1.5  # how much larger a trimmed picture may be: a small square and a large one are two emoji

# What a drawing refers to outside itself: files of the machine that it was drawn on, or of this one.
_OUTSIDE = re.compile(r"""(href\s*=\s*)(?:"(?!\#|data:)[^"]*"|'(?!\#|data:)[^']*')""")


def read_rgba(path: Path, side: int | None = None) -> np.ndarray:
    """The picture with its longer side as wanted: a drawing is rasterised at it, a raster is resized to it."""
    return _drawn(path, side) if path.suffix.lower() == ".svg" else fitted(_raster(path), side)


def fitted(image: Image.Image, side: int | None) -> np.ndarray:
    """An RGBA picture resized, by opacity-weighted averages, so that its longer side is `side`."""
    _check(side)
    longer = max(image.size)
    if side is not None and side != longer:
        image = image.resize([max(1, round(n * side / longer)) for n in image.size], Image.Resampling.LANCZOS)
    return np.array(image)


def trimmed(rgba: np.ndarray, side: int) -> np.ndarray:
    """(H, W, 4) → (side, side, 4): what is opaque in the middle of a square that its longer side fills, so that a
    design with wide margins is as large as one without. Give it at twice the side or so: margins cost detail. A picture
    that is opaque everywhere keeps its edges and its shape, and is only `fitted`."""
    _check(side)
    if (rgba[..., 3] == 255).all() or not (seen := rgba[..., 3] >= OPAQUE).any():
        return fitted(Image.fromarray(rgba), side)
    (top, bottom), (left, right) = (np.flatnonzero(seen.any(axis))[[0, -1]] + (0, 1) for axis in (1, 0))
    whole = max(int(bottom - top), int(right - left), math.ceil(max(seen.shape) / CLOSEST))
    x, y = (round(float(first + last - whole) / 2) for first, last in ((left, right), (top, bottom)))
    # Beyond its edges a picture is transparent.
    return fitted(Image.fromarray(rgba).crop((x, y, x + whole, y + whole)), side)


def _check(side: int | None) -> None:
    if side is not None and not 1 <= side <= MAX_SIDE:
        raise ImageError(f"a picture with a longer side of {side}", f"give 1 … {MAX_SIDE} pixels")


def _raster(path: Path) -> Image.Image:
    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    # Broken files raise nearly anything; the reading below says what is wrong with them.
    with suppress(Exception), Image.open(path, formats=formats) as image:
        if image.has_transparency_data and image.width * image.height <= MAX_PIXELS:
            return ImageOps.exif_transpose(image).convert("RGBA")
    return load_image(path, frame=0).convert("RGBA")


def _drawn(path: Path, side: int | None) -> np.ndarray:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _undrawn(str(path), error) from None
    return drawn(text, side, str(path))


def drawn(svg: str, side: int | None, called: str) -> np.ndarray:
    """An SVG's text as pixels; `called` is what an error names."""
    _check(side)
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        raise DataError(
            f"resvg_py is needed to draw {called} and is not installed", "pip install 'vitrail[data]'"
        ) from None
    # No fonts of the system, so that a drawing looks alike everywhere; without dots per inch millimetres are lost.
    draw = {"svg_string": _OUTSIDE.sub(r'\1""', svg), "skip_system_fonts": True, "dpi": 96.0}
    try:
        if side is None:
            return _decoded(svg_to_bytes(**draw))
        # Both sides are a box that the drawing is fitted into by its own proportions, up to a pixel too high.
        pixels = _decoded(svg_to_bytes(**draw, width=side, height=side))
        return pixels if pixels.shape[0] <= side else _decoded(svg_to_bytes(**draw, height=side))
    except (OSError, ValueError) as error:
        raise _undrawn(called, error) from None


def _undrawn(called: str, error: Exception) -> ImageError:
    reason = " ".join(str(error).split())[:200]
    return ImageError(f"{called} cannot be drawn: {reason}", "check that it is an SVG")


def _decoded(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        return np.array(image.convert("RGBA"))
