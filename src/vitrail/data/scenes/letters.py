"""Words drawn as sprites, in several fonts.

Pillow carries one scalable typeface (Aileron), so a bare machine has five fonts: that one, and four drawn from it. Font
files of the system come on top (`found`). A font counts as the vendor of its sprites, so fonts can be held out as
vendors can.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitrail.data.scenes.sprites import Sprite
from vitrail.data.scenes.texture import WORD_TONE
from vitrail.errors import TextError

# Short common words that look unlike each other.
_WORDS = (
    "apple beach bird blue boat book bread bus cake cat chair city clock cloud coffee cold dance day dog door dream "
    "earth east exit fire fish five flag food forest four fox free game garden gold green hat home hope hot house ice "
    "island jump king lamp leaf left light lion lunch magic map milk moon music new night nine north ocean one open "
    "orange paint paper park peace pink pizza queen quiet rain red right river road rocket salt seven ship shop six "
    "sleep snow south star stop storm sugar sun tea ten three tiger train tree two up water west wind wolf zebra "
    "zero"
)
WORDS = tuple(_WORDS.split())
FOLDERS = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "~/.local/share/fonts",
    "~/.fonts",
    "/Library/Fonts",
    "C:/Windows/Fonts",
)
_SIZE = 64  # of the letters, in pixels
_INK, _HALO = (WORD_TONE,) * 3, (255, 255, 255)


class Font(NamedTuple):
    """A typeface and how it is drawn."""

    name: str
    file: Path | None = None  # None is Pillow's own
    bold: float = 0.0  # strokes thickened by this share of the size
    slant: float = 0.0  # rows moved to the right by this share of their height
    width: float = 1.0  # stretched by this


BUILT_IN = (
    Font("aileron"),
    Font("aileron-bold", bold=0.035),
    Font("aileron-slanted", slant=0.25),
    Font("aileron-wide", bold=0.015, width=1.35),
    Font("aileron-narrow", bold=0.015, width=0.7),
)


def found(folders: Iterable[str | Path] = FOLDERS) -> list[Font]:
    """The font files of the system that can write the English alphabet, by name."""
    files = {p.stem.lower(): p for folder in folders for p in sorted(Path(folder).expanduser().rglob("*.[to]tf"))}
    return [Font(name, file) for name, file in sorted(files.items()) if _writes_english(file)]


def word_sprites(texts: Sequence[str] = WORDS, fonts: Sequence[Font] = BUILT_IN) -> Iterator[Sprite]:
    """Every text in every font: dark letters with a white halo, legible before anything."""
    for font in fonts:
        for text in texts:
            rgba = drawn(text, font)
            yield Sprite(f"letters/{font.name}/{text}", font.name, text, "word", text, "word", rgba)


def drawn(text: str, font: Font) -> np.ndarray:
    """uint8 (H, W, 4)"""
    if not text.strip() or not text.isprintable():
        raise TextError(f"{text!r} shows nothing to read", "give printable letters")
    face = _face(font.file)
    stroke, halo = round(font.bold * _SIZE), max(2, round(0.06 * _SIZE))
    margin = stroke + halo + 2
    x0, y0, x1, y1 = face.getbbox(text, stroke_width=stroke)
    size = (int(x1 - x0) + 2 * margin, int(y1 - y0) + 2 * margin)
    at = (margin - x0, margin - y0)
    ink, around = (Image.new("L", size) for _ in range(2))
    ImageDraw.Draw(ink).text(at, text, 255, face, stroke_width=stroke)
    ImageDraw.Draw(around).text(at, text, 255, face, stroke_width=stroke + halo)
    picture = Image.composite(Image.new("RGB", size, _INK), Image.new("RGB", size, _HALO), ink).convert("RGBA")
    picture.putalpha(around)
    return np.asarray(_bent(picture, font))


def _bent(picture: Image.Image, font: Font) -> Image.Image:
    """Slanted and stretched."""
    width, height = picture.size
    if font.slant:
        width += round(font.slant * height)
        rows_move = (1, font.slant, -font.slant * height, 0, 1, 0)
        picture = picture.transform((width, height), Image.Transform.AFFINE, rows_move, Image.Resampling.BICUBIC)
    return picture.resize((round(width * font.width), height))


def _face(file: Path | None) -> ImageFont.FreeTypeFont:
    try:
        return ImageFont.load_default(_SIZE) if file is None else ImageFont.truetype(str(file), _SIZE)  # pyrefly: ignore
    except OSError as error:
        raise TextError(f"{file or 'the built-in font'} cannot be read as a font: {error}", "leave it out") from error


def _writes_english(file: Path) -> bool:
    """Whether its letters are there and differ from the sign for a missing one."""
    try:
        face = ImageFont.truetype(str(file), 24)
    except OSError:
        return False
    shapes = [_shape(letter, face) for letter in "agxQZ\U0010fffd"]
    return b"" not in shapes and len(set(shapes)) == len(shapes)


def _shape(letter: str, face: ImageFont.FreeTypeFont) -> bytes:
    picture = Image.new("L", (32, 32))
    ImageDraw.Draw(picture).text((0, 0), letter, 255, face)
    return picture.tobytes() if picture.getbbox() else b""
