"""A sweep: one recipe in several variants, each from several seeds, trained, tested alike, and put into one table.

Every run lies in its own folder, and one that is done is not done again, so the same command goes on after any death.
What a run leaves is its end's weights, its log and its scores; its checkpoints are swept away.

n seeds
"""

import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from vitrail import recipe as recipes
from vitrail.config import Config
from vitrail.devices import usable
from vitrail.errors import ConfigError, Stopped, VitrailError, nearest
from vitrail.hub.configs import shipped
from vitrail.hub.packages import PACKAGES
from vitrail.jobs import OURS, Job
from vitrail.lab.origin import origin
from vitrail.lab.student import half_width

OUT = Path("out")
ORIGIN = "origin.json"
Test = Callable[[Path, tuple[str, ...], Path], None]
"""Test a model in a folder by the words of a suite, and write the scores into a JSON file."""


class Variant(Config):
    name: str
    changes: dict[str, Any] = {}


class Need(Config):
    """What has to be trained before: a recipe, into out/NAME, by the recipe's own name unless given."""

    recipe: str
    name: str | None = None
    changes: dict[str, Any] = {}

    @property
    def folder(self) -> Path:
        return OUT / (self.name or Path(self.recipe).stem)

    @property
    def command(self) -> str:
        changes = [f"{key}={_toml(value)}" for key, value in self.changes.items()]
        return shlex.join(["vitrail", "train", self.recipe, *changes, "--out", str(self.folder)])

    def read_recipe(self) -> recipes.Recipe:
        return recipes.read(self.recipe, _quoted(self.changes))


class Sweep(Config):
    """`changes` of the recipe are for all variants; a variant's own are laid over them. `tests` are what `vitrail eval`
    is asked of each model: a name, and the words behind the model's folder. `needs` are the recipes whose results the
    variants, or later ones of them, start from, in the order to train them in."""

    name: str
    says: str
    recipe: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    changes: dict[str, Any] = {}
    tests: dict[str, tuple[str, ...]] = {}
    needs: tuple[str | Need, ...] = ()

    def __post_init__(self) -> None:
        names = [_slug(variant.name) for variant in self.variants]
        if not names or not self.seeds:
            raise ConfigError(f"sweep {self.name!r} has nothing to run", "give variants and seeds")
        tests = [_slug(test) for test in self.tests]
        if len(set(tests)) != len(tests):
            raise ConfigError(f"sweep {self.name!r} names a test twice", "give each its own name")
        if len(set(names)) != len(names) or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"sweep {self.name!r} names a variant or a seed twice", "give each once")
        if "seed" in self.changes or any("seed" in variant.changes for variant in self.variants):
            raise ConfigError(f"sweep {self.name!r} changes the seed", "list the seeds instead")

    def read_recipe(self, variant: Variant, seed: int) -> recipes.Recipe:
        changes = {**self.changes, **variant.changes, "seed": seed}
        return recipes.read(self.recipe, _quoted(changes))


class Run(NamedTuple):
    variant: Variant
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"


def folder() -> Path:
    return recipes.folder() / "sweeps"


