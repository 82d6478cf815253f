"""`vitrail scaling run`: numbers of visual tokens compared on models that are trained for it."""

import json
import tomllib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from vitrail.cli.scaling import print_table, save_figure, table_lines
from vitrail.cli.written import write_plain
from vitrail.errors import ConfigError, Stopped, TrainError, VitrailError
from vitrail.hub.files import write_json
from vitrail.jobs import OURS, Job, side_by_side
from vitrail.lab.contrasts import (
    Contrast,
    Line,
    Point,
    above_chance,
    as_scored,
    column,
    gain,
    lines,
    panels,
    steeper,
)
from vitrail.lab.exact import NAMING
from vitrail.lab.ledger import DEVICES
from vitrail.show.ledger import si
from vitrail.show.scaling import draw_ways
from vitrail.sweep import check_starts
from vitrail.token_design import Design
from vitrail.token_scaling import ALONE, ANOTHER, PHASES, TOLD, WITHHELD, Experiment, Phase

Numbers = Annotated[tuple[int, ...], Parameter(negative="")]
Hidden = Parameter(show=False)
DEFAULT = Design()
DESIGN = "design.json"
STEEP, FLAT = "reading", "existence_random"
POINTING = "questions that point"
DECLARED = (  # what the experiment is for: of these alone a verdict is given
    f"α of {STEEP} − α of {FLAT}, above chance, {TOLD}",
    f"{TOLD} over {ALONE}, {POINTING}",
    f"{TOLD} over {ALONE}, {POINTING} less {NAMING}",
)

# Models of a few thousand weights from chance, two steps each: whether all of it runs.
_WIDE = {"norm": "rms", "eps": 1e-5, "attention": {"heads": 2}, "mlp": {"kind": "gated", "hidden": 24}}
_STAGE: dict[str, Any] = {"steps": 2, "save_every": 2, "batch": 4, "dtype": "float32", "compile": False, "workers": 0}
_STAGE |= {"schedule": {"kind": "constant"}}
_BOTH: dict[str, Any] = {
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
    "model.config.decoder": {"vocab": 512, "layers": 4, "tied": True, "context": 320, "rotary": {"head_dim": 16}}
    | {"block": {"width": 32, **_WIDE}},
    **{f"sources.{name}.side": 16 for name in ("scenes", "named")},
    **{f"stages.0.{key}": value for key, value in _STAGE.items()},
}
SMOKE: dict[str, Any] = {
    **{f"{which}.{key}": value for which in ("base", "queries") for key, value in _BOTH.items()},
    **{f"base.stages.1.{key}": value for key, value in _STAGE.items()},
    "queries.model.config.queries": {"kind": "fused", "reads": 32, "gives": 32, "vocab": 512, "layers": 4, "width": 32}
    | {"heads": 2, "hidden": 24},
    **{f"queries.sources.{name}.side": 16 for name in ("unseen", "unseen-named")},
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
    dry: Annotated[bool, Parameter(negative="")] = False,
    anyway: Annotated[bool, Parameter(negative="")] = False,
    smoke: Annotated[bool, Parameter(negative="")] = False,
    device: str | None = None,
    phase: Annotated[Phase | None, Hidden] = None,
    share: Annotated[str, Hidden] = "0/1",
    design_file: Annotated[Path | None, Hidden] = None,
) -> None:
    """Train a model once, and behind it runs with few and many visual tokens, with the question fused into them and
    without; test all on the same questions, fit the law of every kind, and say whether reading grows faster than
    existence and whether the question helps only where it points at something.

    The language model is frozen in all runs. A plain Q-Former is trained as they are; VisPruner, VisionZip, pooling and
    a choice by lot are tested on the base. A base that is not told from a guess ends it. The same command goes on after
    any interruption.

    Parameters
    ----------
    changes
        Settings of either recipe to change, as key=value with dotted keys. Before one that both have stands base. or
        queries., for example queries.stages.0.steps=400.
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
    dry
        Only say what would be run, and how much work it is.
    anyway
        Go on even with a base that reads or sees no more than a guess would.
    smoke
        Tiny models from chance and two steps of each, to see whether all runs. It goes on with any base.
    device
        cpu or cuda; a GPU is used where there is one.
    """
    if phase is not None and design_file is not None:  # one of the jobs
        design = Design.read(json.loads(design_file.read_text(encoding="utf-8")))
        _one_job(Experiment(design, out, device), phase, share)
        return
    if jobs < 1 or seeds < 1:
        raise ConfigError(f"{jobs} jobs, {seeds} seeds", "give at least 1 of each")
    if wrong := [change for change in changes if "=" not in change]:
        raise ConfigError(f"{wrong[0]!r} is no key=value", "for example base.stages.1.steps=500")
    laid = deepcopy(SMOKE if smoke else {}) | dict(map(_change, changes))
    small: dict[str, Any] = {"tokens": (1, 4, 16), "seeds": (0,), "steps": 2, "count": 8} if smoke else {}
    asked: dict[str, Any] = {"tokens": tokens, "seeds": tuple(range(seeds)), "steps": steps, "count": count}
    design = Design(base=base, queries=queries, changes=laid, **(asked | small))
    experiment = Experiment(design, out, device)
    if dry:
        for line in listing(experiment):
            print(line)
        return
    check_starts(experiment.sweep_of("base"), experiment.folder)
    experiment.folder.mkdir(parents=True, exist_ok=True)
    write_json(experiment.folder / DESIGN, design.plain())
    for each in PHASES:
        _phase(experiment, each, out, min(jobs, len(experiment.planned(each))), device)
        if each == "base" and not (anyway or smoke):
            experiment.check_base((STEEP, FLAT))
    tell(experiment, out)


