"""Palette, fonts and scale of all figures, and saving images."""

from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vitrail.errors import VitrailError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".tif", ".tiff", ".bmp", ".pdf")

SCALE = 2  # supersampling: figures are drawn at twice their size and reduced at the end

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
def load_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * SCALE)


def make_canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    sheet = Image.new("RGB", (width * SCALE, height * SCALE), PAPER)
    return sheet, ImageDraw.Draw(sheet)


def draw_text(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    string: str,
    size: int = 14,
    fill: Colour = INK,
    anchor: str = "la",
) -> None:
    draw.text((at[0] * SCALE, at[1] * SCALE), string, font=load_font(size), fill=fill, anchor=anchor)


def downscale(sheet: Image.Image) -> Image.Image:
    return sheet.resize((sheet.width // SCALE, sheet.height // SCALE), Image.Resampling.LANCZOS)


def check_image_path(path: Path) -> None:
    """Reject a path with an unsupported suffix, before the image is drawn."""
    if path.suffix.lower() not in IMAGE_SUFFIXES:
        raise VitrailError(
            f"{path} cannot be written: {path.suffix or 'no suffix'} is not an image format",
            f"use one of the suffixes {', '.join(IMAGE_SUFFIXES)} with --out",
        )


def save_image(sheet: Image.Image, path: Path) -> None:
    """Save an image, and create its folder."""
    check_image_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)
    except (OSError, ValueError, KeyError) as error:  # ValueError, KeyError: unsupported by this build of Pillow
        reason = getattr(error, "strerror", None) or error
        raise VitrailError(f"{path} cannot be written: {reason}", "give another path with --out") from error
