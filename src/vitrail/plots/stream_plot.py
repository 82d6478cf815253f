"""Plot packed rows of a batch.

Each row has a strip of token kinds with sample names above it, bidirectional spans bracketed and loss tokens
underlined. Below it are the (t, h, w) positions. The attention mask at the right is coloured by the kind of the key.

Shapes: L tokens per row.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from vitrail.nn import attention_plan
from vitrail.plots import style
from vitrail.plots.charts import BLUE, DPI, FAINT, GOLD, INK, PAPER, RED, SOFT, chart_style, to_hex
from vitrail.plots.style import Colour
from vitrail.stream import TOKEN_KINDS, PackedBatch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_T = TypeVar("_T")

KIND_COLOURS: dict[str, Colour] = {
    "text": (146, 152, 164),
    "image": style.GREEN,
    "video": style.VIOLET,
    "action": (206, 92, 134),
    "query": (150, 108, 62),
}
AXIS_COLOURS = {"time": GOLD, "height": BLUE, "width": RED}
WIDTH, ROW_HEIGHT, HEAD_HEIGHT = 1180, 220, 100  # pixels
MAX_ROWS = 8  # rows drawn
MAX_NAME_LENGTH = 150  # characters above a whole row; longer names are left out
MAX_MAP_TOKENS = 340  # maximum tokens per side of the attention map; longer rows are subsampled


@chart_style()
def draw_stream(batch: PackedBatch, title: str = "Packed streams") -> "Figure":
    """Plot the first rows of a batch."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = min(len(batch.ids), MAX_ROWS)
    height = HEAD_HEIGHT + rows * ROW_HEIGHT
    layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - HEAD_HEIGHT / height))
    figure = Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI, layout=layout)
    figure.text(0.02, 1 - 12 / height, title, va="top", fontsize=14)
    more = f" · first {rows} rows" if rows < len(batch.ids) else ""
    figure.text(0.02, 1 - 40 / height, f"{batch}{more}", va="top", color=SOFT)
    _add_legend(figure, batch, 1 - 56 / height)
    grid = figure.add_gridspec(2 * rows, 2, width_ratios=(5, 1), height_ratios=(2, 5) * rows)
    for row in range(rows):
        strip = figure.add_subplot(grid[2 * row, 0])
        _draw_strip(strip, batch, row)
        _draw_positions(figure.add_subplot(grid[2 * row + 1, 0], sharex=strip), batch, row)
        map_axes = figure.add_subplot(
            grid[2 * row : 2 * row + 2, 1], title="attention (rows: queries)", xticks=(), yticks=()
        )
        map_axes.imshow(compute_attention_map(batch, row).numpy())
    return figure


def _add_legend(figure: "Figure", batch: PackedBatch, top: float) -> None:
    from matplotlib.patches import Rectangle

    present = set(batch.kinds.unique().tolist())
    entries = {name: to_hex(KIND_COLOURS[name]) for name, kind in TOKEN_KINDS.items() if kind.id in present}
    entries |= {"loss (underlined)": INK, **AXIS_COLOURS}
    handles = [Rectangle((0, 0), 1, 1, color=colour, label=label) for label, colour in entries.items()]
    if batch.spans.any():
        handles.append(Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=INK, label="bidirectional (bracket)"))
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.01, top), ncols=len(handles))


def _draw_strip(axes: "Axes", batch: PackedBatch, row: int) -> None:
    """Draw the kinds of the tokens as coloured cells."""
    segments, spans, loss = (x[row].tolist() for x in (batch.segments, batch.spans, batch.loss_mask))
    axes.imshow(_kind_palette()[batch.kinds[row].cpu() + 1][None].numpy(), aspect="auto", interpolation="none")
    axes.set_axis_off()
    axes.set_ylim(1.1, -1.4)
    for start, end, segment in _find_runs(segments):
        name = "padding" if segment < 0 else f"{batch.names[segment] or f'sample {segment}'} · {end - start}"
        if len(name) < MAX_NAME_LENGTH * (end - start) / len(segments):
            axes.text(start - 0.5, -0.6, name, fontsize=8, color=SOFT)
        axes.vlines(start - 0.5, -0.5, 0.5, color=PAPER, linewidth=2)
    for start, end, has_loss in _find_runs(loss):
        if has_loss:
            axes.hlines(0.45, start - 0.4, end - 0.6, color=INK, linewidth=3)
    for start, end, (_, span) in _find_runs(zip(segments, spans, strict=True)):
        if span:
            axes.plot([start - 0.4, start - 0.4, end - 0.6, end - 0.6], [0.7, 0.9, 0.9, 0.7], color=INK, linewidth=1)


def _draw_positions(axes: "Axes", batch: PackedBatch, row: int) -> None:
    """Plot the positions of each token: grey if the three axes agree, as in text."""
    positions, real = batch.positions[row].cpu(), (batch.segments[row] >= 0).cpu()
    tokens = torch.arange(len(real))
    agree = (positions == positions[:, :1]).all(1)
    for mask, columns in ((real & ~agree, AXIS_COLOURS.values()), (real & agree, [to_hex(KIND_COLOURS["text"])])):
        for axis, colour in enumerate(columns):
            axes.plot(tokens[mask], positions[mask, axis], "_", color=colour, markersize=4, markeredgewidth=2)
    for start, _, segment in _find_runs(batch.segments[row].tolist()):
        if start and segment >= 0:
            axes.axvline(start - 0.5, color=FAINT, linewidth=1)
    axes.set_ylabel("position")


def compute_attention_map(batch: PackedBatch, row: int) -> Tensor:
    """Return the attention mask as colours uint8 (L, L, 3): the kind of the key where visible, else the background."""
    L = batch.ids.shape[1]
    positions = torch.linspace(0, L - 1, min(L, MAX_MAP_TOKENS)).round().long()
    segments, spans, kinds = (x[row, positions].cpu() for x in (batch.segments, batch.spans, batch.kinds))
    plan = attention_plan(segments[None], spans[None], causal=True)
    visible = plan.mask(len(positions), len(positions), torch.device("cpu"))[0, 0]
    colours = _kind_palette()[kinds + 1].expand(len(positions), -1, -1)
    return torch.where(visible[..., None], colours, torch.tensor(style.PAPER, dtype=torch.uint8))


def _kind_palette() -> Tensor:
    """Return the colours of kinds −1 (padding), 0, 1, …: uint8 (kinds + 1, 3)."""
    return torch.tensor([style.FAINT, *(KIND_COLOURS[name] for name in TOKEN_KINDS)], dtype=torch.uint8)


def _find_runs(values: Iterable[_T]) -> list[tuple[int, int, _T]]:
    """Return (start, end, value) of each run of equal values."""
    found, at = [], 0
    for value, group in groupby(values):
        end = at + sum(1 for _ in group)
        found.append((at, end, value))
        at = end
    return found