def _phase(experiment: Experiment, phase: Phase, out: Path, jobs: int, device: str | None) -> None:
    if jobs == 1:
        _one_job(experiment, phase, "0/1")
        return
    if phase == "runs":
        experiment.cut()  # once, before many would
    more = [] if device is None else ["--device", device]
    words = (*OURS, "scaling", "run", "--out", str(out), "--phase", phase, *more)
    words += ("--design-file", str(experiment.folder / DESIGN))
    share = [(*words, "--share", f"{i}/{jobs}") for i in range(jobs)]
    queue = [Job(f"{phase} {i}", one, out / f"{phase}-{i}.log") for i, one in enumerate(share)]
    if failed := side_by_side(queue, jobs, phase):
        said = "\n".join(failed.values())
        raise TrainError(f"{len(failed)} of {jobs} jobs failed\n{said}", "mend that and start the command again")


def _one_job(experiment: Experiment, phase: Phase, share: str) -> None:
    from tqdm import tqdm

    i, of = map(int, share.split("/"))
    failed = []
    for planned in tqdm(experiment.planned(phase)[i::of], desc=phase, unit="run", disable=None):
        try:
            experiment.do(phase, planned)
        except VitrailError as error:  # the others need not wait for it
            if isinstance(error, Stopped) or phase != "runs":
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


def listing(experiment: Experiment, at: str = "h200") -> Iterator[str]:
    """What would be run: of each phase its runs, how many are done, their steps, what is asked, and the work."""
    kinds, count = len(experiment.settings.kinds) + 1, experiment.design.count
    rows = [("phase", "runs", "done", "steps of each", "samples", "questions", "work", f"at the full rate of an {at}")]
    for phase in PHASES:
        planned, sweep = experiment.planned(phase), experiment.sweep_of(phase)
        variants = ", ".join(variant.name for variant in sweep.variants)
        yield f"{phase}: {variants}; seeds {', '.join(map(str, sweep.seeds))}"
        recipe = sweep.read_recipe(planned[0].variant, planned[0].seed)
        steps, samples = [stage.steps for stage in recipe.stages], experiment.samples(phase)
        work = experiment.flops(phase)
        done = sum((run.folder / "recipe.json").is_file() for run in planned)
        asked = len(planned) * len(sweep.tests) * kinds * count
        cells = (str(len(planned)), str(done), " + ".join(map(str, steps)), f"{samples * len(planned):,}", f"{asked:,}")
        rows.append((phase, *cells, si(work, "FLOP"), si(work / DEVICES[at].flops, "s")))
    yield ""
    yield from table_lines(rows)
    yield ""
    yield "work as if all parts learned; a rate that small models do not reach: hold the first run against it"


