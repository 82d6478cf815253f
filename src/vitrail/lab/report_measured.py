"""Parts of the report that were measured in their own ways: rates of codecs, experiments over tokens, divergence and
what bottlenecks keep. Each is None where no file has it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.evals.metrics import Estimate
from vitrail.evals.suites.reconstruction import Row
from vitrail.lab.contrasts import Contrast, Point, lines, panels
from vitrail.lab.costs import measure
from vitrail.lab.information import Line
from vitrail.lab.origin import caption
from vitrail.lab.report_files import Files, checked, each
from vitrail.show.information import Place, draw_information
from vitrail.show.page import Number, drawing, fold, table
from vitrail.show.rates import draw_rates
from vitrail.show.scaling import Fitted, draw_laws, draw_ways

# ---- rates ------------------------------------------------------------------------------------------------------


def rates(files: Files) -> list[str] | None:
    """Runs that compare codecs: files of them, several in one, or beside the table of a sweep."""
    body: list[str] = []
    for kind in ("rates", "sweep"):
        for file, data in files.found[kind].items():
            body += checked(
                file, lambda file=file, data=data: [part for run in _runs(data) for part in _run(run, file)]
            )
    return body or None


def _runs(data: Any) -> Sequence[Mapping[str, Any]]:
    return data.get("runs", data.get("compared", [data] if "rows" in data else []))


def _run(run: Mapping[str, Any], file: Path) -> list[str]:
    rows = [_row(plain) for plain in run["rows"]]
    size = f", {run['side']} pixels wide" if run.get("side") else ""
    title = f"{run['data']}, {rows[0].pictures:,} pictures{size}"
    label = f"Quality over bits a pixel of {len(rows)} codecs and settings, on {title}"
    scores = dict.fromkeys(name for row in rows for name in row.scores)
    cells = [[row.name, *(_score(row.scores.get(name)) for name in scores)] for row in rows]
    about = run["origin"]
    return [
        drawing(draw_rates(rows, title), label, caption(title, about, file)),
        fold(f"Numbers: {title}", [table(("", *scores), cells, caption(title, about, file))]),
    ]


def _row(plain: Mapping[str, Any]) -> Row:
    scores = {name: _estimate(name, one) for name, one in plain["scores"].items()}
    about = {key: plain[key] for key in ("name", "kind", "pictures", "pixels", "device", "equal")}
    return Row(**about, scores=scores, use=(), read=(), missing={}, about={})


def _estimate(name: str, one: Mapping[str, Any]) -> Estimate:
    """null stands for what is infinite."""
    value = math.inf if one["value"] is None else float(one["value"])
    low, high = one["interval"]
    return Estimate(name, value, (-math.inf if low is None else low, math.inf if high is None else high), one["of"])


def _score(one: Estimate | None) -> str:
    if one is None:
        return "–"
    low, high = one.interval
    ends = f" [{low:.4g}, {high:.4g}]" if math.isfinite(low) and math.isfinite(high) and low < high else ""
    return Number(f"{one.value:.4g}{ends}", one.value)


# ---- experiments, divergence and information --------------------------------------------------------------------


@each("experiment")
def experiment(file: Path, data: Any) -> list[str]:
    """Runs of `vitrail scaling run` or `fewer`: mean scores by kind and way, the laws' exponents, what they answer."""
    points = [Point.read(one) for one in data["scores"]]
    about, counts, found = data.get("origin", {}), sorted({p.tokens for p in points}), lines(points)
    rows = [
        [
            line.kind,
            line.way,
            *(Number(f"{line.means[n]:.1%}", line.means[n]) if n in line.means else "–" for n in counts),
            Number(f"{line.within:.1%}", line.within),
            Number(f"{line.blind:.1%}", line.blind),
            line.alpha if line.law is None else Number(line.alpha, line.law.alpha),
        ]
        for line in found
    ]
    answers = [[name, *_answer(one)] for name, one in data["contrasts"].items()]
    means = ", means over seeds" * (len({p.seed for p in points}) > 1)
    title = f"{file.stem}: share of questions answered over visual tokens{means}"
    return [
        drawing(
            draw_ways(panels(found), "How many visual tokens", f"share of questions answered{means}"),
            "A panel a kind of question: the share answered over visual tokens, a line a way to make them",
            caption(title, about, file),
        ),
        table(
            ("kind", "way", *(f"{n} tokens" for n in counts), "±, over questions", "blind", "α"),
            rows,
            caption(title, about, file),
        ),
        table(
            ("question", "answer", "of", "verdict"), answers, caption(f"{file.stem}: what the runs answer", about, file)
        ),
    ]


def _answer(one: Any) -> tuple[str, str, str]:
    """null stands for what there was too little for."""
    if one is None:
        return "–", "too few", ""
    read = Contrast.read({key: value for key, value in one.items() if key != "sign"})
    return Number(read.told, read.value), f"{read.of} {read.over}", read.sign


@each("divergence")
def divergence(file: Path, data: Any) -> list[str]:
    columns, about = data["columns"], data.get("origin", {})
    length = len(columns["D"])
    steps = [n for n in (2**i for i in range(length.bit_length())) if n <= length]
    rows = [[str(n), *("–" if c[n - 1] is None else f"{c[n - 1]:.4g}" for c in columns.values())] for n in steps]
    of = f"{data['model']}, {'pictures' if 'prompt' in data else 'text'}"  # what goes on behind a prompt are pictures
    said = f"{of}: λ {data['lambda']:.4g}, λ/(√2·M) {data['tightness']:.3f}, {data['pairs']} pairs"
    points = [(float(n), columns["D"][n - 1]) for n in steps]
    curve = [(float(n), d) for n, d in enumerate(columns["λ√Υ"], 1) if d is not None]
    drawn = draw_laws([Fitted(of, said, points, curve)], "Divergence over tokens", "dots D, line its law")
    return [
        drawing(drawn, f"D of {of} over tokens as dots, and the fitted law as a line", caption(said, about, file)),
        table(("n", *columns), rows, caption(f"Divergence of {of}", about, file)),
    ]


@each("information")
def information(file: Path, data: Any) -> list[str]:
    lines = [Line.read(line) for line in data["lines"]]
    truths, about = list(lines[0].readings), data.get("origin", {})
    places, rows = [], []
    for one in lines:
        read = {name: (r.value, r.interval, r.blind) for name, r in one.readings.items()}
        places.append(Place(one.name, one.after, one.tokens, one.width, one.bits, read))
        rows.append([
            one.name, f"{one.tokens:,} × {one.width:,}", measure(one.bits, "bit"),
            Number(f"{one.ratio:.4g}", one.ratio), measure(one.at_most, "bit"),
            Number(f"{one.rank:.1f} of {one.bound:,}", one.rank),
            Number(f"{one.spread:.1f}", one.spread),
            "–" if one.dimension is None else Number(f"{one.dimension:.1f}", one.dimension),
            *(Number(f"{read[t][0]:.1%} [{read[t][1][0]:.1%}, {read[t][1][1]:.1%}]", read[t][0]) for t in truths),
        ])  # fmt: skip
    title = f"{data['model']} on {data.get('data', 'pictures')}"
    heads = ("bottleneck", "tokens", "bits", "fewer", "at most", "rank", "spread", "dimension", *truths)
    return [
        drawing(
            draw_information(places, title),
            f"What a straight reading finds at every bottleneck of {title}",
            caption(f"What is read: {title}", about, file),
        ),
        table(heads, rows, caption(f"Bottlenecks of {title}", about, file)),
    ]
