"""One sheet: packed rows as they are read. A strip of kinds with samples apart, spans bracketed and learnt tokens
underlined; the (t, h, w) positions below it; beside it who sees whom, in the colour of what is seen.

L tokens of a row
"""

from collections.abc import Iterable
from itertools import groupby
from typing import TypeVar

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from vitrail.nn import attention_plan
from vitrail.show import style
from vitrail.show.style import SCALE, Colour
from vitrail.stream import KINDS, Batch

_T = TypeVar("_T")

KIND_COLOURS: dict[str, Colour] = {
    "text": (146, 152, 164),
    "image": style.GREEN,
    "video": style.VIOLET,
    "action": (206, 92, 134),
    "query": (150, 108, 62),
}
AXIS_COLOURS: dict[str, Colour] = {"t": style.GOLD, "h": style.BLUE, "w": style.RED}
WIDTH, MARGIN, HEAD, FOOT = 1180, 36, 116, 24
LEFT, STRIP, TALL, CURVES = 34, 860, 26, 96
MAP = 170
ROW = 212
MOST = 8  # rows drawn
FINEST = 340  # tokens a side of the map; longer rows are sampled


def draw_stream(batch: Batch, title: str = "Packed streams") -> Image.Image:
    """The first rows of a batch; what is left out is said."""
    rows = min(len(batch.ids), MOST)
    sheet, draw = style.canvas(WIDTH, HEAD + rows * ROW + FOOT)
    style.text(draw, (MARGIN, 22), title, 22)
    more = f" · the first {rows} rows are shown" if rows < len(batch.ids) else ""
    style.text(draw, (MARGIN, 54), f"{batch}{more}".replace("×", "x"), 13, style.SOFT)  # the font has no ×
    _legend(draw, batch)
    style.text(draw, (WIDTH - MARGIN - MAP, 84), "who (rows) sees whom", 12, style.SOFT)
    for row in range(rows):
        top = HEAD + row * ROW
        _strip(draw, batch, row, top + 18)
        _curves(draw, batch.positions[row], batch.segments[row], top + 18 + TALL + 18)
        tile = _map(batch, row).resize((MAP * SCALE, MAP * SCALE), Image.Resampling.NEAREST)
        left = WIDTH - MARGIN - MAP
        sheet.paste(tile, (left * SCALE, (top + 18) * SCALE))
        draw.rectangle(
            [left * SCALE - 1, (top + 18) * SCALE - 1, (left + MAP) * SCALE, (top + 18 + MAP) * SCALE],
            outline=style.FAINT,
            width=SCALE,
        )
    return style.finish(sheet)


def _legend(draw: ImageDraw.ImageDraw, batch: Batch) -> None:
    x, y = float(MARGIN + LEFT), 86
    present = set(batch.kinds.unique().tolist())
    for name, kind in KINDS.items():
        if kind.id in present:
            _box(draw, x, y, x + 12, y + 12, KIND_COLOURS[name])
            x = _label(draw, x + 18, y, name)
    _box(draw, x, y + 9, x + 16, y + 12, style.INK)
    x = _label(draw, x + 22, y, "learnt")
    if batch.spans.any():
        _bracket(draw, x, x + 16, y + 4)
        x = _label(draw, x + 22, y, "read both ways")
    for name, colour in AXIS_COLOURS.items():
        _box(draw, x, y + 5, x + 14, y + 8, colour)
        x = _label(draw, x + 20, y, {"t": "time", "h": "height", "w": "width"}[name])


def _strip(draw: ImageDraw.ImageDraw, batch: Batch, row: int, top: float) -> None:
    kinds, segments, spans, loss = (x[row].tolist() for x in (batch.kinds, batch.segments, batch.spans, batch.loss))
    colours = {kind.id: KIND_COLOURS[name] for name, kind in KINDS.items()}
    step = STRIP / len(kinds)
    left = MARGIN + LEFT
    for start, end, (segment, kind) in _runs(zip(segments, kinds, strict=True)):
        _box(draw, left + start * step, top, left + end * step, top + TALL, colours.get(kind, style.FAINT))
        if segment < 0:
            _named(draw, left + start * step, top, (end - start) * step, "padding")
    if step >= 4:  # single tokens can be told apart
        for i in range(1, len(kinds)):
            _box(draw, left + i * step - 0.25, top, left + i * step + 0.25, top + TALL, style.PAPER)
    for start, end, learn in _runs(loss):
        if learn:
            _box(draw, left + start * step, top + TALL - 5, left + end * step - 0.5, top + TALL, style.INK)
    for start, end, (_, span) in _runs(zip(segments, spans, strict=True)):
        if span:
            _bracket(draw, left + start * step + 1, left + end * step - 1, top + TALL + 4)
    for start, end, segment in _runs(segments):
        if segment >= 0:
            if start:
                _box(draw, left + start * step - 1.5, top - 16, left + start * step + 1, top + TALL, style.PAPER)
            name = batch.names[segment] or f"sample {segment}"
            _named(draw, left + start * step + 1, top, (end - start) * step, f"{name} · {end - start}", name)


