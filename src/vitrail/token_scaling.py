"""The token-scaling paper's protocol in miniature: one base, and behind it numbers of visual tokens compared, with the
question and without, its language model frozen.

    base      a vision-language model that reads all patches; reductions that need no training are tested on it
    queries   as many queries as are ever asked for, fused with the question; and a plain Q-Former with as many
    runs      the first n queries of these, trained on: with the question, without it, and the Q-Former; each seed

All three are sweeps, so that the same call goes on after any death. They lie in a folder that is named after the
recipes: others start anew.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail import hub, sweep
from vitrail import recipe as recipes
from vitrail.config import Config
from vitrail.data.named import NamedConfig, NamedSource
from vitrail.data.scenes.library import open_atlas
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.errors import ConfigError
from vitrail.lab.contrasts import Point
from vitrail.lab.cut import cut
from vitrail.lab.exact import Exam, look_of, untold
from vitrail.lab.reduced import REDUCTIONS, reduced_look
from vitrail.models.vlm import VLM
from vitrail.models.vlm_config import VLMConfig
from vitrail.sweep import Sweep, Variant

Phase = Literal["base", "queries", "runs"]
PHASES: tuple[Phase, ...] = ("base", "queries", "runs")

# How a picture's tokens are made; the last four are no models of their own.
TOLD, ALONE, QFORMER = "with question", "without question", "Q-Former"
WITHHELD, ANOTHER, PATCHES = "question withheld", "another question", "all patches"
OWN = "own"  # a test of a model as it is
ASKED = "asked.json"
UNSEEN, UNSEEN_NAMED = "unseen", "unseen-named"  # sources of a recipe that models are tested on


class Design(Config):
    """`base` and `queries` are recipes, and `changes` are laid over whichever has the key. Every run has `steps` steps
    behind the queries', and is asked `count` questions of each kind that those were trained on."""

    base: str = "untested/scaling-base"
    queries: str = "untested/scaling-queries"
    tokens: tuple[int, ...] = (1, 8, 16, 32, 64, 128)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 200
    count: int = 1000
    changes: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if len(set(self.tokens)) < 3 or list(self.tokens) != sorted(set(self.tokens)) or self.tokens[0] < 1:
            raise ConfigError(f"numbers of tokens {self.tokens}", "give three or more, ascending, from 1 on")
        if not self.seeds or self.steps < 2 or self.count < 1:
            raise ConfigError(
                f"{len(self.seeds)} seeds, {self.steps} steps, {self.count} questions",
                "give a seed, two steps and a question at least",
            )
        if self.base == self.queries:
            raise ConfigError(f"{self.base} is the base, and what is put on it", "give two recipes")


