"""Plot linear-probe scores at every bottleneck of a model, in the order of the forward pass."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vitrail.plots.charts import COLOURS, chart_style, make_panels
from vitrail.plots.number_format import format_si

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class BottleneckReadings(NamedTuple):
    """Probe scores of one bottleneck.

    source    the bottleneck it is computed from
    readings  property → (score, interval, blind score)
    """

    name: str
    source: str
    tokens: int
    width: int
    bits: int
    readings: Mapping[str, tuple[float, tuple[float, float], float]]


@chart_style()
def draw_information(bottlenecks: Sequence[BottleneckReadings], title: str) -> "Figure":
    """Plot the probe score of each property; dotted lines are blind scores."""
    size = (140 * len(bottlenecks) + 160, 340)
    figure, [axes] = make_panels(1, title, "linear-probe score on held-out images; dotted: blind score", size=size)
    place = {one.name: x for x, one in enumerate(bottlenecks)}
    for name, colour in zip(bottlenecks[0].readings, COLOURS, strict=False):
        scores = {one.name: one.readings[name] for one in bottlenecks}
        for one in bottlenecks:
            value, (low, high), _ = scores[one.name]
            axes.plot([place[one.name]] * 2, [low, high], color=colour, linewidth=1)
            if one.source:
                ends = [place[one.source], place[one.name]]
                axes.plot(ends, [scores[one.source][0], value], color=colour, linewidth=2)
        axes.plot(range(len(scores)), [value for value, _, _ in scores.values()], "o", color=colour, label=name)
        axes.axhline(scores[bottlenecks[0].name][2], color=colour, linewidth=0.75, linestyle=":")
    axes.set_ylim(-0.02, 1.02)  # a probe can have a negative score
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    labels = [f"{one.name}\n{one.tokens:,} × {one.width:,}\n{format_si(one.bits, 'bit')}" for one in bottlenecks]
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(axis="y")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