def _curves(draw: ImageDraw.ImageDraw, positions: Tensor, segments: Tensor, top: float) -> None:
    """Steps, one a token: grey where the three axes agree, as they do in text."""
    left, base = MARGIN + LEFT, top + CURVES
    highest = max(int(positions.max()), 1)
    step, rise = STRIP / len(segments), (CURVES - 6) / highest
    for level in (0, highest):
        y = base - level * rise
        draw.line([left * SCALE, y * SCALE, (left + STRIP) * SCALE, y * SCALE], fill=style.FAINT, width=SCALE)
        style.text(draw, (left - 6, y), f"{level:,}", 10, style.SOFT, "rm")
    for i, (axes, segment) in enumerate(zip(positions.tolist(), segments.tolist(), strict=True)):
        if segment < 0:
            continue
        agreed = len(set(axes)) == 1
        for at, colour in zip(axes[::-1], list(AXIS_COLOURS.values())[::-1], strict=True):
            x, y = left + i * step, base - at * rise
            _box(draw, x, y - 1.2, x + max(step, 1), y + 1.2, KIND_COLOURS["text"] if agreed else colour)
    for start, _, segment in _runs(segments.tolist()):
        if start and segment >= 0:
            x = left + start * step
            draw.line([x * SCALE, top * SCALE, x * SCALE, base * SCALE], fill=style.FAINT, width=SCALE)


def _map(batch: Batch, row: int) -> Image.Image:
    """(L, L) pixels: a column's kind where it is seen, paper where not, faint where padding looks at itself."""
    L = batch.ids.shape[1]
    chosen = torch.linspace(0, L - 1, min(L, FINEST)).round().long()
    segments, spans, kinds = (x[row, chosen].cpu() for x in (batch.segments, batch.spans, batch.kinds))
    plan = attention_plan(segments[None], spans[None], causal=True)
    seen = plan.mask(len(chosen), len(chosen), torch.device("cpu"))[0, 0]
    palette = torch.tensor([style.FAINT, *(KIND_COLOURS[name] for name in KINDS)])  # −1, padding, first
    colours = palette[kinds + 1].expand(len(chosen), -1, -1)
    pixels = torch.where(seen[..., None], colours, torch.tensor(style.PAPER))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def _runs(values: Iterable[_T]) -> list[tuple[int, int, _T]]:
    """(start, end, value) of each unbroken run."""
    found, at = [], 0
    for value, group in groupby(values):
        end = at + sum(1 for _ in group)
        found.append((at, end, value))
        at = end
    return found


def _box(draw: ImageDraw.ImageDraw, x0: float, y0: float, x1: float, y1: float, colour: Colour) -> None:
    """At least a pixel wide and high, however fine the tokens are."""
    left, top = round(x0 * SCALE), round(y0 * SCALE)
    draw.rectangle([left, top, max(round(x1 * SCALE) - 1, left), max(round(y1 * SCALE) - 1, top)], fill=colour)


def _bracket(draw: ImageDraw.ImageDraw, x0: float, x1: float, y: float) -> None:
    points = [(x0, y), (x0, y + 4), (x1, y + 4), (x1, y)]
    draw.line([(x * SCALE, at * SCALE) for x, at in points], fill=style.INK, width=round(1.2 * SCALE))


def _label(draw: ImageDraw.ImageDraw, x: float, y: float, words: str) -> float:
    """Draw a key's words and say where the next key begins."""
    style.text(draw, (x, y - 1), words, 12)
    return x + draw.textlength(words, font=style.font(12)) / SCALE + 20


def _named(draw: ImageDraw.ImageDraw, x: float, top: float, room: float, *names: str) -> None:
    """The first of the names that has room above the strip."""
    for name in names:
        if draw.textlength(name, font=style.font(11)) / SCALE <= room:
            style.text(draw, (x, top - 4), name, 11, style.SOFT, "ls")
            return
