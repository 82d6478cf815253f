"""Scores over visual tokens: fitted laws, curves that are alike, differences of two models, and what a budget buys."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vitrail.show import style
from vitrail.show.figure import Dot, Figure, Line, Point, Shape, Words

WIDE, TALL = 196, 120  # a panel
LEFT, GAP, HEAD, LABEL, FOOT = 44, 54, 96, 48, 34
COLUMNS = 4
COLOURS = (style.BLUE, style.RED, style.GREEN, style.GOLD, style.VIOLET, style.INK, style.SOFT)

Points = Sequence[tuple[float, float]]  # tokens, score


class Fitted(NamedTuple):
    """A panel: what was measured, the law's curve, the interval of new measurements, and points that are outliers."""

    title: str
    note: str
    points: Points
    curve: Points
    low: Points = ()
    high: Points = ()
    outliers: Sequence[float] = ()


class Bought(NamedTuple):
    """A task's score over tokens, and the number of them that was chosen."""

    curve: Points
    chosen: tuple[float, float]


def draw_laws(panels: Sequence[Fitted], title: str, note: str = "") -> Figure:
    """A panel a task: dots are scores, red ones outliers, the line is the law, dashes the interval of new scores."""

    def inside(panel: Fitted, frame: _Frame) -> list[Shape]:
        shapes: list[Shape] = []
        for edge in (panel.low, panel.high):  # intervals are often wider than what was measured
            path = [(x, y) for x, y in frame.path(edge) if 0 <= y <= TALL]
            shapes += [Line(path, style.SOFT, 0.75, (3.0, 3.0))] if len(path) > 1 else []
        shapes.append(Line(frame.path(panel.curve), style.BLUE, 2))
        for at in panel.points:
            shapes.append(Dot(frame.at(at), 4, style.RED if at[0] in panel.outliers else style.INK))
        return shapes

    frames = [_frame([*p.points, *p.curve]) for p in panels]
    return _sheet(title, note, [(p.title, p.note, f, inside(p, f)) for p, f in zip(panels, frames, strict=True)])


def draw_clusters(groups: Sequence[Mapping[str, Points]], title: str, note: str = "") -> Figure:
    """A panel a group of tasks whose scaled curves are alike; names in the colours of their lines below each."""
    longest = max(len(group) for group in groups)
    panels = []
    for place, group in enumerate(groups):
        frame = _frame([point for line in group.values() for point in line])
        shapes: list[Shape] = []
        for row, (task, points) in enumerate(group.items()):
            colour = COLOURS[row % len(COLOURS)]
            shapes += [Line(frame.path(points), colour, 1.5), *(Dot(frame.at(p), 2.5, colour) for p in points)]
            shapes.append(Words((0, TALL + FOOT + 4 + 15 * row), task, 11, colour))
        panels.append((f"({chr(ord('a') + place)})", f"{len(group)} tasks", frame, shapes))
    return _sheet(title, note, panels, below=15 * longest + 8)


def draw_ways(tasks: Mapping[str, Mapping[str, Points]], title: str, note: str = "") -> Figure:
    """A panel a task, a line a way of making tokens: one colour in all of them, named in a panel behind the last. A way
    may have one point alone."""
    ways = list(dict.fromkeys(way for lines in tasks.values() for way in lines))
    looks = {way: (COLOURS[i % len(COLOURS)], (4.0, 3.0) if i >= len(COLOURS) else None) for i, way in enumerate(ways)}
    panels: list[Panel] = []
    for task, lines in tasks.items():
        frame = _frame([point for line in lines.values() for point in line])
        shapes: list[Shape] = []
        for way, points in lines.items():
            colour, dash = looks[way]
            shapes += [Line(frame.path(points), colour, 1.5, dash)] if len(points) > 1 else []
            shapes += [Dot(frame.at(point), 2.5, colour) for point in points]
        panels.append((task, "", frame, shapes))
    names: list[Shape] = []
    for row, (way, (colour, dash)) in enumerate(looks.items()):
        names += [Line([(0, 15 * row), (24, 15 * row)], colour, 1.5, dash), Words((32, 15 * row), way, 11, colour)]
    return _sheet(title, note, [*panels, ("", "", None, names)], below=max(0, 15 * len(ways) - TALL))


