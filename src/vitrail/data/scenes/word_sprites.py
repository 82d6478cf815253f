"""Word sprites: words rendered in several fonts.

Pillow contains one scalable typeface (Aileron). Five built-in fonts derive from it, so no font files are required.
`find_fonts` adds the fonts of the system. The font is the vendor of its sprites, so fonts can be held out like vendors.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitrail.data.scenes.atlas import Sprite
from vitrail.data.scenes.sprite_textures import WORD_LIGHTNESS
from vitrail.errors import TextError

# Short common words that differ visually.
_WORDS = (
    "apple beach bird blue boat book bread bus cake cat chair city clock cloud coffee cold dance day dog door dream "
    "earth east exit fire fish five flag food forest four fox free game garden gold green hat home hope hot house ice "
    "island jump king lamp leaf left light lion lunch magic map milk moon music new night nine north ocean one open "
    "orange paint paper park peace pink pizza queen quiet rain red right river road rocket salt seven ship shop six "
    "sleep snow south star stop storm sugar sun tea ten three tiger train tree two up water west wind wolf zebra "
    "zero"
)
WORDS = tuple(_WORDS.split())
FONT_FOLDERS = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "~/.local/share/fonts",
    "~/.fonts",
    "/Library/Fonts",
    "C:/Windows/Fonts",
)
_FONT_SIZE = 64  # font size in pixels
_INK, _HALO = (WORD_LIGHTNESS,) * 3, (255, 255, 255)


class Font(NamedTuple):
    """A typeface and its style."""

    name: str
    file: Path | None = None  # None: Pillow's built-in typeface
    stroke_width: float = 0.0  # additional stroke width, as a fraction of the font size
    shear: float = 0.0  # horizontal shear
    stretch: float = 1.0  # horizontal stretch


BUILT_IN_FONTS = (
    Font("aileron"),
    Font("aileron-bold", stroke_width=0.035),
    Font("aileron-slanted", shear=0.25),
    Font("aileron-wide", stroke_width=0.015, stretch=1.35),
    Font("aileron-narrow", stroke_width=0.015, stretch=0.7),
)


def find_fonts(folders: Iterable[str | Path] = FONT_FOLDERS) -> list[Font]:
    """Return the fonts of the system that contain the English alphabet, sorted by name."""
    files = {p.stem.lower(): p for folder in folders for p in sorted(Path(folder).expanduser().rglob("*.[to]tf"))}
    return [Font(name, file) for name, file in sorted(files.items()) if _has_english_letters(file)]


def draw_word_sprites(texts: Sequence[str] = WORDS, fonts: Sequence[Font] = BUILT_IN_FONTS) -> Iterator[Sprite]:
    """Render every text in every font: dark letters with a white halo, readable on any background."""
    for font in fonts:
        for text in texts:
            rgba = draw_word(text, font)
            yield Sprite(f"letters/{font.name}/{text}", font.name, text, "word", text, "word", rgba)


def draw_word(text: str, font: Font) -> np.ndarray:
    """Render a text as uint8 (H, W, 4)."""
    if not text.strip() or not text.isprintable():
        raise TextError(f"the text {text!r} has no visible letters", "give printable letters")
    face = _load_face(font.file)
    stroke, halo = round(font.stroke_width * _FONT_SIZE), max(2, round(0.06 * _FONT_SIZE))
    margin = stroke + halo + 2
    x0, y0, x1, y1 = face.getbbox(text, stroke_width=stroke)
    size = (int(x1 - x0) + 2 * margin, int(y1 - y0) + 2 * margin)
    at = (margin - x0, margin - y0)
    ink, around = (Image.new("L", size) for _ in range(2))
    ImageDraw.Draw(ink).text(at, text, 255, face, stroke_width=stroke)
    ImageDraw.Draw(around).text(at, text, 255, face, stroke_width=stroke + halo)
    image = Image.composite(Image.new("RGB", size, _INK), Image.new("RGB", size, _HALO), ink).convert("RGBA")
    image.putalpha(around)
    return np.asarray(_apply_style(image, font))


def _apply_style(image: Image.Image, font: Font) -> Image.Image:
    """Apply shear and stretch."""
    width, height = image.size
    if font.shear:
        width += round(font.shear * height)
        shear = (1, font.shear, -font.shear * height, 0, 1, 0)
        image = image.transform((width, height), Image.Transform.AFFINE, shear, Image.Resampling.BICUBIC)
    return image.resize((round(width * font.stretch), height))


def _load_face(file: Path | None) -> ImageFont.FreeTypeFont:
    try:
        return ImageFont.load_default(_FONT_SIZE) if file is None else ImageFont.truetype(str(file), _FONT_SIZE)  # pyrefly: ignore
    except OSError as error:
        raise TextError(f"{file or 'the built-in font'} cannot be read as a font: {error}", "remove it") from error


def _has_english_letters(file: Path) -> bool:
    """Return whether the font has English letters that differ from its placeholder for missing letters."""
    try:
        face = ImageFont.truetype(str(file), 24)
    except OSError:
        return False
    shapes = [_render_letter(letter, face) for letter in "agxQZ\U0010fffd"]
    return b"" not in shapes and len(set(shapes)) == len(shapes)


def _render_letter(letter: str, face: ImageFont.FreeTypeFont) -> bytes:
    image = Image.new("L", (32, 32))
    ImageDraw.Draw(image).text((0, 0), letter, 255, face)
    return image.tobytes() if image.getbbox() else b""
