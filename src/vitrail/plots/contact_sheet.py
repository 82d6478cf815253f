"""Draw a contact sheet: a grid of images with text and bounding boxes."""

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image

from vitrail.plots.style import (
    BLUE,
    FAINT,
    GOLD,
    GREEN,
    INK,
    RED,
    SCALE,
    SOFT,
    VIOLET,
    downscale,
    draw_text,
    load_font,
    make_canvas,
)

GAP, LINE = 14, 15


class Tile(NamedTuple):
    """An image, the lines of text below it, and named boxes (x0, y0, x1, y1 in 0…1)."""

    image: Image.Image
    lines: Sequence[str] = ()
    boxes: Sequence[tuple[tuple[float, float, float, float], str]] = ()


def draw_contact_sheet(
    tiles: Sequence[Tile], title: str, *, subtitle: str = "", columns: int | None = None, tile_size: int = 176
) -> Image.Image:
    """Draw all tiles. The longest text of a row sets its height."""
    columns = columns or max(1, min(6, math.ceil(math.sqrt(len(tiles)))))
    rows = [tiles[i : i + columns] for i in range(0, len(tiles), columns)]
    lines = [[_wrap_lines(tile.lines, tile_size) for tile in row] for row in rows]
    heights = [tile_size + LINE * max((len(wrapped) for wrapped in row), default=0) + GAP for row in lines]
    width = columns * (tile_size + GAP) + GAP
    top = 46 + (20 if subtitle else 0)
    sheet, draw = make_canvas(max(width, _measure_text(title, 18) + 2 * GAP), top + sum(heights) + GAP)
    draw_text(draw, (GAP, 12), title, 18)
    if subtitle:
        draw_text(draw, (GAP, 38), subtitle, 12, SOFT)
    y = top
    for row, wrapped, height in zip(rows, lines, heights, strict=True):
        for c, (tile, its) in enumerate(zip(row, wrapped, strict=True)):
            _draw_tile(sheet, draw, tile, its, GAP + c * (tile_size + GAP), y, tile_size)
        y += height
    return downscale(sheet)


def _draw_tile(sheet: Image.Image, draw, tile: Tile, lines: list[str], x: int, y: int, tile_size: int) -> None:
    picture = tile.image.convert("RGB")
    scale = tile_size * SCALE / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    # Show the pixels of small images.
    resample = Image.Resampling.NEAREST if scale > 4 else Image.Resampling.LANCZOS
    left, top = x * SCALE + (tile_size * SCALE - size[0]) // 2, y * SCALE + (tile_size * SCALE - size[1]) // 2
    sheet.paste(picture.resize(size, resample), (left, top))
    draw.rectangle((left - 1, top - 1, left + size[0], top + size[1]), outline=FAINT)
    for i, (box, name) in enumerate(tile.boxes):
        colour = (RED, BLUE, GREEN, GOLD, VIOLET)[i % 5]
        x0, y0, x1, y1 = (v * s for v, s in zip(box, (*size, *size), strict=True))
        draw.rectangle((left + x0, top + y0, left + x1, top + y1), outline=colour, width=SCALE)
        draw.text(
            (left + x0 + 3, top + y0 + 1), name, font=load_font(9), fill=colour, stroke_width=2, stroke_fill="white"
        )
    for i, line in enumerate(lines):
        draw_text(draw, (x, y + tile_size + 3 + i * LINE), line, 11, INK)


def _wrap_lines(lines: Sequence[str], tile_size: int) -> list[str]:
    room = max(8, int(tile_size / 6.0))
    return [line for each in lines for line in (textwrap.wrap(each, room) or [""])]


def _measure_text(text: str, size: int) -> int:
    return math.ceil(load_font(size).getlength(text) / SCALE)
