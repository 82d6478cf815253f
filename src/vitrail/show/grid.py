"""One sheet: how a picture is cut into tokens under each resolution policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from PIL import Image, ImageDraw, ImageStat

from vitrail.errors import ImageError
from vitrail.processing.cut import Cut, Policy, View
from vitrail.processing.resolution import POLICIES
from vitrail.show.style import BLUE, FAINT, INK, PAPER, SCALE, SOFT, Colour, canvas, finish, font, text

PANEL = 400  # width of a panel; the picture area is PANEL × AREA
AREA = 300
GAP = 28
MARGIN = 36
HEAD, CAPTION, FOOT = 70, 62, 58

ACCENT = BLUE  # views and newline tokens
VEIL: Colour = (236, 233, 226)  # over what is cut away
HATCH: tuple[Colour, Colour] = FAINT, (196, 192, 183)  # ground and strokes of padding


Box: TypeAlias = tuple[int, int, int, int]  # (left, top, right, bottom) on a panel, as Pillow wants it


def draw_grid(
    image: Image.Image, policies: Mapping[str, Policy] | None = None, *, title: str = "", columns: int = 4
) -> Image.Image:
    """A sheet with the picture as it is, then one panel a policy (default: all of them), each with its token count.

    A panel shows the views the tower sees at one common scale, with the token grid over them. What a policy pads is
    hatched, what it cuts away is faded. A policy that refuses the picture says so in its panel.
    """
    policies = {name: kind() for name, kind in POLICIES.items()} if policies is None else policies
    panels = [_source(image), *(_panel(image, name, policy) for name, policy in policies.items())]
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    width = 2 * MARGIN + columns * PANEL + (columns - 1) * GAP
    height = HEAD + rows * (AREA + CAPTION) + (rows - 1) * GAP + FOOT
    sheet, draw = canvas(width, height)
    _text(draw, (MARGIN, 24), _shorten(draw, title or "How the picture becomes tokens", 22, width - 2 * MARGIN), 22)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        at = (MARGIN + column * (PANEL + GAP), HEAD + row * (AREA + CAPTION + GAP))
        sheet.paste(panel, (at[0] * SCALE, at[1] * SCALE))
    _legend(sheet, height - FOOT + 18)
    return finish(sheet)


def describe(name: str, cut: Cut) -> str:
    """Such as "anyres · 5 views · 2,928 tokens"."""
    views = len(cut.views)
    return f"{name} · {views} view{'s' if views > 1 else ''} · {cut.tokens:,} token{'s' if cut.tokens != 1 else ''}"


def sizes(cut: Cut) -> str:
    """What the tower sees, how far it is stretched, and what is padding or cut away."""
    base, tiles = _parts(cut)
    whole = cut.views[base or 0]
    words = [f"{whole.canvas[1]}×{whole.canvas[0]} px"]
    if tiles:
        rows, columns = _mosaic(cut, tiles)
        words = [f"{'' if base is None else 'whole + '}{columns}×{rows} tiles of {words[0]}"]
    words += [_stretch(whole.stretch)]
    seen = [_overlap(cut.picture(view), view.canvas) for view in cut.views]
    padding = 1 - sum(seen) / sum(math.prod(view.canvas) for view in cut.views)
    if padding > 0.005:
        words += [f"{_share(padding)} padding"]
    if not tiles:
        lost = 1 - seen[0] / math.prod(cut.picture(whole)[2:])
        words += [f"{_share(lost)} cut away"] if lost > 0.005 else []
    return " · ".join(words)


def _share(share: float) -> str:
    return f"{share:.0%}" if share < 0.995 else "over 99%"


def _stretch(stretch: float) -> str:
    if abs(math.log(stretch)) < 0.005:
        return "aspect kept"
    return f"{stretch:.2f}× too wide" if stretch > 1 else f"{1 / stretch:.2f}× too tall"


def _overlap(picture: tuple[float, float, float, float], size: tuple[int, int]) -> float:
    """Area of a canvas of that size that shows the picture."""
    top, left, high, wide = picture
    down = min(top + high, size[0]) - max(top, 0)
    across = min(left + wide, size[1]) - max(left, 0)
    return max(down, 0) * max(across, 0)


# ── panels ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _source(image: Image.Image) -> Image.Image:
    panel, draw = canvas(PANEL, AREA + CAPTION)
    scale = min(PANEL * SCALE / image.width, AREA * SCALE / image.height)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    shown = image.resize(size, Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST)
    panel.paste(shown, (0, AREA * SCALE - size[1]))
    _caption(draw, "the picture", f"{image.width}×{image.height} px")
    return panel


def _panel(image: Image.Image, name: str, policy: Policy) -> Image.Image:
    panel, draw = canvas(PANEL, AREA + CAPTION)
    try:
        cut, views = policy.cut(image.height, image.width), policy.apply(image)
    except ImageError as error:
        _hatch(panel, (0, 0, PANEL * SCALE, AREA * SCALE))
        _caption(draw, f"{name} · refused", error.problem)
        return panel
    places, extent = _arrange(cut)
    scale = min(PANEL * SCALE / extent[1], AREA * SCALE / extent[0])
    # Pictures stand on their captions.
    lift = AREA * SCALE / scale - extent[0]
    places = [(top + lift, left) for top, left in places]
    # White lines on a dark picture, dark lines on a light one.
    light = ImageStat.Stat(image.resize((64, 64)).convert("L")).median[0] > 150
    for view, made, place in zip(cut.views, views, places, strict=True):
        box = _view(panel, image, cut, view, made, place, scale)
        _lines(panel, view, box, INK if light else (255, 255, 255))
        draw.rectangle(box, outline=ACCENT, width=2 * SCALE if len(views) > 1 else SCALE)
    _newlines(draw, cut, places, scale)
    _caption(draw, describe(name, cut), sizes(cut))
    return panel


def _parts(cut: Cut) -> tuple[int | None, list[int]]:
    """Which view shows all of the picture, if one does, and which are tiles of it."""
    shown = [(cut.picture(view), view.canvas) for view in cut.views]
    inside = (i for i, (box, size) in enumerate(shown) if math.isclose(_overlap(box, size), box[2] * box[3]))
    base = 0 if len(shown) == 1 else next(inside, None)
    return base, [i for i in range(len(cut.views)) if i != base]


def _mosaic(cut: Cut, tiles: list[int]) -> tuple[int, int]:
    """Rows and columns of the tiles: those that lie side by side show the picture at one height."""
    tops, lefts = ({cut.views[i].offset[axis] for i in tiles} for axis in (0, 1))
    return len(tops), len(lefts)


def _arrange(cut: Cut) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Top left corner of each view in a plane of canvas pixels, and the plane's extent."""
    first, (base, tiles) = cut.views[0], _parts(cut)
    tall, wide = first.canvas
    if not tiles:
        # Room for what is cut away, up to half a canvas on each side, and a little for the frame.
        top, left, high, across = cut.picture(first)
        above, before = (min(max(0.0, -edge), side / 2) for edge, side in zip((top, left), first.canvas, strict=True))
        below = min(max(0.0, top + high - tall), tall / 2)
        after = min(max(0.0, left + across - wide), wide / 2)
        return [(above, before)], (above + tall + below, before + wide + after)
    rows, columns = _mosaic(cut, tiles)
    start = 0.0 if base is None else 1.16 * wide  # the whole stands before the tiles, wherever it is read
    places = [(row * float(tall), start + column * wide) for row in range(rows) for column in range(columns)]
    if base is not None:
        places.insert(base, ((rows - 1) * float(tall), 0.0))
    return places, (rows * tall, start + columns * wide + 0.08 * wide)


