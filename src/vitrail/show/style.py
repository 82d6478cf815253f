"""Palette, type and scale that all figures share, and the way to a file."""

from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vitrail.errors import VitrailError

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".tif", ".tiff", ".bmp", ".pdf")

SCALE = 2  # figures are drawn at twice their size and reduced at the end: smooth lines without a drawing library

Colour = tuple[int, int, int]

PAPER: Colour = (250, 249, 246)
INK: Colour = (32, 35, 42)
SOFT: Colour = (112, 116, 124)
FAINT: Colour = (222, 219, 212)
BLUE: Colour = (18, 92, 186)
RED: Colour = (196, 66, 48)
GREEN: Colour = (38, 134, 92)
GOLD: Colour = (202, 138, 30)
VIOLET: Colour = (118, 80, 168)


@cache
def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * SCALE)


def canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    sheet = Image.new("RGB", (width * SCALE, height * SCALE), PAPER)
    return sheet, ImageDraw.Draw(sheet)


def text(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    words: str,
    size: int = 14,
    fill: Colour = INK,
    anchor: str = "la",
) -> None:
    draw.text((at[0] * SCALE, at[1] * SCALE), words, font=font(size), fill=fill, anchor=anchor)


def finish(sheet: Image.Image) -> Image.Image:
    return sheet.resize((sheet.width // SCALE, sheet.height // SCALE), Image.Resampling.LANCZOS)


def check_picture(path: Path) -> None:
    """Refuse a file that no picture can be saved as, before the work of drawing it is done."""
    if path.suffix.lower() not in ENDINGS:
        raise VitrailError(
            f"{path} cannot be written: {path.suffix or 'no ending'} is no kind of picture",
            f"give --out one of the endings {', '.join(ENDINGS)}",
        )


def save_picture(sheet: Image.Image, path: Path) -> None:
    """Write a figure, with the folders above it."""
    check_picture(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)
    except (OSError, ValueError, KeyError) as error:  # the last two: a kind this build of Pillow does not write
        reason = getattr(error, "strerror", None) or error
        raise VitrailError(f"{path} cannot be written: {reason}", "give another path with --out") from error
