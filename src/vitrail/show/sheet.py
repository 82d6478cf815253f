"""A contact sheet: pictures in rows, each with its words and, where known, the boxes of what is on it."""

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image

from vitrail.show.style import BLUE, FAINT, GOLD, GREEN, INK, RED, SCALE, SOFT, VIOLET, canvas, finish, font, text

GAP, LINE = 14, 15


class Tile(NamedTuple):
    """A picture, the words under it, and boxes (x0, y0, x1, y1 in 0…1) with their names."""

    picture: Image.Image
    words: Sequence[str] = ()
    boxes: Sequence[tuple[tuple[float, float, float, float], str]] = ()


def draw_sheet(
    tiles: Sequence[Tile], title: str, *, under: str = "", columns: int | None = None, side: int = 176
) -> Image.Image:
    """All tiles on one sheet; the words of a row set its height, and nothing is cut off."""
    columns = columns or max(1, min(6, math.ceil(math.sqrt(len(tiles)))))
    rows = [tiles[i : i + columns] for i in range(0, len(tiles), columns)]
    lines = [[_wrapped(tile.words, side) for tile in row] for row in rows]
    heights = [side + LINE * max((len(wrapped) for wrapped in row), default=0) + GAP for row in lines]
    width = columns * (side + GAP) + GAP
    top = 46 + (20 if under else 0)
    sheet, draw = canvas(max(width, _width(title, 18) + 2 * GAP), top + sum(heights) + GAP)
    text(draw, (GAP, 12), title, 18)
    if under:
        text(draw, (GAP, 38), under, 12, SOFT)
    y = top
    for row, wrapped, height in zip(rows, lines, heights, strict=True):
        for c, (tile, its) in enumerate(zip(row, wrapped, strict=True)):
            _draw_tile(sheet, draw, tile, its, GAP + c * (side + GAP), y, side)
        y += height
    return finish(sheet)


def _draw_tile(sheet: Image.Image, draw, tile: Tile, lines: list[str], x: int, y: int, side: int) -> None:
    picture = tile.picture.convert("RGB")
    scale = side * SCALE / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    # A picture of few pixels shows them as they are.
    how = Image.Resampling.NEAREST if scale > 4 else Image.Resampling.LANCZOS
    left, top = x * SCALE + (side * SCALE - size[0]) // 2, y * SCALE + (side * SCALE - size[1]) // 2
    sheet.paste(picture.resize(size, how), (left, top))
    draw.rectangle((left - 1, top - 1, left + size[0], top + size[1]), outline=FAINT)
    for i, (box, name) in enumerate(tile.boxes):
        colour = (RED, BLUE, GREEN, GOLD, VIOLET)[i % 5]
        x0, y0, x1, y1 = (v * s for v, s in zip(box, (*size, *size), strict=True))
        draw.rectangle((left + x0, top + y0, left + x1, top + y1), outline=colour, width=SCALE)
        draw.text((left + x0 + 3, top + y0 + 1), name, font=font(9), fill=colour, stroke_width=2, stroke_fill="white")
    for i, line in enumerate(lines):
        text(draw, (x, y + side + 3 + i * LINE), line, 11, INK)


def _wrapped(words: Sequence[str], side: int) -> list[str]:
    room = max(8, int(side / 6.0))
    return [line for each in words for line in (textwrap.wrap(each, room) or [""])]


def _width(words: str, size: int) -> int:
    return math.ceil(font(size).getlength(words) / SCALE)
