"""Draw an image next to its reconstructions by codecs, and the differences."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from vitrail.evals.metrics import psnr
from vitrail.plots.style import FAINT, INK, SCALE, SOFT, downscale, draw_text, load_font, make_canvas

GAP, LINE, TOP = 14, 17, 46
DIFFERENCE_GAIN = 2  # gain of differences


class Reconstruction(NamedTuple):
    """Reconstruction by a named codec; 0 bits per pixel if its codes are continuous."""

    name: str
    image: Image.Image
    bits_per_pixel: float


def compute_psnr(a: Image.Image, b: Image.Image) -> float:
    """Compute the PSNR of two images; infinite if they are equal."""
    x, y = (torch.from_numpy(_to_array(picture).astype(np.uint8)).permute(2, 0, 1)[None] for picture in (a, b))
    return float(psnr(x, y))


def draw_difference(a: Image.Image, b: Image.Image, gain: float = DIFFERENCE_GAIN) -> Image.Image:
    """Draw the amplified difference of two images; equal pixels are grey."""
    difference = 127.5 + gain * (_to_array(b) - _to_array(a))
    return Image.fromarray(difference.round().clip(0, 255).astype(np.uint8))


def draw_reconstructions(
    original: Image.Image, reconstructions: Sequence[Reconstruction], title: str, *, width: int = 256
) -> Image.Image:
    """Draw the original, then each reconstruction above its difference, with PSNR and bits per pixel."""
    height = max(1, round(width * original.height / original.width))
    columns = 1 + len(reconstructions)
    under = f"below: the difference, amplified {DIFFERENCE_GAIN} times"
    room = max(columns * (width + GAP) + GAP, 2 * GAP + math.ceil(load_font(18).getlength(title) / SCALE))
    sheet, draw = make_canvas(room, TOP + 2 * (height + GAP) + 2 * LINE + GAP)
    draw_text(draw, (GAP, 12), title, 18)
    below = TOP + height + GAP
    words = below + height + 8
    _paste_image(sheet, draw, original, GAP, TOP, width, height)
    draw_text(draw, (GAP, below), f"original, {original.width} by {original.height}", 13)
    draw_text(draw, (GAP, below + LINE), under, 11, SOFT)
    for i, one in enumerate(reconstructions, start=1):
        x = GAP + i * (width + GAP)
        _paste_image(sheet, draw, one.image, x, TOP, width, height)
        _paste_image(sheet, draw, draw_difference(original, one.image), x, below, width, height)
        draw_text(draw, (x, words), _shorten_name(one.name, width), 13)
        draw_text(
            draw,
            (x, words + LINE),
            f"{_format_psnr(compute_psnr(original, one.image))}   {_format_bits(one.bits_per_pixel)}",
            12,
            INK,
        )
    return downscale(sheet)


def _paste_image(sheet: Image.Image, draw, image: Image.Image, x: int, y: int, width: int, height: int) -> None:
    size = width * SCALE, height * SCALE
    # Show the pixels of small images.
    resample = Image.Resampling.NEAREST if size[0] > 3 * image.width else Image.Resampling.LANCZOS
    sheet.paste(image.convert("RGB").resize(size, resample), (x * SCALE, y * SCALE))
    draw.rectangle((x * SCALE - 1, y * SCALE - 1, x * SCALE + size[0], y * SCALE + size[1]), outline=FAINT)


def _to_array(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"), np.float64)


def _format_psnr(value: float) -> str:
    return "equal" if math.isinf(value) else f"{value:.2f} dB"


def _format_bits(value: float) -> str:
    return f"{value:.4g} bit{'s' * (value != 1)} per pixel" if value else "continuous"


def _shorten_name(name: str, width: int) -> str:
    """Shorten a long name to its end."""
    room = max(8, int(width / 7.5))
    return name if len(name) <= room else f"…{name[1 - room :]}"
