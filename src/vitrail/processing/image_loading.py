"""Load images as 8-bit RGB, with precise errors, and convert RGB images to normalized tensors."""

from __future__ import annotations

import io
import os
import struct
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from PIL import Image

from vitrail.errors import ConfigError, ImageError

if TYPE_CHECKING:
    import torch

ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | Image.Image | np.ndarray | torch.Tensor"

# Default limit on pixels: the number above which Pillow warns (a quarter of a gigabyte of RGB).
MAX_PIXELS = 89_478_485
STRIP_PIXELS = 4_000_000  # converted at once
MAX_TIFF_PAGES = 5_000
_PILLOW_LOCK = threading.Lock()
_SIZE_REMEDY = "resize the image, or raise max_pixels if you trust the file (`vitrail grid` takes --max-pixels)"

# Raster formats only. Pillow passes EPS files to Ghostscript, and some of its other readers are unmaintained.
IMAGE_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "TIFF", "BMP", "PPM", "JPEG2000", "AVIF", "TGA")

# Exceptions that Pillow's readers raise on broken files; `tests/processing/test_images.py` tests thousands of files.
# `Warning` covers callers that turn warnings into errors.
_PILLOW_ERRORS = (
    OSError,  # truncated, unidentified, libtiff
    SyntaxError,  # raised by Pillow for malformed files
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    AttributeError,
    RuntimeError,  # the AVIF decoder
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Warning,
)

