"""Small versions of every recipe, sweep and documented variant of vision-language models."""

import shlex
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

from vitrail import recipe
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.processing.tokenizer import Tokenizer
from vitrail.recipe import sweep as sweeps
from vitrail.tasks.vlm_task import PREPARED_PREFIX, VLMSettings, VLMTask
from vitrail.training.stage_config import set_trainable_parts
from vitrail.training.task import Batch

DOCS = Path(__file__).parents[2] / "docs" / "vlm-training.md"
KINDS = ("existence_random", "colour", "counting", "what")
# Replacement of every number in the recipes, by key.
SMALL = {
    "width": {256: 16, 288: 32},
    "in_features": {256: 16, 512: 32, 288: 32},
    "out_features": {288: 32, 256: 16},
    "intermediate_size": {1024: 24, 768: 24},
    "heads": {4: 2, 6: 2},
    "kv_heads": {6: 2},
    "head_dim": {48: 16},
    "layers": {8: 1, 6: 1, 4: 1},
    "vocab_size": {32000: 420},
    "image_size": {64: 16},
    "size": {64: 16},
    "patch_size": {8: 4},
    "num_queries": {64: 16},
    "num_latents": {64: 16},
    "first_queries": {64: 16},
    "fill_id": {0: 1},
    "image_token_id": {0: 1},
}


def shrunk(node, key=""):
    if isinstance(node, dict):
        return {k: shrunk(v, k) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [0] if key in ("layer_indices", "stack_layers") else [shrunk(v) for v in node]
    known = SMALL.get(key, {})
    return known.get(node, node) if isinstance(node, int) and not isinstance(node, bool) else node


# Every variant of the sweeps, by name in these tests.
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
    "system-projector": ("systems", "projector"),
    "system-qformer": ("systems", "Q-Former"),
    "system-gated": ("systems", "gated"),
    "system-deepstack": ("systems", "DeepStack"),
    "system-fused": ("systems", "fused queries"),
    "system-merger": ("systems", "merger"),
    "system-resampler": ("systems", "resampler"),
    "system-expert": ("systems", "visual expert"),
    "system-voco": ("systems", "VoCo"),
    "system-experts": ("systems", "mixture of experts"),
    "system-before": ("systems", "before training"),
}


def arm(sweep: str, variant: str) -> recipe.Recipe:
    chosen = sweeps.load_sweep(sweep)
    [found] = [one for one in chosen.variants if one.name == variant]
    return chosen.load_recipe(found, 0)


def variants() -> dict[str, Callable[[], recipe.Recipe]]:
    """The recipes, the variants of the sweeps, and the documented variants."""
    names = ("mini-vlm-llava", "mini-vlm-prismatic", "mini-vlm-gated", "mini-vlm-short", "mini-vlm-qformer")
    found = {name: partial(recipe.load_recipe, f"untested/{name}") for name in names}
    found["mini-vlm"] = partial(recipe.load_recipe, "mini-vlm")
    found |= {name: partial(arm, *where) for name, where in ARMS.items()}
    section = DOCS.read_text().split("## Variants")[1].split("\n## ")[0]
    for command in section.split("vitrail train ")[1:]:
        name, _, out, *changes = shlex.split(command.split("\n")[0])
        found[out.removeprefix("out/")] = partial(
            recipe.load_recipe, name, dict(change.split("=", 1) for change in changes)
        )
    return found


VARIANTS = variants()


@cache
def small(name: str) -> recipe.Recipe:
    """A variant reduced to test size, with scenes only."""
    plain = VARIANTS[name]().to_dict()
    plain["model"] = shrunk(plain["model"]) | {"parts": {}}
    plain["tokenizer"] = {"vocab_size": 420, "special_tokens": ["<image>"]}
    plain["sources"] = {
        key: shrunk(source) | {"atlas": "-"} for key, source in plain["sources"].items() if key in ("scenes", "unseen")
    }
    for vendor, source in zip(("left", "right"), plain["sources"].values(), strict=False):
        source["scene"] = source["scene"] | {
            "vendors": [vendor],
            "things": [],
            "inside_probability": 0.0,
            "word_probability": 0.0,
        }
    for stage in plain["stages"]:
        questions = min(2, stage["settings"]["num_questions"])
        stage |= {"mixture": {"weights": {"scenes": 1}}, "steps": 2, "batch_size": 4, "schedule": {"kind": "constant"}}
        stage |= {
            "validate": [],
            "validate_every": 0,
            "validate_first": False,
            "dtype": "float32",
            "compile": False,
            "num_workers": 0,
        }
        turns = {"turns": "together"} if name == "vlm-talks" else {}  # queries that attend to earlier questions
        stage["settings"] = {"num_questions": questions, "question_kinds": KINDS, "max_length": 48} | turns
    return recipe.Recipe.from_dict(plain)


def scenes_of(chosen: recipe.Recipe, atlas: Atlas) -> SceneSource:
    config = chosen.sources["scenes"]
    assert isinstance(config, SceneSourceConfig)
    return SceneSource(config, atlas, "scenes")


def task_of(name: str, atlas: Atlas, words: Tokenizer, more=None, **settings) -> VLMTask:
    chosen = small(name)
    chosen_settings = chosen.task_settings(-1)
    assert isinstance(chosen_settings, VLMSettings)
    model = recipe.build_model(chosen, words)
    set_trainable_parts(model, chosen.stages[-1].trainable)
    return VLMTask(
        model, {"scenes": scenes_of(chosen, atlas)} | (more or {}), words, chosen_settings.replace(**settings)
    )


def made_of(task: VLMTask, batch: Batch) -> SimpleNamespace:
    """Prepared inputs of a batch by name, and the row template."""
    parts = {
        name.removeprefix(PREPARED_PREFIX): value
        for name, value in task.prepare_batch(batch).items()
        if name.startswith(PREPARED_PREFIX)
    }
    return SimpleNamespace(**{"question_ids": None, "turn_starts": None, "template": task.row_template} | parts)