class Experiment:
    def __init__(self, design: Design, out: Path, device: str | None = None):
        self.design, self.device = design, device or ("cuda" if torch.cuda.is_available() else "cpu")
        plain = {name: recipes.read(name) for name in (design.base, design.queries)}
        known = {name: _keys(one) for name, one in plain.items()}
        if wrong := [key for key in design.changes if not any(key in keys for keys in known.values())]:
            raise ConfigError(f"neither {design.base} nor {design.queries} has {wrong[0]!r}", "see their files")
        self.changes = {name: {k: v for k, v in design.changes.items() if k in known[name]} for name in plain}
        # Copies wherever they are read: what is laid over a table that was laid before changes that table.
        self.base, self.recipe = (recipes.read(name, deepcopy(laid)) for name, laid in self.changes.items())
        self.parts = plain[design.queries].model.parts  # what of the base the queries begin with
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
            changes=deepcopy(self.changes[self.design.base]),
            variants=(Variant(name=PATCHES),),
            tests={f"{way} {n}": self._words(way, n) for way, n in ways},
        )

    def _queries(self) -> Sweep:
        base, most = str(self.end("base")), self.design.tokens[-1]
        config = self.recipe.model_config()
        assert isinstance(config, VLMConfig) and config.queries is not None
        parts = {name: {"start": base, "part": one.part} for name, one in self.parts.items()}
        fused = config.queries
        alike = {name: getattr(fused, name) for name in ("gives", "layers", "width", "heads", "hidden")}
        plain = {"kind": "qformer", "reads": config.width, "queries": most, **alike}
        qformer = {"model.config.connector": plain, "model.config.queries": None, "stages.0.train": ["connector"]}
        qformer["model.parts"] = {name: one for name, one in parts.items() if name in ("tower", "decoder")}
        return Sweep(
            name="scaling-queries",
            says=self.recipe.says,
            recipe=self.design.queries,
            seeds=(self.recipe.seed,),
            changes=deepcopy(self.changes[self.design.queries]) | {"tokenizer": {"start": base}},
            variants=(
                Variant(name=TOLD, changes={"model.parts": parts, "model.config.queries.first": most}),
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
            for way in (TOLD, ALONE, QFORMER):
                start = {"model": {"kind": "vlm", "start": str(self.start(way, n))}}
                train = {"stages.0.train": ["connector"]} if way == QFORMER else {}
                variants.append(Variant(name=f"{way} {n}", changes=start | train))
        return Sweep(
            name="scaling-runs",
            says=self.recipe.says,
            recipe=self.design.queries,
            seeds=self.design.seeds,
            changes=deepcopy(self.changes[self.design.queries]) | {"tokenizer": {"start": str(self.end("base"))}} | how,
            variants=tuple(variants),
            tests={way: self._words(way) for way in (OWN, WITHHELD, ANOTHER)},
        )

    def end(self, phase: Phase, place: int = 0) -> Path:
        """Where the model of the phase's first variant, or another, lies."""
        return self.planned(phase)[place].folder / "final"

    def _words(self, way: str, tokens: int = 0) -> tuple[str, ...]:
        """What a test is asked: other words make it another test, which is done anew."""
        return way, str(tokens), str(self.design.count), *self.settings.kinds

    # ---- starts -------------------------------------------------------------------------------------------------

    def start(self, way: str, tokens: int) -> Path:
        return self.folder / "starts" / f"{way} {tokens}".replace(" ", "-").lower()

    def cut(self) -> None:
        """Write what the runs start from: the first queries of the two models that have all of them."""
        for place, ways in enumerate(((TOLD, ALONE), (QFORMER,))):
            folder, model = self.end("queries", place), None
            for way, tokens in ((way, tokens) for way in ways for tokens in self.design.tokens):
                start = self.start(way, tokens)
                if start.is_dir():
                    continue
                model = hub.load(folder, dtype=torch.float32) if model is None else model
                partial = start.with_name(f".partial-{start.name}")
                shutil.rmtree(partial, ignore_errors=True)
                hub.save(cut(model, tokens, question=way == TOLD), partial, hub.tokenizer(folder))
                partial.rename(start)

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
        made = Exam(
            SceneSource(scenes, open_atlas(scenes.atlas), UNSEEN),
            self.settings.kinds,
            hub.tokenizer(self.end("base")),
            count=self.design.count,
            length=self.settings.length,
            named=NamedSource(named, UNSEEN_NAMED),
            device=self.device,
        )
        about = {kind: {"of": len(sheet.ids), **made.beside.get(kind, {})} for kind, sheet in made.sheets.items()}
        partial = self.folder / f".partial-{os.getpid()}"  # others beside this one write the same
        partial.write_text(json.dumps(about))
        partial.replace(self.folder / ASKED)
        return made

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

    def points(self) -> list[Point]:
        """All scores that there are so far."""
        known, found = self.questions(), []
        for phase in ("runs", "base"):
            for row in sweep.table(self.sweep_of(phase), self.folder / phase):
                if row.score not in known:  # what a stage was judged by
                    continue
                way, tokens = _way(row.variant if phase == "runs" else row.test, row.test)
                more: dict[str, Any] = {"kind": row.score, "of": int(known[row.score]["of"])}
                found += [Point(way=way, tokens=tokens, seed=seed, value=v, **more) for seed, v in row.values.items()]
        return found

    def questions(self) -> dict[str, dict[str, float]]:
        """Kind → how many were asked of it, and what can be had of them without looking."""
        file = self.folder / ASKED
        return json.loads(file.read_text()) if file.is_file() else {}


def _way(name: str, test: str) -> tuple[str, int]:
    way, tokens = name.rsplit(" ", 1)
    way = PATCHES if way == OWN else test if test in (WITHHELD, ANOTHER) else way
    return way, int(tokens)


def _keys(recipe: recipes.Recipe) -> set[str]:
    """All dotted keys of a recipe, defaults included."""

    def under(node: Any, path: str) -> Iterator[str]:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
        for key, value in items:
            yield f"{path}{key}"
            yield from under(value, f"{path}{key}.")

    return set(under(recipe.plain(), ""))
