"""Every recipe, sweep and documented variant of a vision-language model, in numbers that a test can bear."""

import shlex
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch

from vitrail import recipe
from vitrail import sweep as sweeps
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.scenes.sprites import Atlas
from vitrail.processing.text import Tokenizer
from vitrail.tasks.vlm import MADE, VLMSettings, VLMTask
from vitrail.train.stage import choose_trainable
from vitrail.train.task import Batch

DOCS = Path(__file__).parents[2] / "docs" / "vlm.md"
KINDS = ("existence_random", "colour", "counting", "what")
# Every number of the recipes by the key it stands under, and what it is here.
SMALL = {
    "width": {256: 16, 288: 32},
    "reads": {256: 16, 512: 32, 288: 32},
    "gives": {288: 32, 256: 16},
    "hidden": {1024: 24, 768: 24},
    "heads": {4: 2, 6: 2},
    "kv_heads": {6: 2},
    "head_dim": {48: 16},
    "layers": {8: 1, 6: 1, 4: 1},
    "vocab": {32000: 420},
    "image": {64: 16},
    "size": {64: 16},
    "side": {64: 16},
    "patch": {8: 4},
    "queries": {64: 16},
    "first": {64: 16},
    "fill": {0: 1},
    "mark": {0: 1},
}


def shrunk(node, key=""):
    if isinstance(node, dict):
        return {k: shrunk(v, k) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [0] if key == "at" else [shrunk(v) for v in node]
    known = SMALL.get(key, {})
    return known.get(node, node) if isinstance(node, int) and not isinstance(node, bool) else node


# Every variant of the sweeps, by the name it has here.
ARMS = {
    "vlm-linear": ("vlm", "linear"),
    "vlm-mlp": ("vlm", "MLP"),
    "vlm-one-stage": ("vlm", "one stage"),
    "vlm-tuned": ("vlm", "tuned tower"),
    "vlm-codes": ("vlm", "codes"),
    "vlm-projector-1": ("vlm-queries", "projector"),
    "vlm-qformer": ("vlm-queries", "Q-Former"),
    "vlm-fused": ("vlm-queries", "fused"),
    "vlm-unread": ("vlm-queries", "fused, question unread"),
    "vlm-tower": ("vlm-towers", "one tower"),
    "vlm-towers": ("vlm-towers", "two towers"),
    "vlm-wide": ("vlm-fit", "naive"),
    "vlm-letterbox": ("vlm-fit", "letterbox"),
    "vlm-crop": ("vlm-fit", "crop"),
    "vlm-gates": ("vlm-gates", "trained"),
    "vlm-gates-none": ("vlm-gates", "language model"),
}


def arm(sweep: str, variant: str) -> recipe.Recipe:
    chosen = sweeps.read(sweep)
    [found] = [one for one in chosen.variants if one.name == variant]
    return chosen.read_recipe(found, 0)


def variants() -> dict[str, Callable[[], recipe.Recipe]]:
    """The recipes, the sweeps' variants, and what the docs have besides."""
    names = ("mini-vlm-llava", "mini-vlm-prismatic", "mini-vlm-gated", "mini-vlm-short", "mini-vlm-qformer")
    found = {name: partial(recipe.read, f"untested/{name}") for name in names}
    found["mini-vlm"] = partial(recipe.read, "mini-vlm")
    found |= {name: partial(arm, *where) for name, where in ARMS.items()}
    section = DOCS.read_text().split("### Variants")[1].split("\n### ")[0]
    for command in section.split("vitrail train ")[1:]:
        name, _, out, *changes = shlex.split(command.split("\n")[0])
        found[out.removeprefix("out/")] = partial(recipe.read, name, dict(change.split("=", 1) for change in changes))
    return found


VARIANTS = variants()


@cache
def small(name: str) -> recipe.Recipe:
    """A variant with numbers that a test can bear, and scenes alone."""
    plain = VARIANTS[name]().plain()
    plain["model"] = shrunk(plain["model"]) | {"parts": {}}
    plain["tokenizer"] = {"train": 420, "specials": ["<image>"]}
    plain["sources"] = {
        key: shrunk(source) | {"atlas": "-"} for key, source in plain["sources"].items() if key in ("scenes", "unseen")
    }
    for vendor, source in zip(("left", "right"), plain["sources"].values(), strict=False):
        source["scene"] = source["scene"] | {"vendors": [vendor], "names": [], "inside": 0.0, "word": 0.0}
    for stage in plain["stages"]:
        questions = min(2, stage["settings"]["questions"])
        stage |= {"mixture": {"weights": {"scenes": 1}}, "steps": 2, "batch": 4, "schedule": {"kind": "constant"}}
        stage |= {"judge": [], "judge_every": 0, "dtype": "float32", "compile": False, "workers": 0}
        turns = {"turns": "together"} if name == "vlm-talks" else {}  # whose queries know what was asked before
        stage["settings"] = {"questions": questions, "kinds": KINDS, "length": 48} | turns
    return recipe.Recipe.read(plain)


def scenes_of(chosen: recipe.Recipe, atlas: Atlas) -> SceneSource:
    config = chosen.sources["scenes"]
    assert isinstance(config, ScenesConfig)
    return SceneSource(config, atlas, "scenes")


def task_of(name: str, atlas: Atlas, words: Tokenizer, more=None, **settings) -> VLMTask:
    chosen = small(name)
    chosen_settings = chosen.settings(-1)
    assert isinstance(chosen_settings, VLMSettings)
    model = recipe._model(chosen, words)
    choose_trainable(model, chosen.stages[-1].train)
    return VLMTask(model, {"scenes": scenes_of(chosen, atlas)} | (more or {}), words, chosen_settings.with_(**settings))


def made_of(task: VLMTask, batch: Batch) -> SimpleNamespace:
    """What a pass takes of pictures, by its names, and the frame around it."""
    parts = {name.removeprefix(MADE): value for name, value in task.made(batch).items() if name.startswith(MADE)}
    return SimpleNamespace(**{"asked": None, "since": None, "frame": task.rows.frame(torch.device("cpu"))} | parts)
