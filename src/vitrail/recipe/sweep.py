"""Sweeps: one recipe in several variants and seeds, trained, evaluated with the same tests, and put into one table.

Every run has its own folder, and a finished run is skipped. The same command therefore resumes an interrupted sweep.
A run keeps its final weights, its log and its scores; its training checkpoints are deleted.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from vitrail import recipe as recipes
from vitrail.config import Config, Seed, check_name
from vitrail.devices import resolve_device
from vitrail.errors import ConfigError, TrainingInterrupted, VitrailError, suggest_name
from vitrail.hub.checkpoint_info import list_bundled_models
from vitrail.hub.packages import PACKAGES
from vitrail.lab.origin import collect_origin
from vitrail.lab.student_t import compute_half_width
from vitrail.recipe.process_queue import CLI_COMMAND, ProcessJob
from vitrail.recipe.recipe_files import read_recipe_file
from vitrail.training.run_lock import lock_run_folder

OUTPUT_FOLDER = Path("out")
ORIGIN_FILE = "origin.json"
EvalFn = Callable[[Path, tuple[str, ...], Path], None]
"""Evaluate the model in a folder with the arguments of `vitrail eval`, and write the scores to a JSON file."""


class SweepVariant(Config):
    """A named set of overrides of the recipe.

    name       name of the variant, and of its folder
    overrides  dotted key → value
    """

    name: str
    overrides: dict[str, Any] = {}


class RequiredRecipe(Config):
    """A recipe that must be trained before the sweep. It is trained to out/NAME; NAME is the recipe's by default.

    recipe     name of the recipe
    name       name of the folder; that of the recipe by default
    overrides  dotted key → value
    """

    recipe: str
    name: str | None = None
    overrides: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name(self.name, "requires.name")

    @property
    def folder(self) -> Path:
        return OUTPUT_FOLDER / (self.name or Path(self.recipe).stem)

    @property
    def train_command(self) -> str:
        changes = [f"{key}={_format_toml(value)}" for key, value in self.overrides.items()]
        return shlex.join(["vitrail", "train", self.recipe, *changes, "--out", str(self.folder)])

    def load_recipe(self) -> recipes.Recipe:
        return recipes.load_recipe(self.recipe, _quote_strings(self.overrides))


class Sweep(Config):
    """A recipe, its variants and seeds, and the tests of every trained model.

    name         name of the sweep
    description  one line about the sweep
    recipe       name of the recipe or a .toml file
    variants     sets of overrides to train
    seeds        seeds to train every variant with
    overrides    apply to all variants; those of a variant take precedence
    tests        name → arguments of `vitrail eval` after the folder of the model
    requires     recipes whose checkpoints the variants load, in the order of training
    """

    name: str
    description: str
    recipe: str
    variants: tuple[SweepVariant, ...]
    seeds: tuple[Seed, ...] = (0, 1, 2)
    overrides: dict[str, Any] = {}
    tests: dict[str, tuple[str, ...]] = {}
    requires: tuple[str | RequiredRecipe, ...] = ()

    def __post_init__(self) -> None:
        names = [_slugify(variant.name) for variant in self.variants]
        if not names or not self.seeds:
            raise ConfigError(f"sweep {self.name!r} has no runs", "add variants and seeds")
        tests = [_slugify(test) for test in self.tests]
        check_name(self.name, "name")
        for name in names:
            check_name(name, "variants.name, as a folder,")
        for test in tests:
            check_name(test, "a name under tests, as a file,")
        if len(set(tests)) != len(tests):
            raise ConfigError(f"sweep {self.name!r} has two tests with the same name", "rename one of them")
        if len(set(names)) != len(names) or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"sweep {self.name!r} repeats a variant or a seed", "list each once")
        if "seed" in self.overrides or any("seed" in variant.overrides for variant in self.variants):
            raise ConfigError(f"sweep {self.name!r} overrides the seed", "list the seeds under seeds instead")

    def load_recipe(self, variant: SweepVariant, seed: int) -> recipes.Recipe:
        changes = {**self.overrides, **variant.overrides, "seed": seed}
        return recipes.load_recipe(self.recipe, _quote_strings(changes))


class SweepRun(NamedTuple):
    """One variant with one seed."""

    variant: SweepVariant
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"


def sweep_folder() -> Path:
    """Return the folder of the sweeps."""
    return recipes.recipe_folder() / "sweeps"


def load_sweep(name_or_path: str | Path) -> Sweep:
    """Load a sweep by name or file."""
    path = Path(name_or_path)
    path = path if path.suffix == ".toml" else sweep_folder() / f"{name_or_path}.toml"
    if not path.is_file():
        known = sorted(file.stem for file in sweep_folder().glob("*.toml"))
        raise ConfigError(
            f"there is no sweep {str(name_or_path)!r}", f"give a .toml file, or {suggest_name(path.stem, known)}"
        )
    return Sweep.from_dict(read_recipe_file(path))


def list_runs(sweep: Sweep, out: Path, share: tuple[int, int] = (0, 1)) -> list[SweepRun]:
    """List all runs, seed by seed, so that an unfinished sweep has complete seeds.

    `share` (i, n) selects every n-th run from the i-th on. All recipes are loaded, so errors in them appear early.
    """
    found = [
        SweepRun(variant, seed, out / _slugify(variant.name) / f"seed-{seed}")
        for seed in sweep.seeds
        for variant in sweep.variants
    ]
    for run in found:
        sweep.load_recipe(run.variant, run.seed)
    return found[share[0] :: share[1]]


def _quote_strings(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Quote strings, so that `load_recipe` does not parse them as TOML."""
    return {key: json.dumps(value) if isinstance(value, str) else value for key, value in overrides.items()}


