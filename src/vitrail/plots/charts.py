"""Matplotlib charts (extra `plots`): a common style, small multiples, inline SVG for HTML pages, and saving."""

import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.errors import VitrailError
from vitrail.plots import style
from vitrail.plots.style import Colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 100
NUM_COLUMNS = 4
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".pdf", ".svg")


def to_hex(colour: Colour) -> str:
    return "#" + "".join(f"{level:02x}" for level in colour)


PAPER, INK, SOFT, FAINT = map(to_hex, (style.PAPER, style.INK, style.SOFT, style.FAINT))
BLUE, RED, GREEN, GOLD, VIOLET = map(to_hex, (style.BLUE, style.RED, style.GREEN, style.GOLD, style.VIOLET))
COLOURS = (BLUE, RED, GREEN, GOLD, VIOLET, INK, SOFT)
SETTINGS = {
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
    "grid.color": FAINT,
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "vitrail",  # equal charts give equal files
}


@contextmanager
def chart_style() -> Iterator[None]:
    """Use the style of our charts. Decorates every function that draws a chart."""
    try:
        import matplotlib
    except ImportError as error:
        raise VitrailError("charts need matplotlib, which is not installed", "pip install 'vitrail[plots]'") from error
    with matplotlib.rc_context(SETTINGS):
        yield


def make_panels(
    num_panels: int,
    title: str,
    note: str = "",
    *,
    num_columns: int = NUM_COLUMNS,
    size: tuple[float, float] = (250, 190),
    legend_height: float = 0,
) -> "tuple[Figure, list[Axes]]":
    """Create a figure with a grid of panels of `size` pixels, a title and a note.

    `legend_height` reserves pixels below the panels for a legend of the figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(num_columns, num_panels)
    rows = math.ceil(num_panels / columns)
    width, head = max(columns * size[0], 640), 64 if note else 44
    height = rows * size[1] + head + legend_height
    bottom = legend_height / height
    layout = ConstrainedLayoutEngine(rect=(0, bottom, 1, 1 - head / height - bottom))
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, layout=layout)
    figure.text(10 / width, 1 - 12 / height, title, va="top", fontsize=14)
    figure.text(10 / width, 1 - 40 / height, note, va="top", color=SOFT)
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = list(grid.flat)
    for unused in axes[num_panels:]:
        unused.set_axis_off()
    return figure, axes[:num_panels]


@chart_style()
def draw_heatmap(
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    row_label: str,
    column_label: str,
) -> "Figure":
    """Draw fractions in 0…1, one list per row. `row_label` and `column_label` name the axes."""
    size = (120 + 70 * len(columns), 80 + 40 * len(rows))
    figure, [axes] = make_panels(1, title, size=size)
    from matplotlib.colors import LinearSegmentedColormap

    axes.imshow(values, cmap=LinearSegmentedColormap.from_list("blue", [FAINT, BLUE]), vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(column_label)
    axes.set_ylabel(row_label)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            axes.text(x, y, f"{value:.0%}", ha="center", va="center", color=PAPER if value > 0.5 else INK)
    return figure


def set_token_axis(axes: "Axes") -> None:
    """Use a log2 x axis with plain numbers."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")


def add_figure_legend(figure: "Figure", axes: "Sequence[Axes]", num_columns: int = NUM_COLUMNS) -> None:
    """Add one legend of all labels of several axes below the panels."""
    handles = {label: handle for one in axes for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=num_columns, frameon=False, fontsize=8)


def to_inline_svg(figure: "Figure", label: str) -> str:
    """Return an <svg> element for an HTML page.

    Colours become CSS variables, such as `var(--125cba, #125cba)`, so that a style sheet can replace them in dark mode.
    """
    text = _to_svg(figure, transparent=True)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert size is not None
    width, height = (float(points) * DPI / 72 for points in size.groups())
    body = text[text.index(">", text.index("<svg")) + 1 :].replace("xlink:href", "href")
    for colour in (*COLOURS, PAPER, FAINT):
        body = body.replace(colour, f"var(--{colour[1:]}, {colour})")
    return (
        f'<svg class="drawn" {size[0]} width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{html.escape(label)}">{body}'
    )


def check_chart_path(path: Path) -> None:
    """Reject a path with an unsupported suffix, before the chart is computed."""
    if path.suffix.lower() not in SUFFIXES:
        raise VitrailError(
            f"{path} cannot be written: {path.suffix or 'no suffix'} is not a chart format",
            f"use one of the suffixes {', '.join(SUFFIXES)}",
        )


def save_chart(figure: "Figure", path: Path) -> None:
    """Save a chart in the format of the path's suffix, and create its folder."""
    check_chart_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".svg":
            path.write_text(_to_svg(figure, transparent=False), encoding="utf-8")
        else:
            figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise VitrailError(f"{path} cannot be written: {error.strerror}", "give another path") from error


@chart_style()
def _to_svg(figure: "Figure", *, transparent: bool) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=transparent, metadata={"Date": None, "Creator": None})
    return re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
