"""Rate–distortion: a table for the terminal, and a chart with codecs as points and image formats as lines."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vitrail.errors import DataError
from vitrail.evals.metrics import Estimate
from vitrail.evals.suites.codec_benchmark import (
    CODED_BPP,
    DECODE_RATE,
    ENCODE_RATE,
    ENTROPY_BPP,
    FILE_BPP,
    POOLED_PSNR,
    CoderResult,
)
from vitrail.plots.charts import BLUE, GOLD, GREEN, RED, VIOLET, add_figure_legend, chart_style, make_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMAT_COLOURS = (GOLD, GREEN, VIOLET, RED)  # one per format, in order
VARIANT_DASHES = {"sheet": "--", "4:4:4": ":"}
MARKERS = "osD^vP*Xd<>ph8"  # one per codec, in order


def format_rate_table(rows: Sequence[CoderResult]) -> str:
    """Format one line per coder; ± is the larger half of the interval."""
    titles = {CODED_BPP: "bits/px", FILE_BPP: "in files", ENCODE_RATE: "encode/s", DECODE_RATE: "decode/s"}
    found = dict.fromkeys(name for row in rows for name in row.scores)
    metrics = [name for name in found if name not in (*titles, POOLED_PSNR, ENTROPY_BPP)]
    order = [name for name in (CODED_BPP, FILE_BPP, *metrics, ENCODE_RATE, DECODE_RATE) if name in found]
    has_usage = any(row.codebook_usage for row in rows)
    head = ["", *(titles.get(name, name) for name in order), *["used", "perplexity"] * has_usage]
    lines = [head + [score.name for score in rows[0].recognition_scores]]
    for row in rows:
        cells = [row.name, *(_format_estimate(row.scores[name]) if name in row.scores else "–" for name in order)]
        if has_usage:
            unknown = row.used_fraction is None
            cells += ["–", "–"] if unknown else [f"{row.used_fraction:.1%}", f"{row.perplexity:,.1f}"]
        for score in row.recognition_scores:
            before = f" of {score.baselines['originals']:.1%}" if "originals" in score.baselines else ""
            cells.append(f"{score.value:.1%}{before}")
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])
        for cells in lines
    )


def _format_estimate(score: Estimate) -> str:
    """Format an estimate with four digits and its interval."""
    if not math.isfinite(score.value):
        return "∞"
    half = max(score.interval[1] - score.value, score.value - score.interval[0])
    places = min(4, max(0, 3 - math.floor(math.log10(abs(score.value))))) if score.value else 4
    return f"{score.value:,.{places}f}" + (f" ±{half:,.{places}f}" if math.isfinite(half) else "")


@chart_style()
def draw_rate_distortion(
    rows: Sequence[CoderResult], title: str, note: str = "", *, bits: Literal["coded", "file"] = "coded"
) -> "Figure":
    """Draw one panel per measured metric: PSNR, SSIM, LPIPS and the Fréchet distance.

    Error bars are 95 % intervals. A codec with continuous codes has no bits and is drawn as a horizontal line. Infinite
    values are left out.
    """
    rate = {"coded": CODED_BPP, "file": FILE_BPP}[bits]
    metrics = [name for name in dict.fromkeys(n for row in rows for n in row.scores) if _get_better_direction(name)]
    if not metrics or not any(rate in row.scores for row in rows):
        raise DataError("nothing to plot: no coder has a bit rate", "add a baseline, or a codec with discrete codes")
    codecs = [row for row in rows if row.kind == "codec"]
    kinds = list(dict.fromkeys(row.kind for row in rows if row.kind != "codec"))
    legend_height = 16 * math.ceil((len(codecs) + len(kinds)) / 4) + 12
    figure, axes = make_panels(len(metrics), title, note, size=(330, 300), legend_height=legend_height)
    names = _shorten_names(codecs)
    for one, metric in zip(axes, metrics, strict=True):
        one.set_title(f"{metric}{', dB' * (metric == 'PSNR')} ({_get_better_direction(metric)} is better)")
        one.set_xlabel(rate)
        one.set_xscale("log", base=2)
        one.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        one.grid(axis="y")
        for kind in kinds:
            _draw_format(one, [row for row in rows if row.kind == kind and rate in row.scores], metric, rate, kinds)
        for i, (row, name) in enumerate(zip(codecs, names, strict=True)):
            _draw_codec(one, row, metric, rate, name, MARKERS[i % len(MARKERS)])
        values = [value for row in rows if metric in row.scores for value in _get_finite_values(row.scores[metric])]
        if _get_better_direction(metric) == "lower" and values and min(values) > 0:
            one.set_yscale("log")
    add_figure_legend(figure, axes)
    return figure


def _draw_format(axes: "Axes", rows: Sequence[CoderResult], metric: str, rate: str, kinds: Sequence[str]) -> None:
    """Draw the settings of a format as a line. Each format has a colour; its variants are dashed."""
    rows = sorted((row for row in rows if metric in row.scores), key=lambda row: row.scores[rate].value)
    if not rows:
        return
    kind = rows[0].kind
    formats = list(dict.fromkeys(each.split()[0] for each in kinds))
    colour = FORMAT_COLOURS[formats.index(kind.split()[0]) % len(FORMAT_COLOURS)]
    dash = next((dash for word, dash in VARIANT_DASHES.items() if word in kind.split()), "-")
    points = [(row.scores[rate].value, row.scores[metric]) for row in rows]
    _draw_points(axes, points, marker=".", linestyle=dash, color=colour, label=kind)


def _draw_codec(axes: "Axes", row: CoderResult, metric: str, rate: str, name: str, marker: str) -> None:
    if metric not in row.scores:
        return
    if rate in row.scores:
        points = [(row.scores[rate].value, row.scores[metric])]
        _draw_points(axes, points, marker=marker, linestyle="", color=BLUE, label=name)
    else:
        axes.axhline(row.scores[metric].value, color=BLUE, linestyle=":", label=f"{name}, continuous")


def _draw_points(
    axes: "Axes", points: Sequence[tuple[float, Estimate]], *, marker: str, linestyle: str, color: str, label: str
) -> None:
    """Draw finite values with their intervals."""
    finite = [(x, score) for x, score in points if math.isfinite(score.value)]
    xs, ys = [x for x, _ in finite], [score.value for _, score in finite]
    axes.plot(xs, ys, marker=marker, linestyle=linestyle, color=color, label=label)
    for x, score in finite:
        if all(map(math.isfinite, score.interval)):
            axes.plot([x, x], score.interval, color=color, linewidth=1)


def _get_better_direction(metric: str) -> str:
    if metric in ("PSNR", "SSIM"):
        return "higher"
    return "lower" if metric.startswith(("LPIPS", "FD-")) else ""


def _get_finite_values(score: Estimate) -> list[float]:
    return [value for value in (score.value, *score.interval) if math.isfinite(value)]


def _shorten_names(rows: Sequence[CoderResult]) -> list[str]:
    """Shorten path names by removing their common prefix and suffix."""
    parts = [Path(row.name).parts or (row.name,) for row in rows]
    if len(set(parts)) < 2:
        return [each[-1] for each in parts]
    first = next(n for n, some in enumerate(itertools.zip_longest(*parts)) if len(set(some)) > 1)
    last = next(n for n, some in enumerate(itertools.zip_longest(*(p[::-1] for p in parts))) if len(set(some)) > 1)
    short = ["/".join(each[first : len(each) - last]) or each[-1] for each in parts]
    return short if len(set(short)) == len(set(parts)) else ["/".join(each) for each in parts]