def read(name_or_path: str | Path) -> Sweep:
    path = Path(name_or_path)
    path = path if path.suffix == ".toml" else folder() / f"{name_or_path}.toml"
    if not path.is_file():
        known = sorted(file.stem for file in folder().glob("*.toml"))
        raise ConfigError(f"no sweep {str(name_or_path)!r}", f"give a .toml file, or {nearest(path.stem, known)}")
    try:
        return Sweep.read(tomllib.loads(path.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None


def runs(sweep: Sweep, out: Path, share: tuple[int, int] = (0, 1)) -> list[Run]:
    """All runs, seed by seed, so that a sweep that is cut short has whole seeds; `share` (i, of) is every of-th, from
    the i-th on. All recipes are read before the first is run."""
    found = [
        Run(variant, seed, out / _slug(variant.name) / f"seed-{seed}")
        for seed in sweep.seeds
        for variant in sweep.variants
    ]
    for run in found:
        sweep.read_recipe(run.variant, run.seed)
    return found[share[0] :: share[1]]


def _quoted(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Texts as TOML has them, so that they stay texts."""
    return {key: json.dumps(value) if isinstance(value, str) else value for key, value in changes.items()}


def _toml(value: Any) -> str:
    """On one line, as a change is given to a command."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value)


# ---- what is trained before -------------------------------------------------------------------------------------


def check_starts(sweep: Sweep, out: Path, share: tuple[int, int] = (0, 1), *, train: bool = False) -> None:
    """Refuse a sweep of which a variant starts from a folder that is not there, before the first is trained; with
    `train` one that it does not need, since what it needs is made first."""
    needs = missing(sweep)
    made = {str(need.folder) for need in needs} if train else set()
    for run in runs(sweep, out, share):
        for name, start in _absent(sweep.read_recipe(run.variant, run.seed)).items():
            if str(Path(start).parent) in made:
                continue
            commands = "".join(f"\n    {need.command}" for need in needs)
            raise ConfigError(
                f"{run.name}: {name} starts from {start}, which is not there",
                f"train it first:{commands}" if commands else "train it first",
            )


def missing(sweep: Sweep) -> list[Need]:
    """Of what a sweep needs all that is still to be trained, in order; what only serves to train another that is there
    already is not."""
    reads = [sweep.read_recipe(variant, sweep.seeds[0]) for variant in sweep.variants]
    wanted = {start for chosen in reads for start in _absent(chosen).values()}
    found: list[Need] = []
    for one in reversed(sweep.needs):
        need = Need(recipe=one) if isinstance(one, str) else one
        if str(need.folder / "final") in wanted:
            found.insert(0, need)
            wanted |= set(_absent(need.read_recipe()).values())
    return found


def _absent(chosen: recipes.Recipe) -> dict[str, str]:
    """What starts → the folder that it would start from and that is not there."""
    starts = recipes.started_from(chosen)
    return {what: start for what, start in starts.items() if not _known(start) and not Path(start).exists()}


def _known(start: str) -> bool:
    return start in PACKAGES or start in shipped() or start.count("/") == 1  # an id of the hub


# ---- running ----------------------------------------------------------------------------------------------------


def queue(outs: Mapping[str, Path], device: str | None = None) -> list[Job]:
    """What is left of some sweeps, name → folder: what is trained before, each once, and then all runs, one sweep
    behind the other, so that of a queue that is cut short some are whole. Each is a command that waits for those it
    starts from, and for no other."""
    more = () if device is None else ("--device", device)
    chosen = {name: read(name) for name in outs}
    before: dict[str, Job] = {}
    for sweep in chosen.values():
        for need in missing(sweep):
            words = (*OURS, *shlex.split(need.command)[1:], *more)
            log = need.folder.with_name(f"{need.folder.name}.log")
            name = str(need.folder)
            before.setdefault(name, Job(name, words, log, _after(need.read_recipe(), before)))
    found: list[Job] = []
    for name, sweep in chosen.items():
        every = runs(sweep, outs[name])
        for i, run in enumerate(every):
            if not is_done(sweep, run):
                share = ("--share", f"{i}/{len(every)}")
                words = (*OURS, "sweep", name, "--out", str(outs[name]), *share, *more)
                after = _after(sweep.read_recipe(run.variant, run.seed), before)
                found.append(Job(f"{sweep.name}: {run.name}", words, outs[name] / f"job-{i}.log", after))
    return [*before.values(), *found]


def _after(chosen: recipes.Recipe, before: Mapping[str, Job]) -> tuple[str, ...]:
    made = dict.fromkeys(str(Path(start).parent) for start in _absent(chosen).values())
    return tuple(folder for folder in made if folder in before)


def do(sweep: Sweep, run: Run, test: Test, *, device: str | None = None) -> None:
    """Train and test one run, or what is left of it."""
    chosen = sweep.read_recipe(run.variant, run.seed)
    mark, made_of = run.folder / "recipe.json", _made_of(chosen)
    if not mark.is_file() or mark.read_text() != made_of:
        mark.unlink(missing_ok=True)  # from here on it vouches for nothing
        (run.folder / ORIGIN).unlink(missing_ok=True)
        shutil.rmtree(run.folder / "tests", ignore_errors=True)
        recipes.train(chosen, run.folder, device=device, quiet=True)
        where = usable(device)
        _put(run.folder / ORIGIN, json.dumps(origin(f"vitrail sweep {sweep.name}", where), indent=1))
        _put(mark, made_of)
    for stage in chosen.stages:
        shutil.rmtree(run.folder / stage.name / "checkpoints", ignore_errors=True)
    for words, file in _untested(sweep, run):
        test(run.folder / "final", words, file)
        _put(file, json.dumps({**_read(file), "asked": words}, indent=1, ensure_ascii=False))


def rehearse(sweep: Sweep, test: Test, out: Path, *, device: str | None = None) -> Iterator[tuple[Run, str | None]]:
    """Every variant trained for one step of two samples, and so what it starts from where that is not there yet, but
    tested as it will be: what a test would refuse at the end of a long training, it refuses now. `out` is for this
    alone. → each run, and what is wrong with it, if anything is."""
    made: dict[str, str] = {}

    def train(chosen: recipes.Recipe, folder: Path) -> None:
        recipes.train(recipes.starting_from(recipes.tiny(chosen), made), folder, device=device, quiet=True)

    for need in missing(sweep):
        try:
            train(need.read_recipe(), out / "needs" / need.folder.name)
        except Stopped:
            raise
        except VitrailError as error:
            raise ConfigError(f"{need.folder}, which it starts from: {error.problem}", error.remedy) from error
        made[str(need.folder / "final")] = str(out / "needs" / need.folder.name / "final")
    for run in runs(sweep.with_(seeds=sweep.seeds[:1]), out / "runs"):
        wrong = None
        try:
            train(sweep.read_recipe(run.variant, run.seed), run.folder)
            for words, file in _untested(sweep, run):
                test(run.folder / "final", words, file)
        except Stopped:
            raise
        except VitrailError as error:
            wrong = error.problem
        yield run, wrong


def is_done(sweep: Sweep, run: Run) -> bool:
    """Whether a run is trained as it would be now, and tested."""
    chosen, mark = sweep.read_recipe(run.variant, run.seed), run.folder / "recipe.json"
    if not mark.is_file() or _absent(chosen) or mark.read_text() != _made_of(chosen):
        return False
    return not _untested(sweep, run)


def _untested(sweep: Sweep, run: Run) -> list[tuple[tuple[str, ...], Path]]:
    """The tests that are left, by their words, each with its file."""
    files = [(words, run.folder / "tests" / f"{_slug(name)}.json") for name, words in sweep.tests.items()]
    return [(words, file) for words, file in files if _read(file).get("asked") != list(words)]


def _made_of(chosen: recipes.Recipe) -> str:
    """What decides the weights of a run: the recipe, and the weights that it starts from."""
    plain: dict[str, Any] = {key: value for key, value in chosen.plain().items() if key not in ("name", "says")}
    plain["stages"] = [{k: v for k, v in stage.items() if k not in recipes.HOW} for stage in plain["stages"]]
    starts = recipes.starts(chosen)
    return json.dumps(plain | ({"starts": starts} if starts else {}), sort_keys=True)


def origins(sweep: Sweep, out: Path) -> dict[str, str]:
    """Where the runs come from, as each was trained; what they differ in is told of all of them."""
    every = [_read(run.folder / ORIGIN) for run in runs(sweep, out)]
    keys = dict.fromkeys(key for one in every for key in one if key != "command")
    found = {key: ", ".join(sorted({str(one[key]) for one in every if key in one})) for key in keys}
    lost = sum(not one for one in every)
    return found | ({"note": f"of {lost} of {len(every)} runs it is not known when they were trained"} if lost else {})


def _put(file: Path, text: str) -> None:
    """Whole, or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def _read(file: Path) -> dict[str, Any]:
    """The scores of a test; {} where there are none, or only a part of them."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


# ---- the table --------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A score of one variant over its seeds; `test` is what gave it, or the stage that was judged."""

    variant: str
    test: str
    score: str
    values: dict[int, float]  # seed → value

    @property
    def mean(self) -> float:
        return mean(self.values.values())

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % of the mean over seeds, by Student's t; None of a single seed."""
        if len(self.values) < 2:
            return None
        half = half_width(list(self.values.values()))
        return self.mean - half, self.mean + half

    def plain(self) -> dict[str, Any]:
        return {**self._asdict(), "mean": self.mean, "interval": self.interval}


def table(sweep: Sweep, out: Path) -> list[Row]:
    """What is known so far."""
    rows: dict[tuple[str, str, str], dict[int, float]] = {}
    for run in runs(sweep, out):
        for test in sweep.tests:
            for score, value in _scores(run.folder / "tests" / f"{_slug(test)}.json"):
                rows.setdefault((run.variant.name, test, score), {})[run.seed] = value
        for stage in sweep.read_recipe(run.variant, run.seed).stages:
            for score, value in _judged(run.folder / stage.name / "log.jsonl", stage.steps):
                rows.setdefault((run.variant.name, stage.name, score), {})[run.seed] = value
    order = {variant.name: n for n, variant in enumerate(sweep.variants)}
    found = [Row(*key, values) for key, values in rows.items()]
    return sorted(found, key=lambda row: order[row.variant])


def _scores(file: Path) -> Iterator[tuple[str, float]]:
    for score in _read(file).get("scores", ()):
        part: Mapping[str, Any] = score.get("part", {})
        yield ", ".join([score["name"].strip(), *(f"{key} {value}" for key, value in part.items())]), score["value"]


def _judged(log: Path, steps: int) -> Iterator[tuple[str, float]]:
    """What a stage was judged by after its last step."""
    last = log.read_text().splitlines()[-1:] if log.is_file() else []
    row = json.loads(last[0]) if last else {}
    if row.get("step") == steps:
        yield from ((key, value) for key, value in row.items() if key.startswith("judge/"))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