def draw_differences(tasks: Mapping[str, Points], title: str, note: str = "") -> Figure:
    """A panel a task, a bar a number of tokens from top to bottom: green where the first model is better, gold where
    the second is. Each task has its own scale; the longest bar's length is written above it."""
    panels = []
    for task, points in tasks.items():
        most = max(abs(value) for _, value in points) or 1.0
        step, middle = TALL / len(points), WIDE / 2
        shapes: list[Shape] = [Line([(middle, 0), (middle, TALL)], style.FAINT)]
        for row, (n, value) in enumerate(points):
            y = (row + 0.5) * step
            end = middle + value / most * (middle - 26)
            shapes.append(Line([(middle, y), (end, y)], style.GREEN if value > 0 else style.GOLD, 0.75 * step))
            shapes.append(Words((0, y), f"{n:g}", 9, style.SOFT))
        panels.append((task, f"± {most:.3g}", None, shapes))
    return _sheet(title, note, panels)


def draw_plan(tasks: Mapping[str, Bought], title: str, note: str = "") -> Figure:
    """A panel a task: its predicted score over tokens, and the number of tokens that was chosen."""
    panels = []
    for task, (curve, chosen) in tasks.items():
        frame = _frame(curve)
        x, y = frame.at(chosen)
        shapes: list[Shape] = [Line(frame.path(curve), style.BLUE, 2), Line([(x, y), (x, TALL)], style.RED, 1, (3, 3))]
        panels.append((task, f"{chosen[0]:g} tokens", frame, [*shapes, Dot((x, y), 5, style.RED)]))
    return _sheet(title, note, panels)


# ---- panels -----------------------------------------------------------------------------------------------------


class _Frame(NamedTuple):
    """Tokens by their logarithm from left to right, scores from bottom to top, in a panel's own pixels."""

    left: float
    right: float
    bottom: float
    top: float

    def at(self, point: tuple[float, float]) -> Point:
        across = (math.log2(point[0]) - self.left) / ((self.right - self.left) or 1.0)
        return WIDE * across, TALL * (self.top - point[1]) / ((self.top - self.bottom) or 1.0)

    def path(self, points: Points) -> list[Point]:
        return [self.at(point) for point in points]

    def axes(self) -> list[Shape]:
        shapes: list[Shape] = [Line([(0, TALL), (WIDE, TALL)], style.FAINT), Line([(0, 0), (0, TALL)], style.FAINT)]
        for power in range(math.ceil(self.left), math.floor(self.right) + 1, 3):
            x = self.at((2.0**power, 0))[0]
            shapes += [
                Line([(x, TALL), (x, TALL + 4)], style.SOFT),
                Words((x, TALL + 13), f"{2**power:g}", 10, style.SOFT, "m"),
            ]
        for value in (self.bottom, self.top):
            shapes.append(
                Words(
                    (-5, self.at((1, value))[1]),
                    f"{value:.3g}" if value < 1000 else f"{value:,.0f}",
                    10,
                    style.SOFT,
                    "r",
                )
            )
        return shapes


def _frame(points: Points) -> _Frame:
    x, y = [math.log2(n) for n, _ in points], [s for _, s in points]
    return _Frame(min(x), max(x), min(y), max(y))


Panel = tuple[str, str, _Frame | None, list[Shape]]


def _sheet(title: str, note: str, panels: Sequence[Panel], below: float = 0) -> Figure:
    """Panels in rows, each with a title and a remark above, and `below` pixels for words under it."""
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    each = LABEL + TALL + FOOT + round(below)
    shapes: list[Shape] = [Words((LEFT, 34), title, 20), Words((LEFT, 62), note, 12, style.SOFT)]
    for i, (name, remark, frame, inside) in enumerate(panels):
        left, top = LEFT + (i % columns) * (WIDE + GAP), HEAD + (i // columns) * each
        shapes += [Words((left, top), name, 13), Words((left, top + 17), remark, 10, style.SOFT)]
        shapes += [_moved(shape, left, top + 34) for shape in [*(frame.axes() if frame else []), *inside]]
    width = max(LEFT + columns * (WIDE + GAP), 640)
    return Figure(width, HEAD + rows * each, shapes)


def _moved(shape: Shape, x: float, y: float) -> Shape:
    match shape:
        case Line(points=points):
            return shape._replace(points=[(a + x, b + y) for a, b in points])
        case Dot(at=(a, b)) | Words(at=(a, b)):
            return shape._replace(at=(a + x, b + y))
