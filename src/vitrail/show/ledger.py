"""One sheet: how long the next token takes at least, and what lies in memory, as the context grows."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from PIL import Image, ImageDraw

from vitrail.show import style
from vitrail.show.style import SCALE, Colour

WIDTH, MARGIN, HEAD, FOOT = 1180, 36, 104, 60
PLOT, LEAST = 500, 300  # the curves' width, and how low they may be
BARS, BAR, GAP = 330, 16, 6
COLOURS = (style.BLUE, style.RED, style.GREEN, style.GOLD, style.VIOLET, style.INK)


class Series(NamedTuple):
    """A model: bytes of its weights, context → bytes of its cache, context → seconds of the next token."""

    weights: float
    cache: Mapping[int, float]
    seconds: Mapping[int, float]


def si(value: float, unit: str) -> str:
    """Three figures and a prefix: 1234567 → "1.23 M…"."""
    if value == 0:
        return f"0 {unit}"
    value = float(f"{value:.2e}")
    tens = math.floor(math.log10(abs(value)))
    power = min(max(tens // 3, -3), 6)
    return f"{value / 1000**power:.{max(0, 2 - tens + 3 * power)}f} {'nµm kMGTPE'[power + 3].strip()}{unit}"


def tokens(count: int) -> str:
    """8192 → "8k"; a count that is no multiple of 1024 is written out."""
    if count % 2**20 == 0:
        return f"{count // 2**20}M"
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count:,}"


def draw_ledger(models: Mapping[str, Series], *, device: str, memory: float, note: str = "") -> Image.Image:
    """Left the floor of the next token over the context, right weights and cache against the device's `memory`.

    At most six models, each with a colour.
    """
    rows = sum(len(series.cache) for series in models.values())
    tall = max(LEAST, rows * (BAR + GAP) + len(models) * 30)
    sheet, draw = style.canvas(WIDTH, HEAD + tall + FOOT)
    style.text(draw, (MARGIN, 22), f"The next token on {device}: how long at least, and what lies in memory", 22)
    style.text(draw, (MARGIN, 54), note, 13, style.SOFT)
    _curves(draw, models, HEAD + tall - 10, tall - 10)
    _bars(draw, models, tall, memory, device)
    return style.finish(sheet)


def _curves(draw: ImageDraw.ImageDraw, models: Mapping[str, Series], base: float, tall: float) -> None:
    left = MARGIN + 54
    every = [s for series in models.values() for s in series.seconds.values()]
    low, high = math.log10(min(every)) - 0.15, math.log10(max(every)) + 0.15
    for power in range(math.ceil(low), math.floor(high) + 1):
        y = base - tall * (power - low) / (high - low)
        _line(draw, [(left, y), (left + PLOT, y)], style.FAINT, 1)
        style.text(draw, (left - 8, y), f"{10 ** (power % 3)} {'num'[power // 3 + 3 :][:1]}s", 12, style.SOFT, "rm")
    contexts = sorted({n for series in models.values() for n in series.seconds})
    first, last = math.log2(contexts[0]), math.log2(contexts[-1])
    across = {n: left + PLOT * (math.log2(n) - first) / max(last - first, 1e-9) for n in contexts}
    for n in contexts[:: math.ceil(len(contexts) / 12)]:
        style.text(draw, (across[n], base + 8), tokens(n), 12, style.SOFT, "ma")
    style.text(draw, (left + PLOT / 2, base + 26), "tokens of context", 12, style.SOFT, "ma")
    ends = {}
    for (name, series), colour in zip(models.items(), COLOURS, strict=False):
        points = [
            (across[n], base - tall * (math.log10(s) - low) / (high - low)) for n, s in sorted(series.seconds.items())
        ]
        _line(draw, points, colour, 2.5)
        ends[name] = points[-1][1]
    for name, y in _apart(ends, 17).items():
        style.text(draw, (left + PLOT + 8, y), name, 13, COLOURS[list(models).index(name)], "lm")


def _apart(places: Mapping[str, float], least: float) -> dict[str, float]:
    """Places moved as little as need be, so that no two are nearer than `least`."""
    placed: dict[str, float] = {}
    ceiling = math.inf
    for name in sorted(places, key=lambda name: -places[name]):
        ceiling = placed[name] = min(places[name], ceiling - least)
    drift = sum(places[name] - placed[name] for name in places) / len(places)
    return {name: y + drift for name, y in placed.items()}


def _bars(draw: ImageDraw.ImageDraw, models: Mapping[str, Series], tall: float, memory: float, device: str) -> None:
    left, y = WIDTH - MARGIN - BARS, HEAD
    most = max(memory * 1.08, *(s.weights + cache for s in models.values() for cache in s.cache.values()))
    wide = (BARS - 66) / most  # room for the longest bar's label
    style.text(draw, (left, y - 26), "weights, and keys and values (pale)", 12, style.SOFT)
    edge = left + memory * wide
    _line(draw, [(edge, y), (edge, y + tall)], style.SOFT, 1)
    anchor = "ra" if edge > left + BARS / 2 else "la"
    style.text(draw, (edge, y + tall + 4), f"{device} holds {si(memory, 'B')}", 12, style.SOFT, anchor)
    for (name, series), colour in zip(models.items(), COLOURS, strict=False):
        _words(draw, (left, y), name, 13, style.INK, "la")
        _words(draw, (left + BARS, y), f"weights {si(series.weights, 'B')}", 12, style.SOFT, "ra")
        y += 20
        for n, cache in sorted(series.cache.items()):
            middle = left + series.weights * wide
            end = middle + cache * wide
            _box(draw, (left, y, max(middle, left + 1), y + BAR), colour)
            _box(draw, (middle, y, max(end, middle + 1), y + BAR), _pale(colour))
            style.text(draw, (left - 8, y + BAR / 2), tokens(n), 12, style.SOFT, "rm")
            _words(draw, (end + 6, y + BAR / 2), f"+ {si(cache, 'B')}", 11, style.SOFT, "lm")
            y += BAR + GAP
        y += 10


def _words(
    draw: ImageDraw.ImageDraw, at: tuple[float, float], words: str, size: int, fill: Colour, anchor: str
) -> None:
    """Text on paper of its own, so that a line behind it stays behind."""
    place = (at[0] * SCALE, at[1] * SCALE)
    x0, y0, x1, y1 = draw.textbbox(place, words, font=style.font(size), anchor=anchor)
    draw.rectangle([x0 - 2 * SCALE, y0, x1 + 2 * SCALE, y1], fill=style.PAPER)
    style.text(draw, at, words, size, fill, anchor)


def _pale(colour: Colour) -> Colour:
    red, green, blue = (round(c + (p - c) * 0.62) for c, p in zip(colour, style.PAPER, strict=True))
    return red, green, blue


def _line(draw: ImageDraw.ImageDraw, points: list[tuple[float, float]], colour: Colour, width: float) -> None:
    draw.line([(x * SCALE, y * SCALE) for x, y in points], fill=colour, width=round(width * SCALE), joint="curve")


def _box(draw: ImageDraw.ImageDraw, box: tuple[float, float, float, float], colour: Colour) -> None:
    draw.rectangle([side * SCALE for side in box], fill=colour)
