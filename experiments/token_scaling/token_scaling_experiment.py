"""Run the token-scaling experiment at small scale: compare numbers of visual tokens with a frozen language model.

Phases:
    base      a vision-language model over all patches; training-free reductions are tested on it
    queries   the maximum number of queries: conditioned on the question, not conditioned, and a plain Q-Former
    runs      the first n queries of each of these three, trained further, for each seed

All phases are sweeps, so that an interrupted experiment resumes. The output folder is named after a hash of the
recipes; changed recipes use another folder.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from experiments.token_scaling.contrasts import ScorePoint
from experiments.token_scaling.exact_match import NAMING, ExactMatchBenchmark, make_soft_token_fn, withhold_question
from experiments.token_scaling.patch_reduction import REDUCTIONS, make_reduced_soft_token_fn
from experiments.token_scaling.query_truncation import truncate_queries
from experiments.token_scaling.token_scaling_config import TokenScalingConfig, split_changes
from vitrail import hub
from vitrail import recipe as recipes
from vitrail.data.named_images import NamedImagesConfig, NamedImageSource
from vitrail.data.scenes.atlas_library import open_atlas
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.devices import resolve_device
from vitrail.errors import ConfigError, DataError
from vitrail.hub.delta_checkpoint import checksum_weights
from vitrail.lab.cost_ledger import compute_ledger
from vitrail.models.vlm import VLM
from vitrail.models.vlm_config import VLMConfig
from vitrail.recipe import sweep
from vitrail.recipe.sweep import Sweep, SweepVariant

Phase = Literal["base", "queries", "runs"]
PHASES: tuple[Phase, ...] = ("base", "queries", "runs")

# Ways of making visual tokens. The last three are tests of other models, not models.
METHODS = "with question", "without question", "Q-Former"
WITH_QUESTION, WITHOUT_QUESTION, Q_FORMER = METHODS
QUESTION_WITHHELD, ANOTHER_QUESTION, ALL_PATCHES = "question withheld", "another question", "all patches"
UNMODIFIED = "own"  # test of the unmodified model
SOURCE_FILE = "cut-from.txt"  # file in a start folder: checksum of the source weights
UNSEEN, UNSEEN_NAMED = "unseen", "unseen-named"  # test sources of a recipe


class TokenScalingExperiment:
    """Builds, runs and evaluates the sweeps of a token-scaling experiment."""

    def __init__(self, design: TokenScalingConfig, out: Path, device: str | None = None):
        self.design, self.device = design, resolve_device(device)
        names = {"base": design.base, "queries": design.queries}
        plain = {which: recipes.load_recipe(name) for which, name in names.items()}
        self.changes = split_changes(design.changes, plain)
        # Reading a recipe modifies nested tables of its changes: pass copies.
        self.base, self.recipe = (
            recipes.load_recipe(names[which], deepcopy(changed_keys)) for which, changed_keys in self.changes.items()
        )
        self.parts = plain["queries"].model.parts  # components of the base that the queries recipe starts from
        self.settings: Any = self.recipe.task_settings(-1)
        if self.recipe.model.config is None or self.recipe.model.config.get("queries") is None:
            raise ConfigError(
                f"{design.queries} has no model.config.queries", "use a recipe with question-conditioned queries"
            )
        for name, kind in ((UNSEEN, SceneSourceConfig), (UNSEEN_NAMED, NamedImagesConfig)):
            if not isinstance(self.recipe.sources.get(name), kind):
                raise ConfigError(f"{design.queries} has no test source {name!r}", "add the source to the recipe")
        made_of = json.dumps([self.base.to_dict(), self.recipe.to_dict(), design.tokens[-1]], sort_keys=True)
        self.folder = out / hashlib.sha256(made_of.encode()).hexdigest()[:8]
        self._sweeps_by_phase: dict[Phase, Sweep] = {}
        self._runs_by_phase: dict[Phase, list[sweep.SweepRun]] = {}
        self._has_starts = False

    # ---- sweeps -------------------------------------------------------------------------------------------------

    def get_sweep(self, phase: Phase) -> Sweep:
        if phase not in self._sweeps_by_phase:
            self._sweeps_by_phase[phase] = {
                "base": self._build_base_sweep,
                "queries": self._build_queries_sweep,
                "runs": self._build_runs_sweep,
            }[phase]()
        return self._sweeps_by_phase[phase]

    def list_runs(self, phase: Phase) -> list[sweep.SweepRun]:
        if phase not in self._runs_by_phase:
            self._runs_by_phase[phase] = sweep.list_runs(self.get_sweep(phase), self.folder / phase)
        return self._runs_by_phase[phase]

    def _build_base_sweep(self) -> Sweep:
        config = self.base.build_model_config()
        assert isinstance(config, VLMConfig)
        patches = config.count_connector_tokens(config.policy.layout(1, 1))
        few = [n for n in self.design.tokens if n <= patches]
        methods = [(method, n) for method in REDUCTIONS for n in few] + [(UNMODIFIED, patches)]
        return Sweep(
            name="scaling-base",
            description=self.base.description,
            recipe=self.design.base,
            seeds=(self.base.seed,),
            overrides=deepcopy(self.changes["base"]),
            variants=(SweepVariant(name=ALL_PATCHES),),
            tests={f"{method} {n}": self._make_test_key(method, n) for method, n in methods},
        )

    def _build_queries_sweep(self) -> Sweep:
        base, most = str(self.get_final_folder("base")), self.design.tokens[-1]
        config = self.recipe.build_model_config()
        assert isinstance(config, VLMConfig) and config.queries is not None
        parts = {name: {"checkpoint": base, "part": one.part} for name, one in self.parts.items()}
        fused = config.queries.replace(first_queries=most)
        queries = {  # complete tables, so that variants do not modify a shared one
            method: {"model.parts": parts, "model.config.queries": fused.replace(question_mode=question).to_dict()}
            for method, question in ((WITH_QUESTION, "always"), (WITHOUT_QUESTION, "never"))
        }
        same = ("out_features", "layers", "width", "heads", "intermediate_size")
        alike = {name: getattr(fused, name) for name in same}
        plain = {"kind": "qformer", "in_features": config.width, "num_queries": most, **alike}
        qformer = {"model.config.connector": plain, "model.config.queries": None, "stages.0.trainable": ["connector"]}
        qformer["model.parts"] = {name: one for name, one in parts.items() if name in ("tower", "decoder")}
        return Sweep(
            name="scaling-queries",
            description=self.recipe.description,
            recipe=self.design.queries,
            seeds=(self.recipe.seed,),
            overrides=deepcopy(self.changes["queries"]) | {"tokenizer": {"checkpoint": base}},
            variants=(
                *(SweepVariant(name=method, overrides=changes) for method, changes in queries.items()),
                SweepVariant(name=Q_FORMER, overrides=qformer),
            ),
        )

    def _build_runs_sweep(self) -> Sweep:
        steps, tokens = self.design.steps, self.design.tokens
        plain = self.recipe.to_dict()
        shown = {name: plain["sources"][name] for name in self.recipe.stages[0].mixture.weights}
        how = {"stages.0.steps": steps, "stages.0.save_every": steps, "sources": shown}
        how |= {"stages.0.schedule": {"kind": "cosine", "warmup_steps": steps // 10}}
        variants = []
        for n in reversed(tokens):  # most expensive first, to balance parallel jobs
            for method in METHODS:
                start = {"model": {"kind": "vlm", "checkpoint": str(self.get_start_folder(method, n))}}
                train = {"stages.0.trainable": ["connector"]} if method == Q_FORMER else {}
                variants.append(SweepVariant(name=f"{method} {n}", overrides=start | train))
        return Sweep(
            name="scaling-runs",
            description=self.recipe.description,
            recipe=self.design.queries,
            seeds=self.design.seeds,
            overrides=deepcopy(self.changes["queries"])
            | {"tokenizer": {"checkpoint": str(self.get_final_folder("base"))}}
            | how,
            variants=tuple(variants),
            tests={method: self._make_test_key(method) for method in (UNMODIFIED, QUESTION_WITHHELD, ANOTHER_QUESTION)},
        )

    def get_final_folder(self, phase: Phase, variant_index: int = 0) -> Path:
        """Return the folder of the final model of a variant of a phase."""
        return self.list_runs(phase)[variant_index].folder / "final"

    def _make_test_key(self, method: str, tokens: int = 0) -> tuple[str, ...]:
        """Return the key of a test. A test with another key runs again."""
        return method, str(tokens), str(self.design.num_questions), *self.settings.question_kinds

    def count_flops(self, phase: Phase) -> int:
        """Estimate the training FLOPs of all runs of a phase, with all parameters trainable and full-length samples.

        A Q-Former counts as unconditioned queries of the same depth and width.
        """
        config: Any = (self.base if phase == "base" else self.recipe).build_model_config()
        most, each = self.design.tokens[-1], Counter[int]()
        for run in self.list_runs(phase):
            each[int(run.variant.name.rsplit(" ", 1)[1]) if phase == "runs" else most] += 1
        total = 0
        for tokens, runs in each.items():
            made = config if phase == "base" else config.replace(queries=config.queries.replace(first_queries=tokens))
            total += (
                runs
                * compute_ledger(
                    made, context_length=self.settings.max_length, devices=(), context_lengths=()
                ).training_flops
            )
        return total * self.count_samples(phase)

    def count_samples(self, phase: Phase) -> int:
        """Count the training samples of each run of a phase."""
        run = self.list_runs(phase)[0]
        stages = self.get_sweep(phase).load_recipe(run.variant, run.seed).stages
        return sum(stage.steps * stage.batch_size for stage in stages)

    # ---- starts -------------------------------------------------------------------------------------------------

    def get_start_folder(self, method: str, tokens: int) -> Path:
        return self.folder / "starts" / f"{method} {tokens}".replace(" ", "-").lower()

    def write_starts(self) -> None:
        """Write the start models of the runs: the three query models, truncated to each number of queries.

        Starts from outdated weights are written again.
        """
        if self._has_starts:
            return
        for place, method in enumerate(METHODS):
            folder, model = self.get_final_folder("queries", place), None
            weights = checksum_weights(folder)
            for tokens in self.design.tokens:
                start = self.get_start_folder(method, tokens)
                mark = start / SOURCE_FILE
                if mark.is_file() and mark.read_text() == weights:
                    continue
                model = hub.load(folder, dtype=torch.float32) if model is None else model
                partial = start.with_name(f".partial-{start.name}")
                shutil.rmtree(partial, ignore_errors=True)
                hub.save(truncate_queries(model, tokens), partial, hub.load_tokenizer(folder))
                (partial / SOURCE_FILE).write_text(weights)
                shutil.rmtree(start, ignore_errors=True)
                partial.rename(start)
        self._has_starts = True

    # ---- running ------------------------------------------------------------------------------------------------

    def execute_run(self, phase: Phase, run: sweep.SweepRun) -> None:
        """Train and test a run, or resume it."""
        if phase == "runs":
            self.write_starts()
        sweep.execute_run(self.get_sweep(phase), run, self.evaluate_model, device=self.device)

    @cached_property
    def benchmark(self) -> ExactMatchBenchmark:
        scenes, named = self.recipe.sources[UNSEEN], self.recipe.sources[UNSEEN_NAMED]
        assert isinstance(scenes, SceneSourceConfig) and isinstance(named, NamedImagesConfig)
        return ExactMatchBenchmark(
            SceneSource(scenes, open_atlas(scenes.atlas), UNSEEN),
            self.settings.question_kinds,
            hub.load_tokenizer(self.get_final_folder("base")),
            count=self.design.num_questions,
            max_length=self.settings.max_length,
            named=NamedImageSource(named, UNSEEN_NAMED),
            device=self.device,
        )

    def evaluate_model(self, folder: Path, test_key: tuple[str, ...], file: Path) -> None:
        """Test a model and write its scores; called by the sweep."""
        method, tokens = test_key[0], int(test_key[1])
        dtype = torch.bfloat16 if self.device.startswith("cuda") else torch.float32
        model: VLM = hub.load(folder, dtype=dtype, device=self.device).eval()
        takes_question = model.queries is not None and model.queries.uses_questions
        if method in REDUCTIONS:
            scores = self.benchmark.evaluate(model, make_reduced_soft_token_fn(model, method, tokens))
        elif method == UNMODIFIED:
            scores = self.benchmark.evaluate(model, make_soft_token_fn(model))
        elif not takes_question:  # the model ignores the question
            scores = []
        elif method == QUESTION_WITHHELD:
            scores = self.benchmark.evaluate(model, withhold_question(make_soft_token_fn(model)))
        else:
            scores = self.benchmark.evaluate(model, make_soft_token_fn(model), question_shift=1)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"scores": [score.as_dict for score in scores]}, ensure_ascii=False))

    # ---- results ------------------------------------------------------------------------------------------------

    def load_points(self, phases: Sequence[Phase] = ("runs", "base")) -> list[ScorePoint]:
        """Load all scores. Raises a DataError if a run lacks a test, or a test lacks a kind."""
        kinds, found, missing = {*self.settings.question_kinds, NAMING}, [], []
        for phase in phases:
            for run in self.list_runs(phase):
                tested = _read_tests(run.folder / "tests")
                for test, words in self.get_sweep(phase).tests.items():
                    method, tokens = _parse_method(run.variant.name if phase == "runs" else test, test)
                    untold = method in (QUESTION_WITHHELD, ANOTHER_QUESTION) and not run.variant.name.startswith(
                        WITH_QUESTION
                    )
                    scores = tested.get(words, [])
                    if {score["name"] for score in scores} != (set() if untold else kinds):
                        missing.append(f"{run.name}: {test}")
                    where: dict[str, Any] = {"method": method, "tokens": tokens, "seed": run.seed}
                    found += [_make_point(score, where) for score in scores]
        if missing:
            raise DataError(
                f"{len(missing)} planned tests are missing or incomplete, the first is {missing[0]!r}",
                "run the command again to resume",
            )
        return found

    def check_base(self, kinds: Sequence[str]) -> None:
        """Reject a base model that is not above the blind score on every kind."""
        own = {point.kind: point for point in self.load_points(["base"]) if point.method == ALL_PATCHES}
        low = [point for kind, point in own.items() if kind in kinds and point.accuracy.interval[0] <= point.blind]
        if low:
            scores = "; ".join(f"{point.kind} {point.accuracy}, blind {point.blind:.1%}" for point in low)
            raise DataError(
                f"the base model is not better than a blind guess: {scores}",
                "train it longer (base.stages.1.steps=…), use more questions (--count), or continue with --anyway",
            )


def _make_point(score: dict[str, Any], where: dict[str, Any]) -> ScorePoint:
    blind = score["baselines"].get("blind", 0.0)
    return ScorePoint(kind=score["name"], value=score["value"], count=score["count"], blind=blind, **where)


def _read_tests(folder: Path) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Read test files: test key → scores."""
    found = {}
    for file in folder.glob("*.json"):
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:  # incomplete file
            continue
        if "arguments" in data:
            found[tuple(data["arguments"])] = data["scores"]
    return found


def _parse_method(name: str, test: str) -> tuple[str, int]:
    method, tokens = name.rsplit(" ", 1)
    method = ALL_PATCHES if method == UNMODIFIED else test if test in (QUESTION_WITHHELD, ANOTHER_QUESTION) else method
    return method, int(tokens)
