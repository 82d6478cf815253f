"""Report sections from experiment files: codec rates, token scaling, divergence and information at bottlenecks.

Each is None without data.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report.captions import format_caption
from experiments.report.report_inputs import ReportInputs, for_each_file, render_checked
from experiments.token_scaling.contrasts import Contrast, ScorePoint, group_curves, summarize_scores
from vitrail.evals.metrics import Estimate
from vitrail.evals.suites.codec_benchmark import CoderResult
from vitrail.lab.bottleneck_information import BottleneckRecord
from vitrail.lab.system_cost_tables import format_quantity
from vitrail.plots.html_page import NumberCell, render_details, render_figure, render_table
from vitrail.plots.information_plot import BottleneckReadings, draw_information
from vitrail.plots.rate_distortion import draw_rate_distortion
from vitrail.plots.scaling_plots import LawPanel, draw_laws, draw_score_curves

# ---- rates ------------------------------------------------------------------------------------------------------


def build_rates_section(inputs: ReportInputs) -> list[str] | None:
    """Render codec comparisons, from their own files or from the files of sweeps."""
    body: list[str] = []
    for kind in ("rates", "sweep"):
        for file, data in inputs.files_by_kind[kind].items():
            body += render_checked(
                file,
                lambda file=file, data=data: [
                    part for run in _get_comparison_runs(data) for part in _render_run(run, file)
                ],
            )
    return body or None


def _get_comparison_runs(data: Any) -> Sequence[Mapping[str, Any]]:
    return data.get("runs", data.get("comparisons", [data] if "rows" in data else []))


def _render_run(run: Mapping[str, Any], file: Path) -> list[str]:
    rows = [_parse_row(plain) for plain in run["rows"]]
    size = f", {run['image_size']} pixels wide" if run.get("image_size") else ""
    title = f"{run['data']}, {rows[0].num_images:,} images{size}"
    label = f"Quality over bits per pixel of {len(rows)} codecs and settings, on {title}"
    scores = dict.fromkeys(name for row in rows for name in row.scores)
    cells = [[row.name, *(_format_estimate(row.scores.get(name)) for name in scores)] for row in rows]
    about = run["origin"]
    return [
        render_figure(draw_rate_distortion(rows, title), label, format_caption(title, about, file)),
        render_details(f"Numbers: {title}", [render_table(("", *scores), cells, format_caption(title, about, file))]),
    ]


def _parse_row(data: Mapping[str, Any]) -> CoderResult:
    return CoderResult(
        name=data["name"],
        kind=data["kind"],
        num_images=data["num_images"],
        num_pixels=data["num_pixels"],
        scores={name: _parse_estimate(name, one) for name, one in data["scores"].items()},
        device=data["device"],
        num_identical=data["num_identical"],
        codebook_usage=(),
        recognition_scores=(),
        missing_scores={},
        metadata={},
    )


def _parse_estimate(name: str, data: Mapping[str, Any]) -> Estimate:
    """Parse an estimate; null stands for infinity."""
    value = math.inf if data["value"] is None else float(data["value"])
    low, high = data["interval"]
    return Estimate(name, value, (-math.inf if low is None else low, math.inf if high is None else high), data["count"])


def _format_estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    low, high = estimate.interval
    ends = f" [{low:.4g}, {high:.4g}]" if math.isfinite(low) and math.isfinite(high) and low < high else ""
    return NumberCell(f"{estimate.value:.4g}{ends}", estimate.value)


# ---- experiments, divergence and information --------------------------------------------------------------------


@for_each_file("experiment")
def build_experiment_section(file: Path, data: Any) -> list[str]:
    """Render a token-scaling experiment: mean scores by kind and method, exponents and contrasts."""
    points = [ScorePoint.from_dict(one) for one in data["scores"]]
    about, counts, found = data.get("origin", {}), sorted({p.tokens for p in points}), summarize_scores(points)
    rows = [
        [
            line.kind,
            line.method,
            *(NumberCell(f"{line.means[n]:.1%}", line.means[n]) if n in line.means else "–" for n in counts),
            NumberCell(f"{line.max_error:.1%}", line.max_error),
            NumberCell(f"{line.blind:.1%}", line.blind),
            line.alpha_text if line.law is None else NumberCell(line.alpha_text, line.law.alpha),
        ]
        for line in found
    ]
    answers = [[name, *_format_contrast(one)] for name, one in data["contrasts"].items()]
    means = ", means over seeds" * (len({p.seed for p in points}) > 1)
    title = f"{file.stem}: accuracy over visual tokens{means}"
    return [
        render_figure(
            draw_score_curves(group_curves(found), "Accuracy over visual tokens", f"accuracy{means}"),
            "One panel per kind of question: accuracy over visual tokens, one line per method",
            format_caption(title, about, file),
        ),
        render_table(
            ("kind", "method", *(f"{n} tokens" for n in counts), "±, over questions", "blind", "α"),
            rows,
            format_caption(title, about, file),
        ),
        render_table(
            ("contrast", "value", "of", "verdict"), answers, format_caption(f"{file.stem}: contrasts", about, file)
        ),
    ]


def _format_contrast(data: Any) -> tuple[str, str, str]:
    """Format a contrast; null stands for too little data."""
    if data is None:
        return "–", "too little data", ""
    read = Contrast.from_dict({key: value for key, value in data.items() if key != "sign"})
    return NumberCell(read.interval_text, read.value), f"{read.count} {read.over}", read.sign


@for_each_file("divergence")
def build_divergence_section(file: Path, data: Any) -> list[str]:
    columns, about = data["columns"], data.get("origin", {})
    length = len(columns["D"])
    steps = [n for n in (2**i for i in range(length.bit_length())) if n <= length]
    rows = [[str(n), *("–" if c[n - 1] is None else f"{c[n - 1]:.4g}" for c in columns.values())] for n in steps]
    of = f"{data['model']}, {'images' if 'prompt' in data else 'text'}"  # only runs on images have a prompt
    note = f"{of}: λ {data['lambda']:.4g}, λ/(√2·M) {data['tightness']:.3f}, {data['pairs']} pairs"
    points = [(float(n), columns["D"][n - 1]) for n in steps]
    curve = [(float(n), d) for n, d in enumerate(columns["λ√Υ"], 1) if d is not None]
    drawn = draw_laws([LawPanel(of, note, points, curve)], "Divergence over tokens", "dots: D, line: fitted law")
    return [
        render_figure(
            drawn, f"D of {of} over tokens as dots, and the fitted law as a line", format_caption(note, about, file)
        ),
        render_table(("n", *columns), rows, format_caption(f"Divergence of {of}", about, file)),
    ]


@for_each_file("information")
def build_information_section(file: Path, data: Any) -> list[str]:
    lines = [BottleneckRecord.from_dict(line) for line in data["bottlenecks"]]
    truths, about = list(lines[0].probes), data.get("origin", {})
    places, rows = [], []
    for one in lines:
        read = {name: (r.value, r.interval, r.blind) for name, r in one.probes.items()}
        places.append(BottleneckReadings(one.name, one.after, one.tokens, one.width, one.bits, read))
        rows.append([
            one.name, f"{one.tokens:,} × {one.width:,}", format_quantity(one.bits, "bit"),
            NumberCell(f"{one.ratio:.4g}", one.ratio), format_quantity(one.max_bits, "bit"),
            NumberCell(f"{one.rank:.1f} of {one.bound:,}", one.rank),
            NumberCell(f"{one.spread:.1f}", one.spread),
            "–" if one.dimension is None else NumberCell(f"{one.dimension:.1f}", one.dimension),
            *(NumberCell(f"{read[t][0]:.1%} [{read[t][1][0]:.1%}, {read[t][1][1]:.1%}]", read[t][0]) for t in truths),
        ])  # fmt: skip
    title = f"{data['model']} on {data.get('data', 'images')}"
    heads = ("bottleneck", "tokens", "bits", "ratio", "bound", "rank", "spread", "dimension", *truths)
    return [
        render_figure(
            draw_information(places, title),
            f"Linear-probe scores at every bottleneck of {title}",
            format_caption(f"Linear probes: {title}", about, file),
        ),
        render_table(heads, rows, format_caption(f"Bottlenecks of {title}", about, file)),
    ]
