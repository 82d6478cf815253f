"""Plot the roofline time of the next token, and memory use, over the context length."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from vitrail.plots.charts import COLOURS, SOFT, chart_style, make_panels, set_token_axis
from vitrail.plots.number_format import format_si, format_token_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class LedgerSeries(NamedTuple):
    """One model: bytes of weights, context length → bytes of cache, and context length → seconds per token."""

    weight_bytes: float
    cache_bytes: Mapping[int, float]
    decode_seconds: Mapping[int, float]


@chart_style()
def draw_ledger(models: Mapping[str, LedgerSeries], *, device: str, memory: float, note: str = "") -> "Figure":
    """Draw the roofline time of the next token (left), and weights and KV cache against the device's memory (right)."""
    from matplotlib.ticker import LogLocator

    rows = [(name, n) for name, series in models.items() for n in series.cache_bytes]
    size = (560, max(300, 18 * len(rows) + 80))
    figure, [times, bars] = make_panels(2, f"Decoding on {device}: minimum time per token, and memory", note, size=size)
    for (name, series), colour in zip(models.items(), COLOURS, strict=False):
        contexts = sorted(series.decode_seconds)
        times.plot(contexts, [series.decode_seconds[n] for n in contexts], color=colour, label=name, linewidth=2)
    set_token_axis(times)
    times.set_yscale("log")
    times.xaxis.set_major_formatter(lambda n, _: format_token_count(round(n)))
    times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    times.yaxis.set_minor_formatter("")
    times.yaxis.set_major_formatter(lambda seconds, _: format_si(seconds, "s"))
    times.set_xlabel("context length in tokens")
    times.grid(axis="y")
    times.legend()
    for y, (name, n) in enumerate(rows):
        series, colour = models[name], COLOURS[list(models).index(name)]
        bars.barh(y, series.weight_bytes, color=colour)
        bars.barh(y, series.cache_bytes[n], left=series.weight_bytes, color=colour, alpha=0.4)
        label = f" + {format_si(series.cache_bytes[n], 'B')}"
        bars.text(series.weight_bytes + series.cache_bytes[n], y, label, va="center", fontsize=8, color=SOFT)
    bars.axvline(memory, color=SOFT, linewidth=1)
    bars.set_yticks(range(len(rows)), [f"{name}, {format_token_count(n)}" for name, n in rows])
    bars.invert_yaxis()
    bars.margins(x=0.2)
    bars.xaxis.set_major_formatter(lambda size, _: format_si(size, "B"))
    bars.set_xlabel(f"weights, and KV cache (pale); {device} has {format_si(memory, 'B')}")
    return figure
