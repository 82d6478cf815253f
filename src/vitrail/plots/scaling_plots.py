"""Charts of scores over visual tokens: fitted laws, clusters, curves by method, differences and token budgets."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vitrail.plots.charts import (
    BLUE,
    COLOURS,
    GOLD,
    GREEN,
    INK,
    RED,
    SOFT,
    add_figure_legend,
    chart_style,
    make_panels,
    set_token_axis,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]  # tokens, score


class LawPanel(NamedTuple):
    """Measured points, fitted curve, prediction interval and outliers of one panel."""

    title: str
    note: str
    points: Points
    curve: Points
    low: Points = ()
    high: Points = ()
    outliers: Sequence[float] = ()


class PlanPanel(NamedTuple):
    """Predicted score over tokens, and the chosen number of tokens."""

    curve: Points
    chosen: tuple[float, float]


@chart_style()
def draw_laws(panels: Sequence[LawPanel], title: str, note: str = "") -> "Figure":
    """Draw one panel per task: scores as dots (outliers red), the law as a line, its prediction interval dashed."""
    figure, axes = make_panels(len(panels), title, note)
    for one, panel in zip(axes, panels, strict=True):
        set_token_axis(one)
        one.set_title(panel.title)
        one.set_xlabel(panel.note, fontsize=7)
        one.plot(*_columns(panel.curve), color=BLUE)
        colours = [RED if n in panel.outliers else INK for n, _ in panel.points]
        if panel.points:
            one.scatter(*_columns(panel.points), c=colours, s=14, zorder=3)
        limits = one.get_ylim()  # intervals are often wider than the data
        for edge in (panel.low, panel.high):
            one.plot(*_columns(edge), color=SOFT, linewidth=0.75, linestyle="--")
        one.set_ylim(limits)
    return figure


@chart_style()
def draw_clusters(groups: Sequence[Mapping[str, Points]], title: str, note: str = "") -> "Figure":
    """Draw one panel per cluster of tasks, each with a legend."""
    figure, axes = make_panels(len(groups), title, note, size=(280, 300))
    for one, group in zip(axes, groups, strict=True):
        set_token_axis(one)
        one.set_title(f"{len(group)} tasks")
        for i, (task, points) in enumerate(group.items()):
            one.plot(*_columns(points), ".-", color=COLOURS[i % len(COLOURS)], label=task)
        one.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=7)
    return figure


@chart_style()
def draw_score_curves(tasks: Mapping[str, Mapping[str, Points]], title: str, note: str = "") -> "Figure":
    """Draw one panel per task and one line per way of making tokens, with a common legend."""
    ways = list(dict.fromkeys(way for lines in tasks.values() for way in lines))
    rows = -(-len(ways) // 4)
    figure, axes = make_panels(len(tasks), title, note, legend_height=16 * rows + 12)
    for one, (task, lines) in zip(axes, tasks.items(), strict=True):
        set_token_axis(one)
        one.set_title(task)
        for way, points in lines.items():
            i = ways.index(way)
            dashes = "--" if i >= len(COLOURS) else "-"
            one.plot(*_columns(points), f".{dashes}", color=COLOURS[i % len(COLOURS)], label=way, linewidth=1.2)
    add_figure_legend(figure, axes)
    return figure


@chart_style()
def draw_differences(tasks: Mapping[str, Points], title: str, note: str = "") -> "Figure":
    """Draw one panel per task and one bar per number of tokens: green if the first model is better, gold if not."""
    figure, axes = make_panels(len(tasks), title, note)
    for one, (task, points) in zip(axes, tasks.items(), strict=True):
        one.set_title(task)
        counts, values = _columns(points)
        one.barh([f"{n:g}" for n in counts], values, color=[GREEN if value > 0 else GOLD for value in values])
        one.axvline(0, color=SOFT, linewidth=0.5)
        one.invert_yaxis()
        one.tick_params(labelsize=7)
    return figure


@chart_style()
def draw_plan(tasks: Mapping[str, PlanPanel], title: str, note: str = "") -> "Figure":
    """Draw one panel per task: predicted score over tokens, and the chosen number of tokens."""
    figure, axes = make_panels(len(tasks), title, note)
    for one, (task, (curve, chosen)) in zip(axes, tasks.items(), strict=True):
        set_token_axis(one)
        one.set_title(task)
        one.set_xlabel(f"{chosen[0]:g} tokens")
        one.plot(*_columns(curve), color=BLUE)
        one.axvline(chosen[0], color=RED, linewidth=1, linestyle=":")
        one.plot(*chosen, "o", color=RED)
    return figure


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
