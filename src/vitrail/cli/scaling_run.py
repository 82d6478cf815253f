"""`vitrail scaling run`: numbers of visual tokens compared on models that are trained for it."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

from cyclopts import Parameter

from vitrail.cli.scaling import print_table, save_figure
from vitrail.cli.written import write_plain
from vitrail.errors import ConfigError, TrainError, VitrailError
from vitrail.hub.files import write_json
from vitrail.lab.contrasts import Contrast, Point, gain, law, scores, steeper
from vitrail.lab.exact import NAMING
from vitrail.show.scaling import draw_ways
from vitrail.sweep import check_starts
from vitrail.token_scaling import ALONE, ANOTHER, PHASES, TOLD, WITHHELD, Design, Experiment, Phase

Numbers = Annotated[tuple[int, ...], Parameter(negative="")]
Hidden = Parameter(show=False)
DEFAULT = Design()
STEEP, FLAT = "reading", "existence_random"

# Models of a few thousand weights from chance, two steps each: whether all of it runs.
_WIDE = {"norm": "rms", "eps": 1e-5, "attention": {"heads": 2}, "mlp": {"kind": "gated", "hidden": 24}}
_STAGE = {"steps": 2, "save_every": 2, "batch": 4, "dtype": "float32", "compile": False, "workers": 0}
SMOKE: dict[str, Any] = {
    "tokenizer": {"train": 512, "specials": ["<image>"]},
    "model.parts": {},
    "model.config.rules": {"fill": 1},
    "model.config.policy": {"policy": "naive", "size": 16, "patch": 4},
    "model.config.tower.image": 16,
    "model.config.tower.patch": 4,
    "model.config.tower.layers": 1,
    "model.config.tower.block.width": 16,
    "model.config.tower.block.mlp.hidden": 24,
    "model.config.connector": {"kind": "projector", "reads": 16, "gives": 32},
    "model.config.queries": {"kind": "fused", "reads": 32, "gives": 32, "vocab": 512, "layers": 4, "width": 32}
    | {"heads": 2, "hidden": 24},
    "model.config.decoder": {"vocab": 512, "layers": 4, "tied": True, "context": 128, "rotary": {"head_dim": 16}}
    | {"block": {"width": 32, **_WIDE}},
    **{f"sources.{name}.side": 16 for name in ("scenes", "named", "unseen", "unseen-named")},
    **{f"stages.{i}.{key}": value for i in (0, 1) for key, value in _STAGE.items()},
    **{f"stages.{i}.schedule": {"kind": "constant"} for i in (0, 1)},
}


def run(
    *changes: str,
    out: Path,
    base: str = DEFAULT.base,
    queries: str = DEFAULT.queries,
    tokens: Numbers = DEFAULT.tokens,
    seeds: int = 3,
    steps: int = DEFAULT.steps,
    count: int = DEFAULT.count,
    jobs: int = 1,
    smoke: Annotated[bool, Parameter(negative="")] = False,
    device: str | None = None,
    phase: Annotated[Phase | None, Hidden] = None,
    share: Annotated[str, Hidden] = "0/1",
) -> None:
    """Train a model once, and behind it runs with few and many visual tokens, with the question fused into them and
    without; test all on the same questions, fit the law of every kind, and say whether reading grows faster than
    existence and whether the question helps only where it points at something.

    The language model is frozen in all runs. A plain Q-Former is trained as they are; VisPruner, VisionZip and pooling
    are tested on the base. The same command goes on after any interruption.

    Parameters
    ----------
    changes
        Settings of either recipe to change, as key=value with dotted keys.
    out
        Folder for all runs and for what is said of them: scaling.json, scaling.svg and a table of scores a way.
    base
        A recipe: the model that all starts from.
    queries
        A recipe that puts fused queries on it; and the sources that all is tested on.
    tokens
        How many, ascending. May be repeated.
    seeds
        Runs of each number of tokens.
    steps
        Of each run.
    count
        Questions of each kind.
    jobs
        Runs side by side, each in a process of its own.
    smoke
        Tiny models from chance and two steps of each, to see whether all runs.
    device
        cpu or cuda; a GPU is used where there is one.
    """
    file = out / "design.json"
    if phase is not None:  # one of the jobs
        _one_job(Experiment(Design.read(_read(file)), out, device), phase, share)
        return
    if jobs < 1 or seeds < 1:
        raise ConfigError(f"{jobs} jobs, {seeds} seeds", "give at least 1 of each")
    if wrong := [change for change in changes if "=" not in change]:
        raise ConfigError(f"{wrong[0]!r} is no key=value", "for example stages.0.steps=500")
    laid = deepcopy(SMOKE if smoke else {}) | dict(map(_change, changes))
    small: dict[str, Any] = {"tokens": (1, 4, 16), "seeds": (0,), "steps": 2, "count": 8} if smoke else {}
    asked: dict[str, Any] = {"tokens": tokens, "seeds": tuple(range(seeds)), "steps": steps, "count": count}
    design = Design(base=base, queries=queries, changes=laid, **(asked | small))
    experiment = Experiment(design, out, device)
    check_starts(experiment.sweep_of("base"), experiment.folder)
    experiment.folder.mkdir(parents=True, exist_ok=True)
    write_json(file, design.plain())
    for each in PHASES:
        _phase(experiment, each, out, min(jobs, len(experiment.planned(each))), device)
    tell(experiment, out)


def _phase(experiment: Experiment, phase: Phase, out: Path, jobs: int, device: str | None) -> None:
    if jobs == 1:
        _one_job(experiment, phase, "0/1")
        return
    if phase == "runs":
        experiment.cut()  # once, before many would
    more = [] if device is None else ["--device", device]
    words = [sys.executable, "-m", "vitrail.cli", "scaling", "run", "--out", str(out), "--phase", phase, *more]
    logs, started = [out / f"{phase}-{i}.log" for i in range(jobs)], []
    try:
        for i, log in enumerate(logs):
            with log.open("w") as said:
                started.append(subprocess.Popen([*words, "--share", f"{i}/{jobs}"], stdout=said, stderr=said))
        codes = [process.wait() for process in started]
    finally:
        for process in started:
            process.terminate()
    ends = [log for code, log in zip(codes, logs, strict=True) if code]
    if ends:
        said = "\n".join(f"{log} ends with:\n" + "\n".join(log.read_text().splitlines()[-5:]) for log in ends)
        raise TrainError(f"{len(ends)} of {jobs} jobs failed\n{said}", "mend that and start the command again")


def _one_job(experiment: Experiment, phase: Phase, share: str) -> None:
    from tqdm import tqdm

    i, of = map(int, share.split("/"))
    failed = []
    for planned in tqdm(experiment.planned(phase)[i::of], desc=phase, unit="run", disable=None):
        try:
            experiment.do(phase, planned)
        except VitrailError as error:  # the others need not wait for it
            if error.problem.startswith("stopped by") or phase != "runs":
                raise
            failed.append(f"{planned.name}: {error.problem}")
    if failed:
        raise TrainError(f"{len(failed)} runs failed:\n" + "\n".join(failed), "mend them and start the command again")


def _change(word: str) -> tuple[str, Any]:
    """key=value, where the value is TOML, or a text as it stands."""
    key, _, text = word.partition("=")
    try:
        [value] = tomllib.loads(f"value = {text}").values()
    except ValueError:  # no TOML, or more than one value
        value = text
    return key, value


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


# ---- what is said of it -----------------------------------------------------------------------------------------


def tell(experiment: Experiment, out: Path) -> None:
    """Print the tables and the answers, and write them with all scores."""
    points, questions = experiment.points(), experiment.questions()
    ways, kinds = (list(dict.fromkeys(getattr(p, name) for p in points)) for name in ("way", "kind"))
    counts = sorted({p.tokens for p in points})
    rows, laws = [("kind", "way", *map(str, counts), "α")], {}
    for kind in kinds:
        for way in ways:
            found = law(points, way, kind)
            by = {n: [p.value for (m, _), p in scores(points, way, kind).items() if m == n] for n in counts}
            cells = [f"{mean(values):.1%}" if values else "–" for values in by.values()]
            told = "–" if found is None else "{:+.4f} [{:+.4f}, {:+.4f}]".format(found.alpha, *found.intervals["alpha"])
            rows.append((kind, way, *cells, told))
            if found is not None:
                laws.setdefault(way, {})[kind] = found.plain()
    print_table(rows)
    contrasts = answers(points, kinds)
    print()
    print_table([(name, str(found)) for name, found in contrasts.items()])
    write_plain(
        out / "scaling.json",
        {
            "design": experiment.design.plain(),
            "questions": questions,
            "scores": [p.plain() for p in points],
            "laws": laws,
            "contrasts": {name: {**found.plain(), "sign": found.sign} for name, found in contrasts.items()},
        },
        experiment.device,
    )
    for way in laws:
        _table(points, way, kinds, out / f"scores-{way.replace(' ', '-').lower()}.csv")
    lines = {
        kind: {
            way: [(n, mean(v)) for n in counts if (v := [p.value for p in points if _key(p) == (way, n, kind)])]
            for way in ways
        }
        for kind in kinds
    }
    note = "share of questions answered over visual tokens, mean over seeds"
    save_figure(draw_ways(lines, "How many visual tokens", note), out / "scaling.svg")


def answers(points: Sequence[Point], kinds: Sequence[str]) -> dict[str, Contrast]:
    """The questions of the experiment, by what is told of them."""
    found = {}
    if {STEEP, FLAT} <= set(kinds):
        found |= {f"α of {STEEP} − α of {FLAT}, {way}": steeper(points, way, STEEP, FLAT) for way in (TOLD, ALONE)}
    absent = [kind for kind in kinds if kind.startswith("unanswerable")]  # asked about what is not there
    pointing = [kind for kind in kinds if kind not in (NAMING, *absent)]
    for over in (ALONE, WITHHELD, ANOTHER):
        for kind in kinds:
            found[f"{TOLD} over {over}, {kind}"] = gain(points, TOLD, over, [kind])
        for control in ([NAMING], absent):
            if set(control) & set(kinds):
                name = f"{TOLD} over {over}, questions that point less {', '.join(control)}"
                found[name] = gain(points, TOLD, over, pointing, control)
    return found


def _table(points: Sequence[Point], way: str, kinds: Sequence[str], file: Path) -> None:
    """A line a run, for `vitrail scaling fit` and `plan`; in percent."""
    columns = {kind: scores(points, way, kind) for kind in kinds}
    runs = sorted({run for column in columns.values() for run in column})
    rows = [
        [str(n), *(f"{100 * c[n, s].positive:.4g}" if (n, s) in c else "" for c in columns.values())] for n, s in runs
    ]
    file.write_text("\n".join(map(",".join, [["n", *kinds], *rows])) + "\n")


def _key(point: Point) -> tuple[str, int, str]:
    return point.way, point.tokens, point.kind
