"""Lines, dots and words on a sheet, with two ways to a file: pixels, and SVG."""

import html
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import Image

from vitrail.errors import VitrailError
from vitrail.show import style
from vitrail.show.style import SCALE, Colour

HALO = 3  # pixels of paper around words, half of them under the letters

Point = tuple[float, float]


class Line(NamedTuple):
    points: Sequence[Point]
    colour: Colour
    width: float = 1.0
    dash: tuple[float, float] | None = None


class Dot(NamedTuple):
    at: Point
    radius: float
    colour: Colour


class Words(NamedTuple):
    at: Point
    words: str
    size: int = 13
    colour: Colour = style.INK
    anchor: Literal["l", "m", "r"] = "l"


Shape = Line | Dot | Words


class Figure(NamedTuple):
    """Shapes in the order they are drawn; words are centred on their height."""

    width: int
    height: int
    shapes: Sequence[Shape]

    def picture(self) -> Image.Image:
        sheet, draw = style.canvas(self.width, self.height)
        for shape in self.shapes:
            match shape:
                case Line(points, colour, width, dash):
                    for part in _dashed(points, dash) if dash else [points]:
                        scaled = [(x * SCALE, y * SCALE) for x, y in part]
                        draw.line(scaled, fill=colour, width=round(width * SCALE), joint="curve")
                case Dot((x, y), radius, colour):
                    box = [(x - radius) * SCALE, (y - radius) * SCALE, (x + radius) * SCALE, (y + radius) * SCALE]
                    draw.ellipse(box, fill=colour, outline=style.PAPER, width=SCALE)
                case Words(at, words, size, colour, anchor):
                    place, font = (at[0] * SCALE, at[1] * SCALE), style.font(size)
                    halo = {"stroke_width": HALO * SCALE // 2, "stroke_fill": style.PAPER}
                    draw.text(place, words, font=font, fill=colour, anchor=f"{anchor}m", **halo)
        return style.finish(sheet)

    def svg(self) -> str:
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="100%" height="100%" fill="{hexed(style.PAPER)}"/>',
        ]
        return "\n".join([*parts, *self._drawn(), "</svg>\n"])

    def inline(self, label: str) -> str:
        """For a page of its own paper, whose style sheet may change the colours."""
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        head = f'<svg class="drawn" {size} role="img" aria-label="{html.escape(label)}">'
        return "".join([head, *self._drawn(), "</svg>"])

    def _drawn(self) -> list[str]:
        parts = []
        for shape in self.shapes:
            match shape:
                case Line(points, colour, width, dash):
                    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
                    dashes = f' stroke-dasharray="{dash[0]:g} {dash[1]:g}"' if dash else ""
                    look = f'stroke="{hexed(colour)}" stroke-width="{width:g}" stroke-linejoin="round"{dashes}'
                    parts.append(f'<polyline points="{path}" fill="none" {look}/>')
                case Dot((x, y), radius, colour):
                    look = f'fill="{hexed(colour)}" stroke="{hexed(style.PAPER)}"'
                    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" {look}/>')
                case Words((x, y), words, size, colour, anchor):
                    end = {"l": "start", "m": "middle", "r": "end"}[anchor]
                    halo = f'stroke="{hexed(style.PAPER)}" stroke-width="{HALO}" paint-order="stroke"'
                    look = f'font-size="{size}" fill="{hexed(colour)}" text-anchor="{end}" {halo}'
                    # Not every renderer knows dominant-baseline; a third of the size centres capitals and figures.
                    parts.append(f'<text x="{x:.1f}" y="{y + 0.35 * size:.1f}" {look}>{html.escape(words)}</text>')
        return parts

    def save(self, path: Path) -> None:
        if path.suffix.lower() != ".svg":
            style.save_picture(self.picture(), path)
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.svg(), encoding="utf-8")
        except OSError as error:
            raise VitrailError(f"{path} cannot be written: {error.strerror}", "give another path") from error


def check_figure(path: Path) -> None:
    """Refuse an ending that no figure can have, before the work is done."""
    if path.suffix.lower() != ".svg":
        style.check_picture(path)


def hexed(colour: Colour) -> str:
    return "#" + "".join(f"{level:02x}" for level in colour)


def _dashed(points: Sequence[Point], dash: tuple[float, float]) -> list[list[Point]]:
    """The parts of a line that are drawn: `dash` on and off, in pixels along it."""
    on, off = dash
    parts: list[list[Point]] = []
    travelled = 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length, at = math.hypot(x1 - x0, y1 - y0), 0.0
        while at < length - 1e-9:
            phase = (travelled + at) % (on + off)
            until = min(length, at + max(on - phase if phase < on else on + off - phase, 1e-6))
            if phase < on:
                parts.append([(x0 + (x1 - x0) * t / length, y0 + (y1 - y0) * t / length) for t in (at, until)])
            at = until
        travelled += length
    return parts