def _format_toml(value: Any) -> str:
    """Format a value as TOML on one line, as on a command line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_format_toml(one)}" for key, one in value.items()) + "}"
    return f"[{', '.join(map(_format_toml, value))}]" if isinstance(value, list) else json.dumps(value)


# ---- required checkpoints ---------------------------------------------------------------------------------------


def check_checkpoints(sweep: Sweep, out: Path, share: tuple[int, int] = (0, 1), *, train: bool = False) -> None:
    """Refuse a sweep with a variant whose checkpoint does not exist.

    With `train`, checkpoints of required recipes may be missing: they are trained first.
    """
    needs = list_missing_requirements(sweep)
    trained_folders = {str(need.folder) for need in needs} if train else set()
    for run in list_runs(sweep, out, share):
        for name, start in _missing_checkpoints(sweep.load_recipe(run.variant, run.seed)).items():
            if str(Path(start).parent) in trained_folders:
                continue
            commands = "".join(f"\n    {need.train_command}" for need in needs)
            raise ConfigError(
                f"{run.name}: the checkpoint {start} of {name} does not exist",
                f"train it first:{commands}" if commands else "train it first",
            )


def list_missing_requirements(sweep: Sweep) -> list[RequiredRecipe]:
    """List the required recipes that are still to be trained, in order.

    A requirement is skipped if only finished recipes depend on it.
    """
    loaded = [sweep.load_recipe(variant, sweep.seeds[0]) for variant in sweep.variants]
    checkpoints = {start for recipe in loaded for start in _missing_checkpoints(recipe).values()}
    found: list[RequiredRecipe] = []
    for one in reversed(sweep.requires):
        need = RequiredRecipe(recipe=one) if isinstance(one, str) else one
        if str(need.folder / "final") in checkpoints:
            found.insert(0, need)
            checkpoints |= set(_missing_checkpoints(need.load_recipe()).values())
    return found


def _missing_checkpoints(recipe: recipes.Recipe) -> dict[str, str]:
    """Return the checkpoints of a recipe that do not exist: what they initialize → folder."""
    starts = recipes.collect_checkpoints(recipe)
    return {name: start for name, start in starts.items() if not _is_fetchable(start) and not Path(start).exists()}


def _is_fetchable(start: str) -> bool:
    return start in PACKAGES or start in list_bundled_models() or start.count("/") == 1  # a hub id


# ---- running ----------------------------------------------------------------------------------------------------


def build_job_queue(outs: Mapping[str, Path], device: str | None = None) -> list[ProcessJob]:
    """List the remaining jobs of several sweeps (name → folder): required recipes first, each once, then all runs.

    Runs are ordered by sweep, so that an unfinished queue has complete sweeps. A job is a command that waits only for
    the jobs whose checkpoints it loads.
    """
    device_options = () if device is None else ("--device", device)
    all_sweeps = {name: load_sweep(name) for name in outs}
    before: dict[str, ProcessJob] = {}
    for sweep in all_sweeps.values():
        for need in list_missing_requirements(sweep):
            words = (*CLI_COMMAND, *shlex.split(need.train_command)[1:], *device_options)
            log = need.folder.with_name(f"{need.folder.name}.log")
            name = str(need.folder)
            before.setdefault(name, ProcessJob(name, words, log, _job_dependencies(need.load_recipe(), before)))
    found: list[ProcessJob] = []
    for name, sweep in all_sweeps.items():
        every = list_runs(sweep, outs[name])
        for i, run in enumerate(every):
            if not is_done(sweep, run):
                share = ("--share", f"{i}/{len(every)}")
                words = (*CLI_COMMAND, "sweep", name, "--out", str(outs[name]), *share, *device_options)
                after = _job_dependencies(sweep.load_recipe(run.variant, run.seed), before)
                found.append(ProcessJob(f"{sweep.name}: {run.name}", words, outs[name] / f"job-{i}.log", after))
    return [*before.values(), *found]


def _job_dependencies(recipe: recipes.Recipe, before: Mapping[str, ProcessJob]) -> tuple[str, ...]:
    folders = dict.fromkeys(str(Path(start).parent) for start in _missing_checkpoints(recipe).values())
    return tuple(folder for folder in folders if folder in before)


def execute_run(sweep: Sweep, run: SweepRun, test: EvalFn, *, device: str | None = None) -> None:
    """Train and test one run. Finished parts are skipped."""
    with lock_run_folder(run.folder):
        recipe = sweep.load_recipe(run.variant, run.seed)
        mark, made_of = run.folder / "recipe.json", _run_fingerprint(recipe)
        if not mark.is_file() or mark.read_text() != made_of:
            mark.unlink(missing_ok=True)  # the fingerprint is valid only for a finished run
            (run.folder / ORIGIN_FILE).unlink(missing_ok=True)
            shutil.rmtree(run.folder / "tests", ignore_errors=True)
            recipes.train_recipe(recipe, run.folder, device=device, quiet=True)
            where = resolve_device(device)
            _write_atomically(
                run.folder / ORIGIN_FILE, json.dumps(collect_origin(f"vitrail sweep {sweep.name}", where), indent=1)
            )
            _write_atomically(mark, made_of)
        for stage in recipe.stages:
            shutil.rmtree(run.folder / stage.name / "checkpoints", ignore_errors=True)
        for words, file in _pending_tests(sweep, run):
            test(run.folder / "final", words, file)
            _write_atomically(file, json.dumps({**_read_json(file), "arguments": words}, indent=1, ensure_ascii=False))


def smoke_test_sweep(
    sweep: Sweep, test: EvalFn, out: Path, *, device: str | None = None
) -> Iterator[tuple[SweepRun, str | None]]:
    """Train every variant, and missing required recipes, for one step of two samples, then run all tests.

    Errors that would occur after a long training occur now. `out` must be an empty folder. Yields each run and its
    error, or None.
    """
    replacements: dict[str, str] = {}

    def train(recipe: recipes.Recipe, folder: Path) -> None:
        recipes.train_recipe(
            recipes.replace_checkpoints(recipes.shrink_recipe(recipe), replacements), folder, device=device, quiet=True
        )

    for need in list_missing_requirements(sweep):
        try:
            train(need.load_recipe(), out / "needs" / need.folder.name)
        except TrainingInterrupted:
            raise
        except VitrailError as error:
            raise ConfigError(f"required recipe {need.folder}: {error.problem}", error.remedy) from error
        replacements[str(need.folder / "final")] = str(out / "needs" / need.folder.name / "final")
    for run in list_runs(sweep.replace(seeds=sweep.seeds[:1]), out / "runs"):
        problem = None
        try:
            train(sweep.load_recipe(run.variant, run.seed), run.folder)
            for words, file in _pending_tests(sweep, run):
                test(run.folder / "final", words, file)
        except TrainingInterrupted:
            raise
        except VitrailError as error:
            problem = error.problem
        yield run, problem


def is_done(sweep: Sweep, run: SweepRun) -> bool:
    """Whether a run is trained with the current recipe and checkpoints, and tested."""
    recipe, mark = sweep.load_recipe(run.variant, run.seed), run.folder / "recipe.json"
    if not mark.is_file() or _missing_checkpoints(recipe) or mark.read_text() != _run_fingerprint(recipe):
        return False
    return not _pending_tests(sweep, run)


def _pending_tests(sweep: Sweep, run: SweepRun) -> list[tuple[tuple[str, ...], Path]]:
    """List the tests that are still to be run: their arguments and their score files."""
    files = [(words, run.folder / "tests" / f"{_slugify(name)}.json") for name, words in sweep.tests.items()]
    return [(words, file) for words, file in files if _read_json(file).get("arguments") != list(words)]


def _run_fingerprint(recipe: recipes.Recipe) -> str:
    """Return what determines the weights of a run as JSON: the recipe and hashes of its checkpoints."""
    plain: dict[str, Any] = {
        key: value for key, value in recipe.to_dict().items() if key not in ("name", "description")
    }
    plain["stages"] = [
        {k: v for k, v in stage.items() if k not in recipes.RUNTIME_STAGE_KEYS} for stage in plain["stages"]
    ]
    starts = recipes.hash_checkpoints(recipe)
    return json.dumps(plain | ({"starts": starts} if starts else {}), sort_keys=True)


def collect_origins(sweep: Sweep, out: Path) -> dict[str, str]:
    """Merge the origins of all runs (commit, hardware, date). Differing values are joined by commas."""
    every = [_read_json(run.folder / ORIGIN_FILE) for run in list_runs(sweep, out)]
    keys = dict.fromkeys(key for one in every for key in one if key != "command")
    origin = {key: ", ".join(sorted({str(one[key]) for one in every if key in one})) for key in keys}
    num_missing = sum(not one for one in every)
    return origin | (
        {"note": f"the origin of {num_missing} of {len(every)} runs is not recorded"} if num_missing else {}
    )


def _write_atomically(file: Path, text: str) -> None:
    """Write a file atomically."""
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def _read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file. Returns {} if it is missing or incomplete."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


# ---- the table --------------------------------------------------------------------------------------------------


class SweepRow(NamedTuple):
    """One score of one variant over its seeds. `test` is the name of the test, or of the validated stage.

    Baselines and intervals over the items of a test are those of the suite; validation scores have none.
    """

    variant: str
    test: str
    score: str
    values: dict[int, float]  # seed → value
    baselines: dict[str, float] = {}  # best of the seeds' baselines, which differ only if their items do
    item_intervals: dict[int, tuple[float, float]] = {}  # seed → interval over the items

    @property
    def mean(self) -> float:
        return mean(self.values.values())

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean over seeds (Student's t); None for a single seed."""
        if len(self.values) < 2:
            return None
        half = compute_half_width(list(self.values.values()))
        return self.mean - half, self.mean + half

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "mean": self.mean, "interval": self.interval}