def _view(
    panel: Image.Image,
    image: Image.Image,
    cut: Cut,
    view: View,
    made: Image.Image,
    place: tuple[float, float],
    scale: float,
) -> Box:
    """Put the view on the panel with what it cuts away and its padding; gives the box its canvas fills."""
    box = _box(place, view.canvas, scale)
    top, left, high, wide = cut.picture(view)
    inside = (place[0] + top, place[1] + left)
    if len(cut.views) == 1 and (top < 0 or left < 0):
        _faded(panel, image, _box(inside, (high, wide), scale))
    size = (max(1, box[2] - box[0]), max(1, box[3] - box[1]))
    panel.paste(made.resize(size, Image.Resampling.LANCZOS), box[:2])
    shown = _box(inside, (high, wide), scale)
    for pad in _outside(box, shown):
        _hatch(panel, pad)
    return box


def _box(place: tuple[float, float], size: tuple[float, float], scale: float) -> Box:
    top, left = place
    return round(left * scale), round(top * scale), round((left + size[1]) * scale), round((top + size[0]) * scale)


def _outside(box: Box, shown: Box) -> list[Box]:
    """The parts of `box` that `shown` does not cover: above, below, before, after."""
    left, top, right, bottom = box
    x0, x1 = (min(max(x, left), right) for x in (shown[0], shown[2]))
    y0, y1 = (min(max(y, top), bottom) for y in (shown[1], shown[3]))
    parts = [(left, top, right, y0), (left, y1, right, bottom), (left, y0, x0, y1), (x1, y0, right, y1)]
    return [part for part in parts if part[2] > part[0] and part[3] > part[1]]


def _faded(panel: Image.Image, image: Image.Image, box: Box) -> None:
    """The whole picture where it would lie, paled, as far as it fits on the panel."""
    left, top, right, bottom = box
    x0, y0 = max(0, left), max(0, top)
    x1, y1 = min(PANEL * SCALE, right), min(AREA * SCALE, bottom)
    across, down = image.width / (right - left), image.height / (bottom - top)
    part = ((x0 - left) * across, (y0 - top) * down, (x1 - left) * across, (y1 - top) * down)
    shown = image.resize((x1 - x0, y1 - y0), Image.Resampling.BICUBIC, box=part)
    panel.paste(Image.blend(shown, Image.new("RGB", shown.size, VEIL), 0.72), (x0, y0))


