"""Draw how each resolution policy divides an image into views and tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from PIL import Image, ImageDraw, ImageStat

from vitrail.errors import ImageError
from vitrail.plots.style import (
    BLUE,
    FAINT,
    INK,
    PAPER,
    SCALE,
    SOFT,
    Colour,
    downscale,
    draw_text,
    load_font,
    make_canvas,
)
from vitrail.processing.image_layout import ImageLayout, ImageView, ResolutionPolicy
from vitrail.registry import RESOLUTION_POLICIES

PANEL_WIDTH = 400  # panel width; the image area is PANEL_WIDTH × PANEL_HEIGHT
PANEL_HEIGHT = 300
GAP = 28
MARGIN = 36
HEAD, CAPTION_HEIGHT, FOOT = 70, 62, 58

VIEW_COLOUR = BLUE  # views and newline tokens
CROPPED_COLOUR: Colour = (236, 233, 226)  # overlay on cropped regions
PADDING_COLOURS: tuple[Colour, Colour] = FAINT, (196, 192, 183)  # background and strokes of padding


Box: TypeAlias = tuple[int, int, int, int]  # (left, top, right, bottom) on a panel, as in Pillow


def draw_token_grid(
    image: Image.Image, policies: Mapping[str, ResolutionPolicy] | None = None, *, title: str = "", columns: int = 4
) -> Image.Image:
    """Draw the original image and one panel per policy (default: all policies), each with its token count.

    A panel shows the tower's input views at a common scale, overlaid with the token grid. Padding is hatched, cropped
    regions are faded. If a policy rejects the image, its panel shows the error.
    """
    policies = {name: kind() for name, kind in RESOLUTION_POLICIES.items()} if policies is None else policies
    panels = [
        _draw_source_panel(image),
        *(_draw_policy_panel(image, name, policy) for name, policy in policies.items()),
    ]
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    width = 2 * MARGIN + columns * PANEL_WIDTH + (columns - 1) * GAP
    height = HEAD + rows * (PANEL_HEIGHT + CAPTION_HEIGHT) + (rows - 1) * GAP + FOOT
    sheet, draw = make_canvas(width, height)
    _draw_text(
        draw,
        (MARGIN, 24),
        _shorten_text(draw, title or "Image tokens by resolution policy", 22, width - 2 * MARGIN),
        22,
    )
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        at = (MARGIN + column * (PANEL_WIDTH + GAP), HEAD + row * (PANEL_HEIGHT + CAPTION_HEIGHT + GAP))
        sheet.paste(panel, (at[0] * SCALE, at[1] * SCALE))
    _draw_legend(sheet, height - FOOT + 18)
    return downscale(sheet)


def describe_layout(name: str, layout: ImageLayout) -> str:
    """Describe a layout, such as "anyres · 5 views · 2,928 tokens"."""
    views = len(layout.views)
    tokens = f"{layout.num_tokens:,} token{'s' if layout.num_tokens != 1 else ''}"
    return f"{name} · {views} view{'s' if views > 1 else ''} · {tokens}"


def describe_sizes(layout: ImageLayout) -> str:
    """Describe the view sizes, the stretch, and the fractions of padding and cropping."""
    base, tiles = _split_views(layout)
    main_view = layout.views[base or 0]
    words = [f"{main_view.canvas_size[1]}×{main_view.canvas_size[0]} px"]
    if tiles:
        rows, columns = _get_tile_grid(layout, tiles)
        words = [f"{'' if base is None else 'overview + '}{columns}×{rows} tiles of {words[0]}"]
    words += [_format_stretch(main_view.stretch)]
    visible_areas = [_compute_overlap(layout.image_box(view), view.canvas_size) for view in layout.views]
    padding = 1 - sum(visible_areas) / sum(math.prod(view.canvas_size) for view in layout.views)
    if padding > 0.005:
        words += [f"{_format_fraction(padding)} padding"]
    if not tiles:
        cropped = 1 - visible_areas[0] / math.prod(layout.image_box(main_view)[2:])
        words += [f"{_format_fraction(cropped)} cropped"] if cropped > 0.005 else []
    return " · ".join(words)


def _format_fraction(fraction: float) -> str:
    return f"{fraction:.0%}" if fraction < 0.995 else "over 99%"


def _format_stretch(stretch: float) -> str:
    if abs(math.log(stretch)) < 0.005:
        return "aspect kept"
    return f"{stretch:.2f}× too wide" if stretch > 1 else f"{1 / stretch:.2f}× too tall"


def _compute_overlap(image_box: tuple[float, float, float, float], size: tuple[int, int]) -> float:
    """Compute the area of a canvas that the image covers."""
    top, left, high, wide = image_box
    down = min(top + high, size[0]) - max(top, 0)
    across = min(left + wide, size[1]) - max(left, 0)
    return max(down, 0) * max(across, 0)


# ── panels ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _draw_source_panel(image: Image.Image) -> Image.Image:
    panel, draw = make_canvas(PANEL_WIDTH, PANEL_HEIGHT + CAPTION_HEIGHT)
    scale = min(PANEL_WIDTH * SCALE / image.width, PANEL_HEIGHT * SCALE / image.height)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    thumbnail = image.resize(size, Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST)
    panel.paste(thumbnail, (0, PANEL_HEIGHT * SCALE - size[1]))
    _draw_caption(draw, "original", f"{image.width}×{image.height} px")
    return panel


def _draw_policy_panel(image: Image.Image, name: str, policy: ResolutionPolicy) -> Image.Image:
    panel, draw = make_canvas(PANEL_WIDTH, PANEL_HEIGHT + CAPTION_HEIGHT)
    try:
        layout, views = policy.layout(image.height, image.width), policy.apply(image)
    except ImageError as error:
        _draw_hatch(panel, (0, 0, PANEL_WIDTH * SCALE, PANEL_HEIGHT * SCALE))
        _draw_caption(draw, f"{name} · rejected", error.problem)
        return panel
    places, extent = _arrange_views(layout)
    scale = min(PANEL_WIDTH * SCALE / extent[1], PANEL_HEIGHT * SCALE / extent[0])
    # Align images with their captions at the bottom.
    lift = PANEL_HEIGHT * SCALE / scale - extent[0]
    places = [(top + lift, left) for top, left in places]
    # White lines on a dark image, dark lines on a light one.
    light = ImageStat.Stat(image.resize((64, 64)).convert("L")).median[0] > 150
    for view, view_image, place in zip(layout.views, views, places, strict=True):
        box = _paste_view(panel, image, layout, view, view_image, place, scale)
        _draw_token_lines(panel, view, box, INK if light else (255, 255, 255))
        draw.rectangle(box, outline=VIEW_COLOUR, width=2 * SCALE if len(views) > 1 else SCALE)
    _draw_newline_tokens(draw, layout, places, scale)
    _draw_caption(draw, describe_layout(name, layout), describe_sizes(layout))
    return panel


def _split_views(layout: ImageLayout) -> tuple[int | None, list[int]]:
    """Return the index of the view of the whole image, if any, and the indices of its tiles."""
    boxes = [(layout.image_box(view), view.canvas_size) for view in layout.views]
    inside = (i for i, (box, size) in enumerate(boxes) if math.isclose(_compute_overlap(box, size), box[2] * box[3]))
    base = 0 if len(boxes) == 1 else next(inside, None)
    return base, [i for i in range(len(layout.views)) if i != base]


def _get_tile_grid(layout: ImageLayout, tiles: list[int]) -> tuple[int, int]:
    """Count rows and columns of the tiles by their distinct offsets."""
    tops, lefts = ({layout.views[i].offset[axis] for i in tiles} for axis in (0, 1))
    return len(tops), len(lefts)


def _arrange_views(layout: ImageLayout) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Place the views in a plane of canvas pixels; return their top left corners and the extent of the plane."""
    first, (base, tiles) = layout.views[0], _split_views(layout)
    tall, wide = first.canvas_size
    if not tiles:
        # Margins for cropped regions: up to half a canvas on each side.
        top, left, high, across = layout.image_box(first)
        above, before = (
            min(max(0.0, -edge), side / 2) for edge, side in zip((top, left), first.canvas_size, strict=True)
        )
        below = min(max(0.0, top + high - tall), tall / 2)
        after = min(max(0.0, left + across - wide), wide / 2)
        return [(above, before)], (above + tall + below, before + wide + after)
    rows, columns = _get_tile_grid(layout, tiles)
    start = 0.0 if base is None else 1.16 * wide  # the overview comes first
    places = [(row * float(tall), start + column * wide) for row in range(rows) for column in range(columns)]
    if base is not None:
        places.insert(base, ((rows - 1) * float(tall), 0.0))
    return places, (rows * tall, start + columns * wide + 0.08 * wide)


