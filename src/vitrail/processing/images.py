"""Read any picture as RGB, or say plainly why not; and turn RGB into the numbers a tower reads."""

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

Source: TypeAlias = "str | os.PathLike[str] | bytes | Image.Image | np.ndarray | torch.Tensor"

# Pillow warns above this many pixels (a quarter of a gigabyte of RGB); so it is where we stop by default.
MAX_PIXELS = 89_478_485
_ALONE = threading.Lock()
_HUGE = "shrink it, or raise max_pixels if you trust it (`vitrail grid` takes --max-pixels)"

# Raster formats only: Pillow would hand an EPS to Ghostscript, and has readers nobody has looked at for years.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "TIFF", "BMP", "PPM", "JPEG2000", "AVIF", "TGA")

# What Pillow's readers raise on broken files; `tests/processing/test_images.py` feeds them thousands. Warnings are
# there for those who turn them into errors.
_BROKEN = (
    OSError,  # truncated, unidentified, libtiff
    SyntaxError,  # Pillow's word for a malformed file
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

_UPRIGHT = {  # EXIF orientation → what brings the picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112


def load_image(
    source: Source,
    *,
    frame: int | None = None,
    max_pixels: int = MAX_PIXELS,
    background: tuple[int, int, int] = (255, 255, 255),
) -> Image.Image:
    """The picture as 8-bit RGB, upright; an `ImageError` with the remedy for whatever cannot be one.

    `source` is a file, its bytes, a PIL picture, a numpy array (H, W) or (H, W, C), or a torch tensor (H, W) or
    (C, H, W), with 1, 3 or 4 channels of uint8, uint16, bool or floats within 0…1.

    The size is checked against `max_pixels` before anything is decoded. Transparency is laid over `background` (white,
    as transformers does since 5; a plain `convert("RGB")` shows whatever colour hid under it). 16-bit and float
    pictures are scaled to 8 bits, not clipped. Of an animation or a stack of pages, `frame` says which is meant.
    """
    if len(background) != 3 or not all(0 <= level <= 255 for level in background):
        raise ConfigError(f"background {background}", "give three levels of 0…255")
    with _pillow_allows(max_pixels):
        if isinstance(source, Image.Image):
            return _read(source, getattr(source, "filename", "") or "the given picture", frame, max_pixels, background)
        if isinstance(source, bytes):
            return _open(io.BytesIO(source), f"picture of {len(source):,} bytes", frame, max_pixels, background)
        if isinstance(source, (str, os.PathLike)):
            return _load_file(Path(source), frame, max_pixels, background)
    array = _as_array(source)
    if frame:
        raise ImageError(f"frame {frame} of an array of shape {array.shape}", "index the array yourself")
    _check_size(f"array of shape {array.shape}", array.shape[0], array.shape[1], max_pixels)
    return _flatten(_to_8_bits(array, f"array of shape {array.shape}"), background)


@contextmanager
def _pillow_allows(max_pixels: int) -> Iterator[None]:
    """Pillow refuses twice its own limit, which is one number for the whole process, when it opens a file and again
    between frames. A larger limit of ours raises it meanwhile, for one thread at a time; other threads that use Pillow
    by themselves have the raised one meanwhile too."""
    if max_pixels <= MAX_PIXELS:
        yield
        return
    with _ALONE:
        kept, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = kept


class Norm(NamedTuple):
    """Mean and standard deviation a channel, of values in 0…1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


NORMS = {
    "clip": Norm((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "imagenet": Norm((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": Norm((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


def to_array(
    image: Image.Image,
    mean: Sequence[float] = NORMS["clip"].mean,
    std: Sequence[float] = NORMS["clip"].std,
    rescale: float = 1 / 255,
) -> torch.Tensor:
    """An RGB picture as float32 (C, H, W): (pixel × rescale − mean) / std.

    A byte has 256 values, so they are worked out once a channel and looked up. Each step is rounded where transformers
    rounds it: the result is the same bit for bit.
    """
    import torch

    if image.mode != "RGB":
        raise ImageError(f"a picture of mode {image.mode}", "read it with load_image first")
    levels = (np.arange(256) * rescale).astype(np.float32)  # product in float64, then rounded
    table = (levels - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]  # (C, 256)
    pixels = np.asarray(image)  # (H, W, C)
    return torch.from_numpy(np.stack([row[pixels[..., c]] for c, row in enumerate(table)]))


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _load_file(path: Path, *how: Any) -> Image.Image:
    if str(path).startswith(("http:", "https:")):
        raise ImageError(f"{path} is an address, not a file", "download it first")
    try:
        if path.is_dir():
            raise ImageError(f"{path} is a directory", "name the picture in it")
        if not path.exists():
            raise ImageError(f"{path} does not exist", "check the spelling and the folder you are in")
        if not path.is_file():  # a pipe or a device could make us wait, or read, for ever
            raise ImageError(f"{path} is not a regular file", "save the picture to a file first")
        with path.open("rb") as file:
            return _open(file, str(path), *how)
    except (OSError, ValueError) as error:  # no permission, name too long, null byte in the name
        raise ImageError(
            f"{path!s:.200} cannot be read: {_reason(error)}", "check the file and its permissions"
        ) from error


def _open(file: Any, name: str, *how: Any) -> Image.Image:
    if not file.read(1):
        raise ImageError(f"{name} is empty", "copy or download it again")
    try:
        image = Image.open(file, formats=_formats())
    except Image.UnidentifiedImageError as error:
        raise ImageError(
            f"{name} is not a picture, or its header is broken", f"convert it to one of {', '.join(FORMATS)}"
        ) from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name} is huge: {error}", _HUGE) from error
    except _BROKEN as error:
        raise _corrupt(name, error) from error
    with image:
        return _read(image, name, *how)


def _formats() -> tuple[str, ...]:
    """Those of FORMATS that this build of Pillow can read."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _read(
    image: Image.Image, name: str, frame: int | None, max_pixels: int, background: tuple[int, int, int]
) -> Image.Image:
    """Choose the frame, check the declared size, decode, turn upright, convert. Errors of Pillow end here."""
    try:
        _check_size(name, image.height, image.width, max_pixels)
        _seek(image, name, frame)
        _check_size(name, image.height, image.width, max_pixels)  # pages of a TIFF differ in size
        image.load()
        upright = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
        rgb = _to_rgb(image.transpose(upright) if upright is not None else image, name, background)
        rgb.info.clear()  # an orientation or transparency left there would be applied again
        return rgb
    except _BROKEN as error:
        raise _corrupt(name, error) from error


def _seek(image: Image.Image, name: str, frame: int | None) -> None:
    count = getattr(image, "n_frames", 1)
    if frame is None:
        # The further pictures of an MPO are another eye's view or a depth map: the first is the photograph.
        if count > 1 and image.format != "MPO":
            raise ImageError(
                f"{name} holds {count} frames",
                f"save the one that is meant, or load it with frame=0 … {count - 1} (`vitrail grid` takes --frame)",
            )
        return
    if not 0 <= frame < count:
        raise ImageError(f"{name} has no frame {frame}", f"it has {count}: give 0 … {count - 1}")
    if count > 1:
        image.seek(frame)


def _check_size(name: str, height: int, width: int, max_pixels: int) -> None:
    if height < 1 or width < 1:
        raise ImageError(f"{name} is {height}×{width} pixels", "both sides must be at least one pixel")
    if height * width > max_pixels:
        raise ImageError(
            f"{name} claims {height:,}×{width:,} pixels, over the limit of {max_pixels:,}",
            _HUGE,
        )


def _corrupt(name: str, error: BaseException) -> ImageError:
    return ImageError(f"{name} is corrupt or truncated: {_reason(error)}", "copy, download or export it again")


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# ── modes ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _to_rgb(image: Image.Image, name: str, background: tuple[int, int, int]) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        return _flatten(_deep(image, name), background)
    if image.mode == "La":  # premultiplied grey: Pillow only goes one step back
        image = image.convert("LA")
    if image.has_transparency_data:
        return _flatten(image.convert("RGBA"), background)
    if image.mode in ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"):
        return image.convert("RGB")
    raise ImageError(f"{name} has the mode {image.mode}", "convert it to RGB first")


def _deep(image: Image.Image, name: str) -> Image.Image:
    """Modes I;16, I and F as 8 bits. Mode I, 32 bits wide, is what Pillow reads 16-bit greys into."""
    values = np.asarray(image)
    if image.mode == "I":
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ImageError(
                f"{name} holds values of {values.min()} … {values.max()}, beyond 16 bits", "scale it to 0 … 65535 first"
            )
        values = values.astype(np.uint16)
    grey = _to_8_bits(values, name)
    key = image.info.get("transparency")
    if isinstance(key, int):  # one level of a 16-bit PNG may mean "nothing here"
        grey.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    return grey


def _flatten(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    if image.mode not in ("LA", "RGBA"):
        return image.convert("RGB")
    ground = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")


# ── arrays ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _as_array(source: object) -> np.ndarray:
    """A numpy array (H, W) or (H, W, C) of 1, 3 or 4 channels."""
    torch = sys.modules.get("torch")  # whoever has a tensor has imported torch
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
            f"{type(source).__name__} is not a picture", "give a path, bytes, a PIL picture, an array or a tensor"
        )
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise ImageError(f"array of shape {shape}", f"give (H, W) or {order} with 1, 3 or 4 channels")
    return array


def _to_8_bits(array: np.ndarray, name: str) -> Image.Image:
    """(H, W) or (H, W, C) as a picture of mode L, RGB or RGBA, the whole range kept."""
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * np.uint8(255)
    elif array.dtype.kind == "u" and array.dtype.itemsize == 2:
        array = ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)  # nearest; 65535 → 255
    elif array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):  # also true of NaN
            raise ImageError(
                f"{name} holds floats of {low:.4g} … {high:.4g}",
                "scale it into 0 … 1 (divide by 255 if it was 0 … 255), or give uint8; NaN must be filled",
            )
        array = np.round(array.astype(np.float64) * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise ImageError(f"{name} is of {array.dtype}", "give uint8, uint16, bool or floats within 0 … 1")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    return Image.fromarray(np.ascontiguousarray(array))