def _lines(panel: Image.Image, view: View, box: Box, colour: Colour) -> None:
    """Token lines, and fainter patch lines between them where there is room."""
    left, top, right, bottom = box
    size, grid = (right - left, bottom - top), view.grid
    if min(size) < 2:
        return
    overlay = Image.new("RGBA", size, (*colour, 0))
    pitch = min(size[0] / grid.columns, size[1] / grid.rows)
    if grid.merge > 1 and pitch / grid.merge >= 3 * SCALE:
        _ruled(overlay, grid.h, grid.w, (*colour, 80), 1)
    fine = pitch < 8 * SCALE
    _ruled(overlay, grid.rows, grid.columns, (*colour, 110 if fine else 190), 1 if fine else SCALE)
    panel.paste(overlay, (left, top), overlay)


def _ruled(overlay: Image.Image, rows: int, columns: int, colour: tuple[int, ...], width: int) -> None:
    draw = ImageDraw.Draw(overlay)
    for column in range(1, columns):
        x = round(column * overlay.width / columns)
        draw.line((x, 0, x, overlay.height), fill=colour, width=width)
    for row in range(1, rows):
        y = round(row * overlay.height / rows)
        draw.line((0, y, overlay.width, y), fill=colour, width=width)


def _newlines(draw: ImageDraw.ImageDraw, cut: Cut, places: list[tuple[float, float]], scale: float) -> None:
    """A dot for each newline token: after each row of a mosaic, or at the end of each view."""
    for span in cut.spans:
        view = cut.views[span.first]
        if span.newline == "row":
            columns = span.layout[1]
            step = view.canvas[0] / view.grid.rows * span.window[2] / max(1, span.size[0])
            right = places[span.first][1] + columns * view.canvas[1] + 0.05 * view.canvas[1]
            top = places[span.first][0] + span.window[0] * view.canvas[0] / view.grid.rows
            for row in range(span.size[0]):
                y = top + (row + 0.5) * step
                _dot(draw, (right * scale, y * scale), max(1.5, min(0.3 * step, 0.025 * view.canvas[1]) * scale))
        elif span.newline == "end":
            y, x = places[span.first]
            r = max(3.0, 0.035 * view.canvas[1] * scale)
            _dot(draw, ((x + view.canvas[1]) * scale - 1.8 * r, (y + view.canvas[0]) * scale - 1.8 * r), r)


def _dot(draw: ImageDraw.ImageDraw, centre: tuple[float, float], r: float) -> None:
    x, y = centre
    draw.ellipse((x - r, y - r, x + r, y + r), fill=ACCENT, outline=PAPER)


def _hatch(panel: Image.Image, box: Box) -> None:
    left, top, right, bottom = box
    ground, stroke = HATCH
    part = Image.new("RGB", (right - left, bottom - top), ground)
    draw = ImageDraw.Draw(part)
    step = 7 * SCALE
    for x in range(-part.height, part.width, step):
        draw.line((x, part.height, x + part.height, 0), fill=stroke, width=SCALE)
    panel.paste(part, (left, top))


# ── words ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _text(draw: ImageDraw.ImageDraw, at: tuple[float, float], words: str, size: int, fill: Colour = INK) -> None:
    text(draw, at, words.replace("×", "x"), size, fill)  # Pillow's own font has no ×


def _shorten(draw: ImageDraw.ImageDraw, words: str, size: int, width: int) -> str:
    while draw.textlength(words, font=font(size)) > width * SCALE:
        words = words[:-2].rstrip(" …") + "…"
    return words


def _caption(draw: ImageDraw.ImageDraw, first: str, second: str) -> None:
    _text(draw, (0, AREA + 10), _shorten(draw, first, 18, PANEL), 18)
    _text(draw, (0, AREA + 35), _shorten(draw, second, 14, PANEL), 14, SOFT)


def _legend(sheet: Image.Image, y: int) -> None:
    draw = ImageDraw.Draw(sheet)
    x = MARGIN
    words = ("token", "patches merged into one", "view of the tower", "newline token", "padding", "cut away")
    for index, word in enumerate(words):
        box = left, top, right, bottom = (x * SCALE, (y + 1) * SCALE, (x + 24) * SCALE, (y + 17) * SCALE)
        if index < 2:
            draw.rectangle(box, fill=SOFT)
            overlay = Image.new("RGBA", (right - left, bottom - top))
            _ruled(overlay, 2 + 2 * index, 3 + 3 * index, (255, 255, 255, 110 if index else 220), SCALE - index)
            sheet.paste(overlay, (left, top), overlay)
        elif index == 2:
            draw.rectangle(box, outline=ACCENT, width=2 * SCALE)
        elif index == 3:
            _dot(draw, ((left + right) / 2, (top + bottom) / 2), 5 * SCALE)
        elif index == 4:
            _hatch(sheet, box)
        else:
            draw.rectangle(box, fill=VEIL, outline=HATCH[1])
        _text(draw, (x + 32, y), word, 14, SOFT)
        x += 32 + int(draw.textlength(word, font=font(14)) / SCALE) + 30