# ---- what is said of it -----------------------------------------------------------------------------------------


def tell(experiment: Experiment, out: Path) -> None:
    """Print the tables and the answers, and write them with all scores."""
    points = experiment.points()
    write_told(points, answers(points), out, experiment.design.plain(), "mean over seeds", experiment.device)


def write_told(
    points: Sequence[Point],
    contrasts: dict[str, Contrast | None],
    out: Path,
    design: dict[str, Any],
    note: str,
    device: str,
) -> None:
    """Print scores, laws and answers, and leave them in a folder with all that they were found by."""
    told, counts = lines(points), sorted({p.tokens for p in points})
    print_table([("kind", "way", *map(str, counts), "±", "blind", "α"), *(_cells(line, counts) for line in told)])
    print()
    print_table([(name, "too few" if one is None else str(one)) for name, one in contrasts.items()])
    laws: dict[str, dict[str, Any]] = {}
    for line in told:
        if line.law is not None:
            laws.setdefault(line.way, {})[line.kind] = line.law.plain()
    write_plain(
        out / "scaling.json",
        {
            "design": design,
            "questions": {p.kind: {"of": p.of, "blind": p.blind} for p in points},
            "scores": [p.plain() for p in points],
            "laws": laws,
            "contrasts": {name: one and {**one.plain(), "sign": one.sign} for name, one in contrasts.items()},
        },
        device,
    )
    for way, kinds in laws.items():
        _table(points, way, list(kinds), out / f"scores-{way.replace(' ', '-').lower()}.csv")
    note = f"share of questions answered over visual tokens, {note}"
    save_figure(draw_ways(panels(told), "How many visual tokens", note), out / "scaling.svg")


def answers(points: Sequence[Point]) -> dict[str, Contrast | None]:
    """The questions of the experiment, by what is told of them; those that it was made for come first."""
    kinds = list(dict.fromkeys(p.kind for p in points))
    found: dict[str, Contrast | None] = dict.fromkeys(DECLARED)
    for by, said in ((above_chance, "above chance"), (as_scored, "as scored")):
        for way in (TOLD, ALONE):
            found[f"α of {STEEP} − α of {FLAT}, {said}, {way}"] = steeper(points, way, STEEP, FLAT, by)
    pointing = [kind for kind in kinds if kind != NAMING]
    for over in (ALONE, WITHHELD, ANOTHER):
        found[f"{TOLD} over {over}, {POINTING}"] = gain(points, TOLD, over, pointing)
        found[f"{TOLD} over {over}, {POINTING} less {NAMING}"] = gain(points, TOLD, over, pointing, [NAMING])
        found |= {f"{TOLD} over {over}, {kind}": gain(points, TOLD, over, [kind]) for kind in kinds}
    return {name: one and one.with_(declared=name in DECLARED) for name, one in found.items()}


def _cells(line: Line, counts: Sequence[int]) -> tuple[str, ...]:
    means = (f"{line.means[n]:.1%}" if n in line.means else "–" for n in counts)
    return line.kind, line.way, *means, f"{line.within:.1%}", f"{line.blind:.1%}", line.alpha


def _table(points: Sequence[Point], way: str, kinds: Sequence[str], file: Path) -> None:
    """What laws are fitted to, for `vitrail scaling fit` and `plan`: a line a number of tokens, in percent."""
    columns = [dict(zip(*column(points, way, kind), strict=True)) for kind in kinds]
    counts = sorted({n for one in columns for n in one})
    rows = [[f"{n:g}", *(f"{100 * one[n]:.6g}" if n in one else "" for one in columns)] for n in counts]
    file.write_text("\n".join(map(",".join, [["n", *kinds], *rows])) + "\n")