def _paste_view(
    panel: Image.Image,
    image: Image.Image,
    layout: ImageLayout,
    view: ImageView,
    view_image: Image.Image,
    place: tuple[float, float],
    scale: float,
) -> Box:
    """Paste a view with its cropped regions and padding; return the box of its canvas."""
    box = _scale_box(place, view.canvas_size, scale)
    top, left, high, wide = layout.image_box(view)
    inside = (place[0] + top, place[1] + left)
    if len(layout.views) == 1 and (top < 0 or left < 0):
        _paste_faded(panel, image, _scale_box(inside, (high, wide), scale))
    size = (max(1, box[2] - box[0]), max(1, box[3] - box[1]))
    panel.paste(view_image.resize(size, Image.Resampling.LANCZOS), box[:2])
    image_box = _scale_box(inside, (high, wide), scale)
    for pad in _get_uncovered_boxes(box, image_box):
        _draw_hatch(panel, pad)
    return box


def _scale_box(place: tuple[float, float], size: tuple[float, float], scale: float) -> Box:
    top, left = place
    return round(left * scale), round(top * scale), round((left + size[1]) * scale), round((top + size[0]) * scale)


def _get_uncovered_boxes(box: Box, image_box: Box) -> list[Box]:
    """Return the parts of `box` that the image does not cover: above, below, left, right."""
    left, top, right, bottom = box
    x0, x1 = (min(max(x, left), right) for x in (image_box[0], image_box[2]))
    y0, y1 = (min(max(y, top), bottom) for y in (image_box[1], image_box[3]))
    parts = [(left, top, right, y0), (left, y1, right, bottom), (left, y0, x0, y1), (x1, y0, right, y1)]
    return [part for part in parts if part[2] > part[0] and part[3] > part[1]]


