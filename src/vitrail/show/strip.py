"""What codecs keep of a picture: the original, each reconstruction, and what is lost, side by side."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from vitrail.evals.metrics import psnr
from vitrail.show.style import FAINT, INK, SCALE, SOFT, canvas, finish, font, text

GAP, LINE, TOP = 14, 17, 46
AMPLIFIED = 2  # times that a difference is shown larger than it is


class Kept(NamedTuple):
    """A codec's name, what it makes of the picture, and what that costs; 0 bits where its codes are continuous."""

    name: str
    picture: Image.Image
    bits_per_pixel: float


def decibel(a: Image.Image, b: Image.Image) -> float:
    """PSNR; infinite if the pictures are equal."""
    x, y = (torch.from_numpy(_levels(picture).astype(np.uint8)).permute(2, 0, 1)[None] for picture in (a, b))
    return float(psnr(x, y))


def difference(a: Image.Image, b: Image.Image, amplified: float = AMPLIFIED) -> Image.Image:
    """Grey where nothing is lost, brighter or darker by so many times what is."""
    lost = 127.5 + amplified * (_levels(b) - _levels(a))
    return Image.fromarray(lost.round().clip(0, 255).astype(np.uint8))


def draw_strip(original: Image.Image, kept: Sequence[Kept], title: str, *, width: int = 256) -> Image.Image:
    """The original, then for each codec its reconstruction over the difference, with dB and bits a pixel below."""
    height = max(1, round(width * original.height / original.width))
    columns = 1 + len(kept)
    under = f"below: the difference, {AMPLIFIED} times as large"
    room = max(columns * (width + GAP) + GAP, 2 * GAP + math.ceil(font(18).getlength(title) / SCALE))
    sheet, draw = canvas(room, TOP + 2 * (height + GAP) + 2 * LINE + GAP)
    text(draw, (GAP, 12), title, 18)
    below = TOP + height + GAP
    words = below + height + 8
    _paste(sheet, draw, original, GAP, TOP, width, height)
    text(draw, (GAP, below), f"original, {original.width} by {original.height}", 13)
    text(draw, (GAP, below + LINE), under, 11, SOFT)
    for i, one in enumerate(kept, start=1):
        x = GAP + i * (width + GAP)
        _paste(sheet, draw, one.picture, x, TOP, width, height)
        _paste(sheet, draw, difference(original, one.picture), x, below, width, height)
        text(draw, (x, words), _short(one.name, width), 13)
        text(draw, (x, words + LINE), f"{_said(decibel(original, one.picture))}   {_bits(one.bits_per_pixel)}", 12, INK)
    return finish(sheet)


def _paste(sheet: Image.Image, draw, picture: Image.Image, x: int, y: int, width: int, height: int) -> None:
    size = width * SCALE, height * SCALE
    # A picture of few pixels shows them as they are.
    how = Image.Resampling.NEAREST if size[0] > 3 * picture.width else Image.Resampling.LANCZOS
    sheet.paste(picture.convert("RGB").resize(size, how), (x * SCALE, y * SCALE))
    draw.rectangle((x * SCALE - 1, y * SCALE - 1, x * SCALE + size[0], y * SCALE + size[1]), outline=FAINT)


def _levels(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture.convert("RGB"), np.float64)


def _said(value: float) -> str:
    return "equal" if math.isinf(value) else f"{value:.2f} dB"


def _bits(value: float) -> str:
    return f"{value:.4g} bit{'s' * (value != 1)} a pixel" if value else "continuous"


def _short(name: str, width: int) -> str:
    """The end of a name that is too long says more than its beginning."""
    room = max(8, int(width / 7.5))
    return name if len(name) <= room else f"…{name[1 - room :]}"
