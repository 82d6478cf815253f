"""The token-scaling paper's protocol in miniature: one base, and behind it numbers of visual tokens compared, with the
question and without, its language model frozen.

    base      a vision-language model that reads all patches; reductions that need no training are tested on it
    queries   as many queries as are ever asked for: fused with the question, never told it, and a plain Q-Former's
    runs      the first n queries of each of these three, trained on, from each seed

All three are sweeps, so that the same call goes on after any death. They lie in a folder that is named after the
recipes: others start anew.
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

from vitrail import hub, sweep
from vitrail import recipe as recipes
from vitrail.data.named import NamedConfig, NamedSource
from vitrail.data.scenes.library import open_atlas
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.devices import usable
from vitrail.errors import ConfigError, DataError
from vitrail.hub.based import checksum
from vitrail.lab.contrasts import Point
from vitrail.lab.cut import cut
from vitrail.lab.exact import NAMING, Exam, look_of, untold
from vitrail.lab.ledger import ledger
from vitrail.lab.reduced import REDUCTIONS, reduced_look
from vitrail.models.vlm import VLM
from vitrail.models.vlm_config import VLMConfig
from vitrail.sweep import Sweep, Variant
from vitrail.token_design import Design, apart

Phase = Literal["base", "queries", "runs"]
PHASES: tuple[Phase, ...] = ("base", "queries", "runs")

# How a picture's tokens are made; the last three are no models of their own.
WAYS = TOLD, ALONE, QFORMER = "with question", "without question", "Q-Former"
WITHHELD, ANOTHER, PATCHES = "question withheld", "another question", "all patches"
OWN = "own"  # a test of a model as it is
CUT_FROM = "cut-from.txt"  # in a start: which weights it was cut from
UNSEEN, UNSEEN_NAMED = "unseen", "unseen-named"  # sources of a recipe that models are tested on


class Experiment:
    def __init__(self, design: Design, out: Path, device: str | None = None):
        self.design, self.device = design, usable(device)
        names = {"base": design.base, "queries": design.queries}
        plain = {which: recipes.read(name) for which, name in names.items()}
        self.changes = apart(design.changes, plain)
        # Copies wherever they are read: what is laid over a table that was laid before changes that table.
        self.base, self.recipe = (recipes.read(names[which], deepcopy(laid)) for which, laid in self.changes.items())
        self.parts = plain["queries"].model.parts  # what of the base the queries begin with
        self.settings: Any = self.recipe.settings(-1)
        if self.recipe.model.config is None or self.recipe.model.config.get("queries") is None:
            raise ConfigError(f"{design.queries} has no model.config.queries", "give a recipe that trains fused ones")
        for name, kind in ((UNSEEN, ScenesConfig), (UNSEEN_NAMED, NamedConfig)):
            if not isinstance(self.recipe.sources.get(name), kind):
                raise ConfigError(f"{design.queries} has no source {name!r} to test on", "add it")
        made_of = json.dumps([self.base.plain(), self.recipe.plain(), design.tokens[-1]], sort_keys=True)
        self.folder = out / hashlib.sha256(made_of.encode()).hexdigest()[:8]
        self._sweeps: dict[Phase, Sweep] = {}
        self._planned: dict[Phase, list[sweep.Run]] = {}
        self._is_cut = False

    # ---- sweeps -------------------------------------------------------------------------------------------------

    def sweep_of(self, phase: Phase) -> Sweep:
        if phase not in self._sweeps:
            self._sweeps[phase] = {"base": self._base, "queries": self._queries, "runs": self._runs}[phase]()
        return self._sweeps[phase]

    def planned(self, phase: Phase) -> list[sweep.Run]:
        if phase not in self._planned:
            self._planned[phase] = sweep.runs(self.sweep_of(phase), self.folder / phase)
        return self._planned[phase]

    def _base(self) -> Sweep:
        config = self.base.model_config()
        assert isinstance(config, VLMConfig)
        patches = config.given(config.policy.cut(1, 1))
        few = [n for n in self.design.tokens if n <= patches]
        ways = [(way, n) for way in REDUCTIONS for n in few] + [(OWN, patches)]
        return Sweep(
            name="scaling-base",
            says=self.base.says,
            recipe=self.design.base,
            seeds=(self.base.seed,),
            changes=deepcopy(self.changes["base"]),
            variants=(Variant(name=PATCHES),),
            tests={f"{way} {n}": self._words(way, n) for way, n in ways},
        )

    def _queries(self) -> Sweep:
        base, most = str(self.end("base")), self.design.tokens[-1]
        config = self.recipe.model_config()
        assert isinstance(config, VLMConfig) and config.queries is not None
        parts = {name: {"start": base, "part": one.part} for name, one in self.parts.items()}
        fused = config.queries.with_(first=most)
        queries = {  # whole tables, so that neither is laid over one that both share
            way: {"model.parts": parts, "model.config.queries": fused.with_(question=question).plain()}
            for way, question in ((TOLD, "always"), (ALONE, "never"))
        }
        alike = {name: getattr(fused, name) for name in ("gives", "layers", "width", "heads", "hidden")}
        plain = {"kind": "qformer", "reads": config.width, "queries": most, **alike}
        qformer = {"model.config.connector": plain, "model.config.queries": None, "stages.0.train": ["connector"]}
        qformer["model.parts"] = {name: one for name, one in parts.items() if name in ("tower", "decoder")}
        return Sweep(
            name="scaling-queries",
            says=self.recipe.says,
            recipe=self.design.queries,
            seeds=(self.recipe.seed,),
            changes=deepcopy(self.changes["queries"]) | {"tokenizer": {"start": base}},
            variants=(
                *(Variant(name=way, changes=changes) for way, changes in queries.items()),
                Variant(name=QFORMER, changes=qformer),
            ),
        )

    def _runs(self) -> Sweep:
        steps, tokens = self.design.steps, self.design.tokens
        plain = self.recipe.plain()
        shown = {name: plain["sources"][name] for name in self.recipe.stages[0].mixture.weights}
        how = {"stages.0.steps": steps, "stages.0.save_every": steps, "sources": shown}
        how |= {"stages.0.schedule": {"kind": "cosine", "warmup": steps // 10}}
        variants = []
        for n in reversed(tokens):  # by their cost, so that jobs side by side share it evenly
            for way in WAYS:
                start = {"model": {"kind": "vlm", "start": str(self.start(way, n))}}
                train = {"stages.0.train": ["connector"]} if way == QFORMER else {}
                variants.append(Variant(name=f"{way} {n}", changes=start | train))
        return Sweep(
            name="scaling-runs",
            says=self.recipe.says,
            recipe=self.design.queries,
            seeds=self.design.seeds,
            changes=deepcopy(self.changes["queries"]) | {"tokenizer": {"start": str(self.end("base"))}} | how,
            variants=tuple(variants),
            tests={way: self._words(way) for way in (OWN, WITHHELD, ANOTHER)},
        )

    def end(self, phase: Phase, place: int = 0) -> Path:
        """Where the model of the phase's first variant, or another, lies."""
        return self.planned(phase)[place].folder / "final"

    def _words(self, way: str, tokens: int = 0) -> tuple[str, ...]:
        """What a test is asked: other words make it another test, which is done anew."""
        return way, str(tokens), str(self.design.count), *self.settings.kinds

    def flops(self, phase: Phase) -> int:
        """Of all runs of a phase, all parts learning: each sample a picture, and as many words as there is room for. A
        Q-Former is taken for queries that are fused with nothing, as deep and wide."""
        config: Any = (self.base if phase == "base" else self.recipe).model_config()
        most, each = self.design.tokens[-1], Counter[int]()
        for run in self.planned(phase):
            each[int(run.variant.name.rsplit(" ", 1)[1]) if phase == "runs" else most] += 1
        total = 0
        for tokens, runs in each.items():
            made = config if phase == "base" else config.with_(queries=config.queries.with_(first=tokens))
            total += runs * ledger(made, context=self.settings.length, devices=(), lengths=()).train
        return total * self.samples(phase)

    def samples(self, phase: Phase) -> int:
        """That each run of a phase is trained on."""
        run = self.planned(phase)[0]
        stages = self.sweep_of(phase).read_recipe(run.variant, run.seed).stages
        return sum(stage.steps * stage.batch for stage in stages)

    # ---- starts -------------------------------------------------------------------------------------------------

    def start(self, way: str, tokens: int) -> Path:
        return self.folder / "starts" / f"{way} {tokens}".replace(" ", "-").lower()

    def cut(self) -> None:
        """Write what the runs start from: the first queries of the three models that have all of them. What was cut
        from other weights is cut again."""
        if self._is_cut:
            return
        for place, way in enumerate(WAYS):
            folder, model = self.end("queries", place), None
            weights = checksum(folder)
            for tokens in self.design.tokens:
                start = self.start(way, tokens)
                mark = start / CUT_FROM
                if mark.is_file() and mark.read_text() == weights:
                    continue
                model = hub.load(folder, dtype=torch.float32) if model is None else model
                partial = start.with_name(f".partial-{start.name}")
                shutil.rmtree(partial, ignore_errors=True)
                hub.save(cut(model, tokens), partial, hub.tokenizer(folder))
                (partial / CUT_FROM).write_text(weights)
                shutil.rmtree(start, ignore_errors=True)
                partial.rename(start)
        self._is_cut = True

    # ---- running ------------------------------------------------------------------------------------------------

    def do(self, phase: Phase, run: sweep.Run) -> None:
        """Train and test a run, or what is left of it."""
        if phase == "runs":
            self.cut()
        sweep.do(self.sweep_of(phase), run, self.test, device=self.device)

    @cached_property
    def exam(self) -> Exam:
        scenes, named = self.recipe.sources[UNSEEN], self.recipe.sources[UNSEEN_NAMED]
        assert isinstance(scenes, ScenesConfig) and isinstance(named, NamedConfig)
        return Exam(
            SceneSource(scenes, open_atlas(scenes.atlas), UNSEEN),
            self.settings.kinds,
            hub.tokenizer(self.end("base")),
            count=self.design.count,
            length=self.settings.length,
            named=NamedSource(named, UNSEEN_NAMED),
            device=self.device,
        )

    def test(self, folder: Path, words: tuple[str, ...], file: Path) -> None:
        """What `sweep.do` asks of a model."""
        way, tokens = words[0], int(words[1])
        dtype = torch.bfloat16 if self.device.startswith("cuda") else torch.float32
        model: VLM = hub.load(folder, dtype=dtype, device=self.device).eval()
        reads = model.queries is not None and model.queries.reads_questions
        if way in REDUCTIONS:
            scores = self.exam.scores(model, reduced_look(model, way, tokens))
        elif way == OWN:
            scores = self.exam.scores(model, look_of(model))
        elif not reads:  # whatever it is told
            scores = []
        elif way == WITHHELD:
            scores = self.exam.scores(model, untold(look_of(model)))
        else:
            scores = self.exam.scores(model, look_of(model), turn=1)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"scores": [score.plain for score in scores]}, ensure_ascii=False))

    # ---- results ------------------------------------------------------------------------------------------------

    def points(self, phases: Sequence[Phase] = ("runs", "base")) -> list[Point]:
        """All scores. A planned run that lacks a test, or a test that lacks a kind, is an error."""
        kinds, found, missing = {*self.settings.kinds, NAMING}, [], []
        for phase in phases:
            for run in self.planned(phase):
                tested = _tested(run.folder / "tests")
                for test, words in self.sweep_of(phase).tests.items():
                    way, tokens = _way(run.variant.name if phase == "runs" else test, test)
                    untold = way in (WITHHELD, ANOTHER) and not run.variant.name.startswith(TOLD)
                    scores = tested.get(words, [])
                    if {score["name"] for score in scores} != (set() if untold else kinds):
                        missing.append(f"{run.name}: {test}")
                    where: dict[str, Any] = {"way": way, "tokens": tokens, "seed": run.seed}
                    found += [_point(score, where) for score in scores]
        if missing:
            raise DataError(
                f"{len(missing)} planned tests are missing or not whole, the first is {missing[0]!r}",
                "start the command again: it does what is left",
            )
        return found

    def check_base(self, kinds: Sequence[str]) -> None:
        """Refuse a base that sees no more than a guess: what is put on it could show nothing."""
        own = {point.kind: point for point in self.points(["base"]) if point.way == PATCHES}
        low = [point for kind, point in own.items() if kind in kinds and point.share.interval[0] <= point.blind]
        if low:
            said = "; ".join(f"{point.kind} {point.share}, {point.blind:.1%} without looking" for point in low)
            raise DataError(
                f"the base is not told from a guess: {said}",
                "train it longer or on more (base.stages.1.steps=…), ask more (--count), or go on with --anyway",
            )


def _point(score: dict[str, Any], where: dict[str, Any]) -> Point:
    blind = score["beside"].get("blind", 0.0)
    return Point(kind=score["name"], value=score["value"], of=score["of"], blind=blind, **where)


def _tested(folder: Path) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """What was asked → the scores."""
    found = {}
    for file in folder.glob("*.json"):
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:  # a part of one
            continue
        if "asked" in data:
            found[tuple(data["asked"])] = data["scores"]
    return found


def _way(name: str, test: str) -> tuple[str, int]:
    way, tokens = name.rsplit(" ", 1)
    way = PATCHES if way == OWN else test if test in (WITHHELD, ANOTHER) else way
    return way, int(tokens)
