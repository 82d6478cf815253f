"""Report sections from results files: claims, sweeps, trainings and speed. Each is None without data."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.claims.claims import VERDICT_RULE, evaluate_claim, format_difference, format_interval
from experiments.claims.claims_page import format_command, iter_claim_results
from experiments.report.captions import format_caption
from experiments.report.report_inputs import ReportInputs, for_each_file
from vitrail.plots.html_page import (
    NumberCell,
    render_details,
    render_figure,
    render_heading,
    render_table,
    render_verdict,
)
from vitrail.plots.scaling_plots import LawPanel, draw_laws

ORIGIN_KEYS = ("command", "commit", "device", "torch", "date", "note", "seed", "vitrail")
"""Keys of a test that describe its origin and are not scores."""

MAX_ITEMS = 40  # maximum list entries to show


# ---- claims -----------------------------------------------------------------------------------------------------


def build_claims_section(inputs: ReportInputs) -> list[str]:
    rows, waiting = [], []
    for claim, kept in iter_claim_results(inputs.results_folder):
        how = format_command(claim).replace("`", "")
        if kept is None:
            waiting.append((claim.description, claim.source, claim.published, claim.claimed_range, how))
            continue
        one = evaluate_claim(claim, kept.values)
        ours = one.mean_scores
        verdict = one.verdict if one.verdict == "undecided" else render_verdict(one.verdict == "holds", one.verdict)
        effect = (
            f"{format_difference(one.effect, claim.unit, show_sign=True)} {format_interval(one.interval, claim.unit)}"
        )
        cells = (
            claim.description,
            claim.source,
            claim.published,
            claim.claimed_range,
            ours,
            effect,
            verdict,
            one.seed_summary,
        )
        rows.append((*cells, _describe_files(inputs, claim.result_files), how))
    heads = ("claim", "source", "published", "claimed effect")
    body: list[str] = [VERDICT_RULE]
    if rows:
        about = format_caption(
            "Claims and measured effects", {"command": "python -m experiments.claims report"}, inputs.results_folder
        )
        more = ("ours", "effect", "verdict", "seeds", "results", "command")
        body.append(render_table((*heads, *more), rows, about))
    if waiting:
        about = format_caption("Not run yet", {"command": "python -m experiments.claims list"}, inputs.results_folder)
        body.append(render_details(f"{len(waiting)} not run yet", [render_table((*heads, "command"), waiting, about)]))
    return body


def _describe_files(inputs: ReportInputs, names: Sequence[str]) -> str:
    """Describe files by name, date, hardware and commit."""
    descriptions, data = [], {**inputs.files_by_kind["sweep"], **inputs.files_by_kind["training"]}
    for name in names:
        about = data.get(inputs.results_folder / f"{name}.json", {})
        about = about.get("origin", {}) if isinstance(about, dict) else {}
        known = [str(about[key]) for key in ("date", "device", "commit") if key in about]
        descriptions.append(f"{name}.json ({', '.join(known)})" if known else f"{name}.json")
    return "; ".join(descriptions)


# ---- sweeps and trainings ---------------------------------------------------------------------------------------


@for_each_file("sweep")
def build_sweep_section(file: Path, data: Any) -> list[str]:
    rows = []
    for row in data["table"]:
        ends = row["interval"]
        span = f"[{ends[0]:.4g}, {ends[1]:.4g}]" if ends else "one seed"
        seeds = ", ".join(str(seed) for seed in row["values"])
        rows.append(
            (row["variant"], row["test"], row["score"], NumberCell(f"{row['mean']:.4g}", row["mean"]), span, seeds)
        )
    about = format_caption(
        f"Sweep {file.stem}: means over seeds, with Student's 95 % interval", data.get("origin", {}), file
    )
    variants = len({row[0] for row in rows})
    return [
        render_details(
            f"{file.stem}: {variants} variants, {len(rows)} scores",
            [render_table(("variant", "test", "score", "mean", "interval", "seeds"), rows, about)],
        )
    ]


@for_each_file("training")
def build_training_section(file: Path, data: Any) -> list[str]:
    about = data.get("origin", {})
    panels = [
        _build_loss_panel(name, curve)
        for name, points in _iter_loss_curves(data)
        if len(curve := _select_finite_points(points)) > 1
    ]
    body: list[str] = [render_heading(file.stem)]
    if panels:
        label = f"Loss over steps of {file.stem}"
        drawn = draw_laws(panels, file.stem, "loss over steps")
        body.append(render_figure(drawn, label, format_caption(label, about, file)))
    for title, test in [*data.get("evals", {}).items(), *((key, data[key]) for key in ("error",) if key in data)]:
        own = {key: test[key] for key in ORIGIN_KEYS if key in test}
        rows = [
            (name, value) for name, value in flatten_results({k: v for k, v in test.items() if k not in ORIGIN_KEYS})
        ]
        shown = render_table(("score", "value"), rows, format_caption(f"{file.stem}: {title}", {**about, **own}, file))
        body.append(render_details(f"{title}: {len(rows)} scores", [shown]))
    return body


def _iter_loss_curves(data: Any) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    """Yield the loss curve, or one per seed and stage."""
    if "curve" in data:
        yield "loss", data["curve"]
    for seed, stages in data.get("curves", {}).items():
        for stage, points in stages.items() if isinstance(stages, dict) else [("loss", stages)]:
            yield f"{stage}, seed {seed}", points


def _select_finite_points(points: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Select the (step, loss) points with a finite loss."""
    found = [(float(p["step"]), float(p["loss"])) for p in points if p.get("loss") is not None]
    return [(step, loss) for step, loss in found if step > 0 and math.isfinite(loss)]


def _build_loss_panel(name: str, curve: list[tuple[float, float]]) -> LawPanel:
    return LawPanel(name, f"{curve[-1][1]:.4g} after {curve[-1][0]:,.0f} steps", (), curve)


# ---- speed and other nested results -----------------------------------------------------------------------------


@for_each_file("speed")
def build_speed_section(file: Path, data: Any) -> list[str]:
    rows = list(flatten_results(data["figures"]))
    about = format_caption(f"{file.stem}: {len(rows)} figures", data["origin"], file)
    return [
        render_details(
            f"{file.stem}, {data['origin'].get('device', 'unknown hardware')}",
            [render_table(("figure", "value"), rows, about)],
        )
    ]


def flatten_results(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of nested results with their paths. A value with its interval is one leaf."""
    match data:
        case {"value": value, "interval": [low, high], **more} if isinstance(value, int | float):
            ends = f" [{low:.4g}, {high:.4g}]" if low is not None and high is not None else ""
            count = f" of {more['count']:,}" if "count" in more else ""
            yield path, NumberCell(f"{value:.4g}{ends}{count}", value)
        case dict():
            for name, inner in data.items():
                yield from flatten_results(inner, f"{path} · {name}" if path else str(name))
        case list() if any(isinstance(one, dict | list) for one in data):
            for n, inner in enumerate(data[:MAX_ITEMS]):
                yield from flatten_results(inner, f"{path} · {n}")
            if len(data) > MAX_ITEMS:
                yield path, f"… and {len(data) - MAX_ITEMS} more"
        case list():
            more = f", … and {len(data) - MAX_ITEMS} more" if len(data) > MAX_ITEMS else ""
            yield path, ", ".join(_format_value(one) for one in data[:MAX_ITEMS]) + more
        case bool() | str() | None:
            yield path, _format_value(data)
        case _:
            yield path, NumberCell(_format_value(data), float(data))


def _format_value(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
