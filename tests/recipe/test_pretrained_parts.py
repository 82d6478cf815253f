"""Parts that start from the checkpoint of another recipe match its shapes. Checked without training or weights."""

import shlex
from functools import cache
from pathlib import Path

import pytest
import torch

from vitrail import hub, recipe
from vitrail.data.scenes.scene_source import SceneSourceConfig
from vitrail.recipe import Recipe, sweep
from vitrail.registry import MODELS

FOLDERS = dict.fromkeys(
    ("bsq-vit-scenes", "bsq-vit-bare"), "qlip-drawn"
)  # of one recipe with changes that keep its shapes


def chosen() -> dict[str, Recipe]:
    folder = recipe.recipe_folder()
    found = {
        path.stem: recipe.load_recipe(path)
        for path in sorted((*folder.glob("*.toml"), *folder.glob("untested/*.toml")))
    }
    for path in sorted(folder.glob("sweeps/*.toml")):
        read = sweep.load_sweep(path.stem)
        found |= {f"{path.stem}/{variant.name}": read.load_recipe(variant, 0) for variant in read.variants}
    return found


def starts(read: Recipe) -> dict:
    return {name: part for name, part in read.model.parts.items() if part.checkpoint.startswith("out/")}


RECIPES = {name: read for name, read in chosen().items() if starts(read)}


@cache
def trained(start: str) -> torch.nn.Module:
    """Build the model that a recipe saves, on the meta device."""
    name = Path(start).parent.name
    name = FOLDERS.get(name, name)
    there = (recipe.recipe_folder() / f"{name}.toml").is_file()
    read = recipe.load_recipe(name if there else f"untested/{name}")
    with torch.device("meta"):
        model = MODELS[read.model.kind](read.build_model_config())
        return getattr(model, "final_model", model)


@pytest.mark.parametrize("name", RECIPES)
def test_parts_match_initial_checkpoints(name, monkeypatch):
    monkeypatch.setattr(hub, "load", lambda start, dtype: trained(start))
    read = RECIPES[name]
    with torch.device("meta"):
        model = MODELS[read.model.kind](read.build_model_config())
    for part, other in starts(read).items():
        recipe.load_pretrained_part(model, part, other)


def test_mini_training_excludes_test_questions():
    """No training source uses the designs or seeds of the test questions or of the validation sources.

    Every batch has fixed counts of each source, and all images have the size of the codec."""
    read = recipe.load_recipe("mini")
    assert {source.image_size for source in read.sources.values() if isinstance(source, SceneSourceConfig)} == {
        hub.load("mini").codec.image_size[0]
    }
    for number, stage in enumerate(read.stages):
        weights = stage.mixture.weights
        assert stage.batch_size % sum(weights.values()) == 0 and not set(stage.validate) & set(weights)
        assert not any("twemoji" in getattr(read.sources[name], "datasets", ()) for name in weights)
        scenes = [read.sources[name] for name in weights if isinstance(read.sources[name], SceneSourceConfig)]
        seeds = [source.seed for source in scenes]
        assert len(set(seeds)) == len(seeds) and 7171 not in seeds
        for source in scenes:
            assert source.atlas != "emoji" or set(source.scene_config().vendors) == {"noto", "fluent", "openmoji"}
        if number:  # later stages pad rows to multiples
            settings = read.task_settings(number)
            assert all((1 + 12 * 12 + length) % 16 == 0 for length in (settings.max_length, settings.max_prompt_length))


def test_pretrained_queries_match_second_stage(monkeypatch):
    """Follow the comment at the top of scaling-fuse.toml."""
    head = (recipe.recipe_folder() / "untested" / "scaling-fuse.toml").read_text().split("\nname")[0].replace("#", "")
    changes = shlex.split(head.split("--out out/scaling-queries")[1].replace("\\\n", " "))
    read = recipe.load_recipe("scaling-queries", dict(change.split("=", 1) for change in changes))
    assert [part.checkpoint for part in read.model.parts.values()].count("out/scaling-fuse/final") == 3
    monkeypatch.setattr(hub, "load", lambda start, dtype: trained(start))
    with torch.device("meta"):
        model = MODELS[read.model.kind](read.build_model_config())
    assert list(read.model.parts)[-1] == "queries"  # applied after the weights of its layers
    for part, other in read.model.parts.items():
        recipe.load_pretrained_part(model, part, other)
