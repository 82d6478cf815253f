"""One sheet: what is still read of a picture at every bottleneck of a model, in the order it goes through them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vitrail.show import style
from vitrail.show.figure import Dot, Figure, Line, Point, Shape, Words
from vitrail.show.ledger import si

STEP, TALL, LEFT, RIGHT, HEAD, FOOT = 170, 300, 72, 150, 84, 96
COLOURS = (style.BLUE, style.RED, style.GREEN, style.GOLD, style.VIOLET, style.INK)


class Place(NamedTuple):
    """A bottleneck: its name, the one that it is made from, tokens, width and bits; truth → value, its interval, and
    what is had without looking."""

    name: str
    after: str
    tokens: int
    width: int
    bits: int
    read: Mapping[str, tuple[float, tuple[float, float], float]]


def draw_information(places: Sequence[Place], title: str) -> Figure:
    """Up the share of each truth that a straight reading finds; dashed what is had without looking."""
    width = LEFT + STEP * (len(places) - 1) + RIGHT
    across = [LEFT + 40 + STEP * i for i in range(len(places))]
    shapes: list[Shape] = [
        Words((24, 30), title, 20),
        Words((24, 56), "share that a straight reading finds, on pictures it was not fitted to", 12, style.SOFT),
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        shapes += [
            Line([(LEFT, y), (across[-1] + 10, y)], style.FAINT),
            Words((LEFT - 8, y), f"{share:.0%}", 12, style.SOFT, "r"),
        ]
    for x, place in zip(across, places, strict=True):
        size = f"{place.tokens:,} of {place.width:,}"
        shapes += [
            Words((x, HEAD + TALL + 22), place.name, 13, style.INK, "m"),
            Words((x, HEAD + TALL + 42), size, 12, style.SOFT, "m"),
            Words((x, HEAD + TALL + 60), si(place.bits, "bit"), 12, style.SOFT, "m"),
        ]
    names: dict[str, float] = {}
    for truth, colour in zip(places[0].read, COLOURS, strict=False):
        points: dict[str, Point] = {}
        for x, place in zip(across, places, strict=True):
            value, (low, high), _ = place.read[truth]
            points[place.name] = (x, _y(value))
            shapes.append(Line([(x, _y(low)), (x, _y(high))], colour))
            if place.after:
                shapes.append(Line([points[place.after], points[place.name]], colour, 2.5))
        blind = places[0].read[truth][2]
        shapes += [
            Line([(LEFT, _y(blind)), (across[-1] + 10, _y(blind))], colour, 1, (3, 4)),
            *(Dot(point, 4, colour) for point in points.values()),
        ]
        names[truth] = points[places[-1].name][1]
    taken = -100.0
    for truth in sorted(names, key=lambda truth: names[truth]):
        taken = max(names[truth], taken + 16)
        shapes.append(Words((across[-1] + 16, taken), truth, 13, COLOURS[list(names).index(truth)]))
    return Figure(width, HEAD + TALL + FOOT, shapes)


def _y(share: float) -> float:
    """What lies below nothing is shown there: a reading can be worse than none."""
    return HEAD + TALL * (1 - min(max(share, 0.0), 1.0))
