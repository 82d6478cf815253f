"""Quality against bits: a table for the terminal, and a plot with codecs as points and the usual formats as lines."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

from vitrail.errors import DataError
from vitrail.evals.metrics import Estimate
from vitrail.evals.suites.reconstruction import CODED, DECODED, ENCODED, ENTROPY, FILED, POOLED, Row
from vitrail.show import style
from vitrail.show.figure import Dot, Figure, Line, Point, Shape, Words
from vitrail.show.style import SCALE, Colour

PANEL, TALL, GAP, LEFT, RIGHT, HEAD, FOOT = 400, 330, 78, 72, 44, 164, 72
LINES = (style.GOLD, style.GREEN, style.VIOLET, style.RED)  # one a format, in the order they come
DASHES = {"sheet": (7.0, 4.0), "4:4:4": (2.0, 4.0)}
NAMED = 10  # codecs whose names stand beside their points; of more, numbers
STEPS = (1, 2, 2.5, 5, 10)
ROOM = 15  # from one line of words to the next


def table(rows: Sequence[Row]) -> str:
    """A line a coder; ± is the larger half of the interval."""
    titles = {CODED: "bits/px", FILED: "in files", ENCODED: "encode/s", DECODED: "decode/s"}
    found = dict.fromkeys(name for row in rows for name in row.scores)
    measures = [name for name in found if name not in (*titles, POOLED, ENTROPY)]
    order = [name for name in (CODED, FILED, *measures, ENCODED, DECODED) if name in found]
    used = any(row.use for row in rows)
    head = ["", *(titles.get(name, name) for name in order), *["used", "perplexity"] * used]
    lines = [head + [score.name for score in rows[0].read]]
    for row in rows:
        cells = [row.name, *(_told(row.scores[name]) if name in row.scores else "–" for name in order)]
        if used:
            cells += ["–", "–"] if row.share is None else [f"{row.share:.1%}", f"{row.perplexity:,.1f}"]
        for score in row.read:
            before = f" of {score.beside['originals']:.1%}" if "originals" in score.beside else ""
            cells.append(f"{score.value:.1%}{before}")
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])
        for cells in lines
    )


def _told(score: Estimate) -> str:
    """Four figures and the interval."""
    if not math.isfinite(score.value):
        return "∞"
    half = max(score.interval[1] - score.value, score.value - score.interval[0])
    places = min(4, max(0, 3 - math.floor(math.log10(abs(score.value))))) if score.value else 4
    return f"{score.value:,.{places}f}" + (f" ±{half:,.{places}f}" if math.isfinite(half) else "")


def draw_rates(rows: Sequence[Row], title: str, note: str = "", *, bits: Literal["coded", "file"] = "coded") -> Figure:
    """A panel for PSNR, SSIM, LPIPS and the Fréchet distance, as far as they were measured. Whiskers are intervals of
    95 %; a codec whose codes are continuous is a level, since it has no bits."""
    rate = {"coded": CODED, "file": FILED}[bits]
    rated = [row.scores[rate].value for row in rows if rate in row.scores]
    measures = [name for name in dict.fromkeys(n for row in rows for n in row.scores) if _better(name)]
    if not rated or not measures:
        raise DataError("there is nothing to plot: no coder has bits", "add a baseline, or a codec with codes")
    across = _across(min(rated), max(rated))
    codecs = [row for row in rows if row.kind == "codec"]
    kinds = list(dict.fromkeys(row.kind for row in rows if row.kind != "codec"))
    numbers = len(codecs) > NAMED
    listed = math.ceil(len(codecs) / 4) if numbers else 0
    columns = len(measures)
    width = max(LEFT + columns * (PANEL + GAP) - GAP + RIGHT, 760)
    shapes: list[Shape] = [Words((LEFT, 38), title, 22), Words((LEFT, 66), note, 13, style.SOFT)]
    shapes += _legend(kinds, bool(codecs))
    short = dict(zip((row.name for row in codecs), _short(codecs), strict=True))
    names = {name: str(n) if numbers else short[name] for n, name in enumerate(short, 1)}
    for place, measure in enumerate(measures):
        left = LEFT + place * (PANEL + GAP)
        shapes += _Panel(left, measure, rate, across, rows).drawn(kinds, names)
    for n, name in enumerate(short.values(), 1) if numbers else ():
        at = (LEFT + (n - 1) % 4 * (width - LEFT) / 4, HEAD + TALL + FOOT - 2 + (n - 1) // 4 * 20)
        shapes.append(Words(at, f"{n}  {name}", 12, style.BLUE))
    return Figure(width, HEAD + TALL + FOOT + listed * 20, shapes)


class _Panel:
    def __init__(self, left: float, measure: str, rate: str, across: tuple[float, float], rows: Sequence[Row]):
        self.left, self.measure, self.rate, self.rows = left, measure, rate, [r for r in rows if measure in r.scores]
        self.low, self.high = across
        ends = [end for row in self.rows for end in _ends(row.scores[measure])] or [0.0, 1.0]
        # Distances become very small, and are told apart there too.
        self.scale = math.log10 if _better(measure) == "lower" and min(ends) > 0 else float
        self.ticks = (_ticks if self.scale is float else _powers)(min(ends), max(ends))
        self.bottom, self.top = self.scale(self.ticks[0]), self.scale(self.ticks[-1])

    def drawn(self, kinds: Sequence[str], names: dict[str, str]) -> list[Shape]:
        base = HEAD + TALL
        shapes: list[Shape] = [
            Words((self.left, HEAD - 22), self.measure + ", dB" * (self.measure == "PSNR"), 15),
            Words((self.left + PANEL, HEAD - 22), f"{_better(self.measure)} is better", 12, style.SOFT, "r"),
        ]
        for tick in self.ticks:
            y = self.y(tick)
            shapes += [Line([(self.left, y), (self.left + PANEL, y)], style.FAINT)]
            shapes.append(Words((self.left - 8, y), f"{tick:g}", 12, style.SOFT, "r"))
        for power in range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1):
            x = self.x(2.0**power)
            shapes += [
                Line([(x, base), (x, base + 5)], style.SOFT),
                Words((x, base + 17), f"{2.0**power:g}", 12, style.SOFT, "m"),
            ]
        shapes.append(Words((self.left + PANEL / 2, base + 40), self.rate, 12, style.SOFT, "m"))
        for kind in kinds:
            shapes += self._line([row for row in self.rows if row.kind == kind], *_look(kind, kinds))
        return shapes + self._codecs([row for row in self.rows if row.kind == "codec"], names)

    def x(self, bits: float) -> float:
        return self.left + PANEL * (math.log2(bits) - self.low) / (self.high - self.low)

    def y(self, value: float) -> float:
        """What is infinite stands above all that is not."""
        if math.isinf(value):
            return HEAD - 4
        return HEAD + TALL * (self.top - self.scale(value)) / (self.top - self.bottom)

    def _at(self, row: Row) -> Point:
        return self.x(row.scores[self.rate].value), self.y(row.scores[self.measure].value)

    def _line(self, rows: Sequence[Row], colour: Colour, dash: tuple[float, float] | None) -> list[Shape]:
        rows = sorted((row for row in rows if self.rate in row.scores), key=lambda row: row.scores[self.rate].value)
        points = [self._at(row) for row in rows]
        shapes: list[Shape] = [Line(points, colour, 2, dash)] if len(points) > 1 else []
        for row, at in zip(rows, points, strict=True):
            shapes += [*self._whisker(row, at, colour), Dot(at, 3.5, colour)]
        return shapes

    def _codecs(self, rows: Sequence[Row], names: dict[str, str]) -> list[Shape]:
        levels: list[Shape] = []
        dots: list[Shape] = []
        wanted: list[tuple[Point, str]] = []
        for row in rows:
            if self.rate in row.scores:
                at = self._at(row)
                dots += [*self._whisker(row, at, style.BLUE), Dot(at, 6, style.BLUE)]
                wanted.append((at, names[row.name]))
            else:
                y, words = self.y(row.scores[self.measure].value), f"{names[row.name]}, continuous"
                levels.append(Line([(self.left, y), (self.left + PANEL, y)], style.BLUE, 1.5, (2, 3)))
                wanted.append(((self.left + PANEL + 30, y - 10), words))  # it ends a little outside
        return [*levels, *_labels(wanted, self.left + PANEL), *dots]

    def _whisker(self, row: Row, at: Point, colour: Colour) -> list[Line]:
        low, high = row.scores[self.measure].interval
        if not (math.isfinite(low) and math.isfinite(high)):
            return []
        return [Line([(at[0], self.y(low)), (at[0], self.y(high))], colour, 1)]


def _labels(wanted: Sequence[tuple[Point, str]], edge: float) -> list[Shape]:
    """Names right of their points, or left where there is no room, and moved where two would touch: those of points
    above each other as little as can be, up or down, and any others further down."""
    shapes: list[Shape] = []
    taken = [(x - 8, x + 8, y) for (x, y), _ in wanted]  # from, to, at
    columns: dict[float, list[tuple[Point, str]]] = {}
    for point, words in sorted(wanted, key=lambda item: item[0][1]):
        columns.setdefault(point[0], []).append((point, words))
    for column in sorted(columns.values(), key=len, reverse=True):  # a name alone is moved more easily
        for ((x, y), words), at in zip(column, _apart([y for (_, y), _ in column]), strict=True):
            right = x + 11 + _wide(words) <= edge + RIGHT - 4
            start = x + 11 if right else x - 11 - _wide(words)
            end = start + _wide(words)
            while any(start < b and a < end and abs(at - other) < ROOM for a, b, other in taken):
                at += 1
            taken.append((start, end, at))
            if abs(at - y) > 8:
                shapes.append(Line([(x, y), (start - 2 if right else end + 2, at)], style.BLUE, 0.75))
            shapes.append(Words((start, at), words, 13, style.BLUE))
    return shapes


def _apart(wanted: Sequence[float]) -> list[float]:
    """The nearest to what is wanted, in that order, that is below the head and nowhere closer than a line of words:
    neighbours that would touch become a block around the mean of what they want."""
    blocks: list[list[float]] = []
    for n, y in enumerate(wanted):
        blocks.append([y - n * ROOM])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    places = [fmean(block) for block in blocks for _ in block]
    return [max(place, HEAD) + n * ROOM for n, place in enumerate(places)]


def _wide(words: str) -> float:
    return style.font(13).getlength(words) / SCALE


def _legend(kinds: Sequence[str], codecs: bool) -> list[Shape]:
    shapes: list[Shape] = []
    x, y = float(LEFT), 98.0
    if codecs:
        shapes += [Dot((x + 7, y), 6, style.BLUE), Words((x + 20, y), "codecs", 13, style.BLUE)]
        x += 88
    for kind in kinds:
        colour, dash = _look(kind, kinds)
        shapes += [Line([(x, y), (x + 26, y)], colour, 2, dash), Dot((x + 13, y), 3.5, colour)]
        shapes.append(Words((x + 34, y), kind, 13, colour))
        x += 34 + _wide(kind) + 26
    return shapes


def _look(kind: str, kinds: Sequence[str]) -> tuple[Colour, tuple[float, float] | None]:
    """A colour a format; other ways to write it are dashed."""
    formats = list(dict.fromkeys(each.split()[0] for each in kinds))
    colour = LINES[formats.index(kind.split()[0]) % len(LINES)]
    return colour, next((dash for word, dash in DASHES.items() if word in kind.split()), None)


def _better(measure: str) -> str:
    if measure in ("PSNR", "SSIM"):
        return "higher"
    return "lower" if measure.startswith(("LPIPS", "FD-")) else ""


def _short(rows: Sequence[Row]) -> list[str]:
    """Names that are paths without what all of them begin and end with."""
    parts = [Path(row.name).parts or (row.name,) for row in rows]
    if len(set(parts)) < 2:
        return [each[-1] for each in parts]
    first = next(n for n, some in enumerate(itertools.zip_longest(*parts)) if len(set(some)) > 1)
    last = next(n for n, some in enumerate(itertools.zip_longest(*(p[::-1] for p in parts))) if len(set(some)) > 1)
    short = ["/".join(each[first : len(each) - last]) or each[-1] for each in parts]
    return short if len(set(short)) == len(set(parts)) else ["/".join(each) for each in parts]


def _across(low: float, high: float) -> tuple[float, float]:
    """Powers of two around the rates, with some air."""
    return math.log2(low) - 0.25, math.log2(high) + 0.25


def _powers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten around a range, or powers of ten alone where those are many."""
    high = max(high, 1.001 * low)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    fine = [float(f"{m}e{power}") for power in range(first, last + 1) for m in (1, 2, 5)]
    kept = [tick for tick, after in zip(fine, [*fine[1:], math.inf], strict=True) if after > low]
    kept = kept[: 1 + next((n for n, tick in enumerate(kept) if tick >= high), len(kept))]
    return kept if len(kept) < 10 else [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _ends(score: Estimate) -> list[float]:
    return [value for value in (score.value, *score.interval) if math.isfinite(value)]


def _ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers around a range, at most so many."""
    spread = max(high - low, 1e-6 * max(1.0, abs(high)))
    power = 10.0 ** math.floor(math.log10(spread / most))
    for step in (power * s for s in (*STEPS, *(10 * s for s in STEPS))):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            return [round(n * step, 10) for n in range(first, max(last, first + 1) + 1)]
    raise AssertionError("some step is large enough")