def _paste_faded(panel: Image.Image, image: Image.Image, box: Box) -> None:
    """Paste the whole image, faded, at its position around the view."""
    left, top, right, bottom = box
    x0, y0 = max(0, left), max(0, top)
    x1, y1 = min(PANEL_WIDTH * SCALE, right), min(PANEL_HEIGHT * SCALE, bottom)
    across, down = image.width / (right - left), image.height / (bottom - top)
    part = ((x0 - left) * across, (y0 - top) * down, (x1 - left) * across, (y1 - top) * down)
    resized = image.resize((x1 - x0, y1 - y0), Image.Resampling.BICUBIC, box=part)
    panel.paste(Image.blend(resized, Image.new("RGB", resized.size, CROPPED_COLOUR), 0.72), (x0, y0))


def _draw_token_lines(panel: Image.Image, view: ImageView, box: Box, colour: Colour) -> None:
    """Draw token lines, and fainter patch lines where there is space."""
    left, top, right, bottom = box
    size, grid = (right - left, bottom - top), view.grid
    if min(size) < 2:
        return
    overlay = Image.new("RGBA", size, (*colour, 0))
    pitch = min(size[0] / grid.num_columns, size[1] / grid.num_rows)
    if grid.merge_size > 1 and pitch / grid.merge_size >= 3 * SCALE:
        _draw_rules(overlay, grid.h, grid.w, (*colour, 80), 1)
    fine = pitch < 8 * SCALE
    _draw_rules(overlay, grid.num_rows, grid.num_columns, (*colour, 110 if fine else 190), 1 if fine else SCALE)
    panel.paste(overlay, (left, top), overlay)


def _draw_rules(overlay: Image.Image, rows: int, columns: int, colour: tuple[int, ...], width: int) -> None:
    draw = ImageDraw.Draw(overlay)
    for column in range(1, columns):
        x = round(column * overlay.width / columns)
        draw.line((x, 0, x, overlay.height), fill=colour, width=width)
    for row in range(1, rows):
        y = round(row * overlay.height / rows)
        draw.line((0, y, overlay.width, y), fill=colour, width=width)