_UPRIGHT_TRANSPOSE = {  # EXIF orientation → transposition that makes the image upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION_TAG = 0x0112


def load_image(
    source: ImageSource,
    *,
    frame: int | None = None,
    max_pixels: int = MAX_PIXELS,
    background: tuple[int, int, int] = (255, 255, 255),
) -> Image.Image:
    """Load an image as upright 8-bit RGB. Raise `ImageError` if the source is not a valid image.

    source      file path, bytes of a file, PIL image, numpy array (H, W) or (H, W, C), or torch tensor (H, W) or
                (C, H, W). Arrays have 1, 3 or 4 channels of uint8, uint16, bool or floats in 0…1.
    frame       index of the frame of an animation or the page of a multi-page file
    max_pixels  limit on the size, checked before decoding
    background  colour under transparent pixels. The default is white, as in transformers 5. A plain `convert("RGB")`
                would show the hidden colour instead.

    16-bit and float images are scaled to 8 bits, not clipped.
    """
    if len(background) != 3 or not all(0 <= level <= 255 for level in background):
        raise ConfigError(f"background is {background}", "give three values of 0…255")
    with _raise_pillow_limit(max_pixels):
        if isinstance(source, Image.Image):
            return _decode(source, getattr(source, "filename", "") or "the given image", frame, max_pixels, background)
        if isinstance(source, bytes):
            return _open_stream(io.BytesIO(source), f"data of {len(source):,} bytes", frame, max_pixels, background)
        if isinstance(source, (str, os.PathLike)):
            return _load_file(Path(source), frame, max_pixels, background)
    array = _as_array(source)
    if frame:
        raise ImageError(f"frame {frame} of an array of shape {array.shape}", "index the array yourself")
    _check_size(f"array of shape {array.shape}", array.shape[0], array.shape[1], max_pixels)
    return _flatten(_to_8_bits(array, f"array of shape {array.shape}"), background)


@contextmanager
def _raise_pillow_limit(max_pixels: int) -> Iterator[None]:
    """Raise Pillow's process-wide pixel limit to `max_pixels` while the context is active.

    Pillow checks twice its limit when it opens a file and again between frames. A lock admits one thread at a time.
    Other threads that use Pillow directly also see the raised limit meanwhile.
    """
    if max_pixels <= MAX_PIXELS:
        yield
        return
    with _PILLOW_LOCK:
        kept, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = kept


class Normalization(NamedTuple):
    """Mean and standard deviation per channel, for values in 0…1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


NORMALIZATIONS = {
    "clip": Normalization((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "imagenet": Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


def to_pixel_values(
    image: Image.Image,
    mean: Sequence[float] = NORMALIZATIONS["clip"].mean,
    std: Sequence[float] = NORMALIZATIONS["clip"].std,
    rescale: float = 1 / 255,
) -> torch.Tensor:
    """Convert an RGB image to normalized float32 (C, H, W): (pixel × rescale − mean) / std.

    A lookup table holds the 256 possible values per channel. Rounding matches transformers bit for bit.
    """
    import torch

    if image.mode != "RGB":
        raise ImageError(f"the image has mode {image.mode}", "load it with load_image first")
    levels = (np.arange(256) * rescale).astype(np.float32)  # product in float64, then rounded
    table = (levels - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]  # (C, 256)
    pixels = np.asarray(image)  # (H, W, C)
    return torch.from_numpy(np.stack([row[pixels[..., c]] for c, row in enumerate(table)]))


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _load_file(path: Path, *options: Any) -> Image.Image:
    if str(path).startswith(("http:", "https:")):
        raise ImageError(f"{path} is a URL, not a file", "download it first")
    try:
        if path.is_dir():
            raise ImageError(f"{path} is a directory", "give the path of an image file in it")
        if not path.exists():
            raise ImageError(f"{path} does not exist", "check the spelling and the current directory")
        if not path.is_file():  # reading a pipe or a device could block forever
            raise ImageError(f"{path} is not a regular file", "save the image to a file first")
        with path.open("rb") as file:
            return _open_stream(file, str(path), *options)
    except (OSError, ValueError) as error:  # no permission, name too long, null byte in the name
        raise ImageError(
            f"{path!s:.200} cannot be read: {_error_text(error)}", "check the file and its permissions"
        ) from error


def _open_stream(file: Any, name: str, *options: Any) -> Image.Image:
    if not file.read(1):
        raise ImageError(f"{name} is empty", "copy or download it again")
    try:
        image = Image.open(file, formats=_readable_formats())
    except Image.UnidentifiedImageError as error:
        raise ImageError(
            f"{name} is not an image, or its header is broken", f"convert it to one of {', '.join(IMAGE_FORMATS)}"
        ) from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name} is too large: {error}", _SIZE_REMEDY) from error
    except _PILLOW_ERRORS as error:
        raise _corrupt_error(name, error) from error
    with image:
        return _decode(image, name, *options)


def _readable_formats() -> tuple[str, ...]:
    """Return the supported formats that this build of Pillow can read."""
    Image.init()
    return tuple(name for name in IMAGE_FORMATS if name in Image.OPEN)


def _decode(
    image: Image.Image, name: str, frame: int | None, max_pixels: int, background: tuple[int, int, int]
) -> Image.Image:
    """Select the frame, check the declared size, decode, rotate upright, convert; wrap Pillow's errors."""
    try:
        _check_size(name, image.height, image.width, max_pixels)
        _check_tiff_pages(image, name)
        _select_frame(image, name, frame)
        _check_size(name, image.height, image.width, max_pixels)  # pages of a TIFF can differ in size
        image.load()
        upright = _UPRIGHT_TRANSPOSE.get(image.getexif().get(_ORIENTATION_TAG, 1))
        rgb = _to_rgb(image, name, background) if upright is None or image.mode != "RGB" else image
        rgb = rgb if upright is None else rgb.transpose(upright)
        rgb.info.clear()  # otherwise the orientation or transparency would be applied again
        return rgb
    except _PILLOW_ERRORS as error:
        raise _corrupt_error(name, error) from error


def _select_frame(image: Image.Image, name: str, frame: int | None) -> None:
    count = getattr(image, "n_frames", 1)
    if frame is None:
        # The other images of an MPO are a stereo view or a depth map. The first image is the photograph.
        if count > 1 and image.format != "MPO":
            raise ImageError(
                f"{name} has {count} frames",
                f"choose one with frame=0 … {count - 1} (`vitrail grid` takes --frame), or save one to a file",
            )
        return
    if not 0 <= frame < count:
        raise ImageError(f"{name} has no frame {frame}", f"it has {count} frames: give 0 … {count - 1}")
    if count > 1:
        image.seek(frame)


def _check_tiff_pages(image: Image.Image, name: str) -> None:
    """Refuse a TIFF with too many pages. Pillow compares each page with all before it."""
    file = getattr(image, "fp", None)
    if image.format != "TIFF" or file is None:
        return
    file.seek(0)
    lead = file.read(16)
    order, is_big = "<" if lead[:2] == b"II" else ">", lead[2:4] in (b"+\0", b"\0+")
    number, offset, entry_bytes = ("Q", "Q", 20) if is_big else ("H", "I", 12)
    at = struct.unpack_from(order + offset, lead, 8 if is_big else 4)[0]
    for _ in range(MAX_TIFF_PAGES + 1):
        if not at:
            return
        file.seek(at)
        raw = file.read(struct.calcsize(order + number))
        if len(raw) < struct.calcsize(order + number):
            return  # Pillow reports what is broken
        file.seek(struct.unpack(order + number, raw)[0] * entry_bytes, os.SEEK_CUR)
        raw = file.read(struct.calcsize(order + offset))
        if len(raw) < struct.calcsize(order + offset):
            return
        at = struct.unpack(order + offset, raw)[0]
    raise ImageError(f"{name} has more than {MAX_TIFF_PAGES:,} pages", "save the page that you need to one file")


def _check_size(name: str, height: int, width: int, max_pixels: int) -> None:
    if height < 1 or width < 1:
        raise ImageError(f"{name} has {height}×{width} pixels", "give at least one pixel on both sides")
    if height * width > max_pixels:
        raise ImageError(
            f"{name} declares {height:,}×{width:,} pixels, more than the limit of {max_pixels:,}",
            _SIZE_REMEDY,
        )


def _corrupt_error(name: str, error: BaseException) -> ImageError:
    return ImageError(f"{name} is corrupt or truncated: {_error_text(error)}", "copy, download or export it again")


def _error_text(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# ── modes ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _to_rgb(image: Image.Image, name: str, background: tuple[int, int, int]) -> Image.Image:
    """Convert to RGB, a large image in strips: the conversions hold several copies in memory."""
    rows = max(1, STRIP_PIXELS // image.width)
    if image.height <= rows or image.mode in ("RGB", "L", "1"):
        return _convert_to_rgb(image, name, background)
    whole = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        whole.paste(_convert_to_rgb(strip, name, background), (0, top))
    return whole


def _convert_to_rgb(image: Image.Image, name: str, background: tuple[int, int, int]) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        return _flatten(_to_8_bit_grey(image, name), background)
    if image.mode == "La":  # premultiplied grey: Pillow converts it only to LA
        image = image.convert("LA")
    if image.has_transparency_data:
        return _flatten(image.convert("RGBA"), background)
    if image.mode in ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"):
        return image.convert("RGB")
    raise ImageError(f"{name} has the mode {image.mode}", "convert it to RGB first")


def _to_8_bit_grey(image: Image.Image, name: str) -> Image.Image:
    """Convert modes I;16, I and F to 8 bits. Pillow loads 16-bit greyscale images in the 32-bit mode I."""
    values = np.asarray(image)
    if image.mode == "I":
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ImageError(
                f"{name} has values of {values.min()} … {values.max()}, beyond 16 bits", "scale it to 0 … 65535 first"
            )
        values = values.astype(np.uint16)
    grey = _to_8_bits(values, name)
    key = image.info.get("transparency")
    if isinstance(key, int):  # a 16-bit PNG can declare one grey value as transparent
        grey.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    return grey


def _flatten(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    if image.mode not in ("LA", "RGBA"):
        return image.convert("RGB")
    backdrop = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(backdrop, image.convert("RGBA")).convert("RGB")


# ── arrays ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _as_array(source: object) -> np.ndarray:
    """Convert an array or tensor to a numpy array (H, W) or (H, W, C) with 1, 3 or 4 channels."""
    torch = sys.modules.get("torch")  # a caller with a tensor has already imported torch
    if torch is not None and isinstance(source, torch.Tensor):
        tensor = source.detach().cpu()
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        array, order = tensor.numpy(), "(C, H, W)"
        shape = array.shape
        array = np.moveaxis(array, 0, -1) if array.ndim == 3 else array
    elif isinstance(source, np.ndarray):
        array, order, shape = source, "(H, W, C)", source.shape
    else:
        raise ImageError(
            f"{type(source).__name__} is not an image", "give a path, bytes, a PIL image, an array or a tensor"
        )
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise ImageError(f"an image array has shape {shape}", f"give (H, W) or {order} with 1, 3 or 4 channels")
    return array


def _to_8_bits(array: np.ndarray, name: str) -> Image.Image:
    """Convert (H, W) or (H, W, C) to an image of mode L, RGB or RGBA, without clipping the range."""
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * np.uint8(255)
    elif array.dtype.kind == "u" and array.dtype.itemsize == 2:
        array = ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)  # nearest; 65535 → 255
    elif array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):  # also true for NaN
            raise ImageError(
                f"{name} has floats of {low:.4g} … {high:.4g}",
                "scale the values to 0 … 1 (divide 0 … 255 by 255), or give uint8; replace NaN values",
            )
        array = np.round(array.astype(np.float64) * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise ImageError(f"{name} has dtype {array.dtype}", "give uint8, uint16, bool or floats in 0 … 1")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    return Image.fromarray(np.ascontiguousarray(array))
