"""Parts of the report that are read from kept results: claims, sweeps, trainings and speed. Each is None where no file
has it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.lab.claims import RULE, between, judge, level, told
from vitrail.lab.claims_page import command, found
from vitrail.lab.origin import caption
from vitrail.lab.report_files import Files, each
from vitrail.show.page import Number, drawing, fold, heading, marked, table
from vitrail.show.scaling import Fitted, draw_laws

ABOUT = ("command", "commit", "device", "torch", "date", "note", "seed", "vitrail")
"""Keys of a test that say where it comes from, and are no results."""

MOST = 40  # entries of a list that are shown


# ---- claims -----------------------------------------------------------------------------------------------------


def claims(files: Files) -> list[str]:
    rows, waiting = [], []
    for claim, kept in found(files.results):
        said = command(claim).replace("`", "")
        if kept is None:
            waiting.append((claim.says, claim.source, claim.published, claim.range, said))
            continue
        one = judge(claim, kept.values)
        ours = f"{claim.first}: {level(one.first, claim.unit)}; {claim.second}: {level(one.second, claim.unit)}"
        verdict = one.verdict if one.verdict == "undecided" else marked(one.verdict == "holds", one.verdict)
        effect = f"{told(one.effect, claim.unit, sign=True)} {between(one.interval, claim.unit)}"
        cells = (claim.says, claim.source, claim.published, claim.range, ours, effect, verdict, one.seeds)
        rows.append((*cells, _named(files, claim.files), said))
    heads = ("claim", "source", "published", "claimed effect")
    body: list[str] = [RULE]
    if rows:
        about = caption("Claims held against what is kept", {"command": "vitrail claims report"}, files.results)
        more = ("ours", "effect", "verdict", "seeds", "kept in", "command")
        body.append(table((*heads, *more), rows, about))
    if waiting:
        about = caption("Not run yet", {"command": "vitrail claims list"}, files.results)
        body.append(fold(f"{len(waiting)} not run yet", [table((*heads, "command"), waiting, about)]))
    return body


def _named(files: Files, names: Sequence[str]) -> str:
    """Files with the day, the hardware and the commit of each."""
    said, data = [], {**files.found["sweep"], **files.found["training"]}
    for name in names:
        about = data.get(files.results / f"{name}.json", {})
        about = about.get("origin", {}) if isinstance(about, dict) else {}
        known = [str(about[key]) for key in ("date", "device", "commit") if key in about]
        said.append(f"{name}.json ({', '.join(known)})" if known else f"{name}.json")
    return "; ".join(said)


# ---- sweeps and trainings ---------------------------------------------------------------------------------------


@each("sweep")
def sweeps(file: Path, data: Any) -> list[str]:
    rows = []
    for row in data["table"]:
        ends = row["interval"]
        said = f"[{ends[0]:.4g}, {ends[1]:.4g}]" if ends else "one seed"
        seeds = ", ".join(str(seed) for seed in row["values"])
        rows.append((row["variant"], row["test"], row["score"], Number(f"{row['mean']:.4g}", row["mean"]), said, seeds))
    about = caption(
        f"Sweep {file.stem}: means over seeds, with Student's interval of 95 %", data.get("origin", {}), file
    )
    variants = len({row[0] for row in rows})
    return [
        fold(
            f"{file.stem}: {variants} variants, {len(rows)} scores",
            [table(("variant", "test", "score", "mean", "between", "seeds"), rows, about)],
        )
    ]


@each("training")
def trainings(file: Path, data: Any) -> list[str]:
    about = data.get("origin", {})
    panels = [_panel(name, curve) for name, points in _curves(data) if len(curve := _curve(points)) > 1]
    body: list[str] = [heading(file.stem)]
    if panels:
        label = f"Loss over steps of {file.stem}"
        drawn = draw_laws(panels, file.stem, "loss over steps")
        body.append(drawing(drawn, label, caption(label, about, file)))
    for title, test in [*data.get("evals", {}).items(), *((key, data[key]) for key in ("error",) if key in data)]:
        own = {key: test[key] for key in ABOUT if key in test}
        rows = [(name, value) for name, value in flat({k: v for k, v in test.items() if k not in ABOUT})]
        shown = table(("score", "value"), rows, caption(f"{file.stem}: {title}", {**about, **own}, file))
        body.append(fold(f"{title}: {len(rows)} scores", [shown]))
    return body


def _curves(data: Any) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    """One curve, or one a seed and stage."""
    if "curve" in data:
        yield "loss", data["curve"]
    for seed, stages in data.get("curves", {}).items():
        for stage, points in stages.items() if isinstance(stages, dict) else [("loss", stages)]:
            yield f"{stage}, seed {seed}", points


def _curve(points: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Step and loss, where it is a finite number."""
    found = [(float(p["step"]), float(p["loss"])) for p in points if p.get("loss") is not None]
    return [(step, loss) for step, loss in found if step > 0 and math.isfinite(loss)]


def _panel(name: str, curve: list[tuple[float, float]]) -> Fitted:
    return Fitted(name, f"{curve[-1][1]:.4g} after {curve[-1][0]:,.0f} steps", (), curve)


# ---- speed, and anything else that is nested --------------------------------------------------------------------


@each("speed")
def speed(file: Path, data: Any) -> list[str]:
    rows = list(flat(data["figures"]))
    about = caption(f"{file.stem}: {len(rows)} figures", data["origin"], file)
    return [
        fold(
            f"{file.stem}, {data['origin'].get('device', 'hardware not told')}",
            [table(("figure", "value"), rows, about)],
        )
    ]


def flat(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of nested results, named by the way to them; a value with its interval is one."""
    match data:
        case {"value": value, "interval": [low, high], **more} if isinstance(value, int | float):
            ends = f" [{low:.4g}, {high:.4g}]" if low is not None and high is not None else ""
            count = f" of {more['of']:,}" if "of" in more else ""
            yield path, Number(f"{value:.4g}{ends}{count}", value)
        case dict():
            for name, inner in data.items():
                yield from flat(inner, f"{path} · {name}" if path else str(name))
        case list() if any(isinstance(one, dict | list) for one in data):
            for n, inner in enumerate(data[:MOST]):
                yield from flat(inner, f"{path} · {n}")
            if len(data) > MOST:
                yield path, f"… and {len(data) - MOST} more"
        case list():
            more = f", … and {len(data) - MOST} more" if len(data) > MOST else ""
            yield path, ", ".join(_plain(one) for one in data[:MOST]) + more
        case bool() | str() | None:
            yield path, _plain(data)
        case _:
            yield path, Number(_plain(data), float(data))


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