def _draw_newline_tokens(
    draw: ImageDraw.ImageDraw, layout: ImageLayout, places: list[tuple[float, float]], scale: float
) -> None:
    """Draw a dot for each newline token: after each row of tiles, or at the end of each view."""
    for span in layout.spans:
        view = layout.views[span.first_view]
        if span.newline in ("row", "row_and_end"):
            columns = span.view_grid[1]
            step = view.canvas_size[0] / view.grid.num_rows * span.window[2] / max(1, span.size[0])
            right = places[span.first_view][1] + columns * view.canvas_size[1] + 0.05 * view.canvas_size[1]
            top = places[span.first_view][0] + span.window[0] * view.canvas_size[0] / view.grid.num_rows
            for row in range(span.size[0]):
                y = top + (row + 0.5) * step
                _draw_dot(
                    draw, (right * scale, y * scale), max(1.5, min(0.3 * step, 0.025 * view.canvas_size[1]) * scale)
                )
        elif span.newline == "end":
            y, x = places[span.first_view]
            r = max(3.0, 0.035 * view.canvas_size[1] * scale)
            _draw_dot(
                draw, ((x + view.canvas_size[1]) * scale - 1.8 * r, (y + view.canvas_size[0]) * scale - 1.8 * r), r
            )


def _draw_dot(draw: ImageDraw.ImageDraw, centre: tuple[float, float], r: float) -> None:
    x, y = centre
    draw.ellipse((x - r, y - r, x + r, y + r), fill=VIEW_COLOUR, outline=PAPER)


def _draw_hatch(panel: Image.Image, box: Box) -> None:
    left, top, right, bottom = box
    ground, stroke = PADDING_COLOURS
    part = Image.new("RGB", (right - left, bottom - top), ground)
    draw = ImageDraw.Draw(part)
    step = 7 * SCALE
    for x in range(-part.height, part.width, step):
        draw.line((x, part.height, x + part.height, 0), fill=stroke, width=SCALE)
    panel.paste(part, (left, top))


# ── text ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _draw_text(draw: ImageDraw.ImageDraw, at: tuple[float, float], string: str, size: int, fill: Colour = INK) -> None:
    draw_text(draw, at, string.replace("×", "x"), size, fill)  # Pillow's default font has no ×


def _shorten_text(draw: ImageDraw.ImageDraw, text: str, size: int, width: int) -> str:
    while draw.textlength(text, font=load_font(size)) > width * SCALE:
        text = text[:-2].rstrip(" …") + "…"
    return text


def _draw_caption(draw: ImageDraw.ImageDraw, first: str, second: str) -> None:
    _draw_text(draw, (0, PANEL_HEIGHT + 10), _shorten_text(draw, first, 18, PANEL_WIDTH), 18)
    _draw_text(draw, (0, PANEL_HEIGHT + 35), _shorten_text(draw, second, 14, PANEL_WIDTH), 14, SOFT)


def _draw_legend(sheet: Image.Image, y: int) -> None:
    draw = ImageDraw.Draw(sheet)
    x = MARGIN
    words = ("token", "patches merged into one", "view", "newline token", "padding", "cropped")
    for index, word in enumerate(words):
        box = (x * SCALE, (y + 1) * SCALE, (x + 24) * SCALE, (y + 17) * SCALE)
        left, top, right, bottom = box
        if index < 2:
            draw.rectangle(box, fill=SOFT)
            overlay = Image.new("RGBA", (right - left, bottom - top))
            _draw_rules(overlay, 2 + 2 * index, 3 + 3 * index, (255, 255, 255, 110 if index else 220), SCALE - index)
            sheet.paste(overlay, (left, top), overlay)
        elif index == 2:
            draw.rectangle(box, outline=VIEW_COLOUR, width=2 * SCALE)
        elif index == 3:
            _draw_dot(draw, ((left + right) / 2, (top + bottom) / 2), 5 * SCALE)
        elif index == 4:
            _draw_hatch(sheet, box)
        else:
            draw.rectangle(box, fill=CROPPED_COLOUR, outline=PADDING_COLOURS[1])
        _draw_text(draw, (x + 32, y), word, 14, SOFT)
        x += 32 + int(draw.textlength(word, font=load_font(14)) / SCALE) + 30