def build_table(sweep: Sweep, out: Path) -> list[SweepRow]:
    """Build the table of all scores that exist so far."""
    rows: dict[tuple[str, str, str], SweepRow] = {}

    def get_row(run: SweepRun, test: str, score: str) -> SweepRow:
        return rows.setdefault((run.variant.name, test, score), SweepRow(run.variant.name, test, score, {}, {}, {}))

    for run in list_runs(sweep, out):
        for test in sweep.tests:
            for name, score in _read_scores(run.folder / "tests" / f"{_slugify(test)}.json"):
                row = get_row(run, test, name)
                row.values[run.seed] = score["value"]
                if "interval" in score:
                    row.item_intervals[run.seed] = tuple(score["interval"])
                for baseline, value in score.get("baselines", {}).items():
                    row.baselines[baseline] = max(value, row.baselines.get(baseline, value))
        for stage in sweep.load_recipe(run.variant, run.seed).stages:
            for name, value in _read_validation_scores(run.folder / stage.name / "log.jsonl", stage.steps):
                get_row(run, stage.name, name).values[run.seed] = value
    order = {variant.name: n for n, variant in enumerate(sweep.variants)}
    return sorted(rows.values(), key=lambda row: order[row.variant])


def _read_scores(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Read the scores of a test: name, with the subset, and the score as JSON."""
    for score in _read_json(file).get("scores", ()):
        part: Mapping[str, Any] = score.get("subset", {})
        yield ", ".join([score["name"].strip(), *(f"{key} {value}" for key, value in part.items())]), score


def _read_validation_scores(log: Path, steps: int) -> Iterator[tuple[str, float]]:
    """Read the validation scores after the last step of a stage."""
    last = log.read_text().splitlines()[-1:] if log.is_file() else []
    row = json.loads(last[0]) if last else {}
    if row.get("step") == steps:
        yield from ((key, value) for key, value in row.items() if key.startswith("validation/"))


def _slugify(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
