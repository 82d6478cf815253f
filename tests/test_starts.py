"""Every part that starts from what another recipe trains finds its weights there, shape by shape: found out before the
first of them is trained, and without a weight."""

import shlex
from functools import cache
from pathlib import Path

import pytest
import torch

from vitrail import hub, recipe, sweep
from vitrail.data.scenes.source import ScenesConfig
from vitrail.recipe import MODELS, Recipe

FOLDERS = dict.fromkeys(
    ("bsq-vit-scenes", "bsq-vit-bare"), "qlip-drawn"
)  # of one recipe with changes that leave its shapes alone


def chosen() -> dict[str, Recipe]:
    folder = recipe.folder()
    found = {path.stem: recipe.read(path) for path in sorted((*folder.glob("*.toml"), *folder.glob("untested/*.toml")))}
    for path in sorted(folder.glob("sweeps/*.toml")):
        read = sweep.read(path.stem)
        found |= {f"{path.stem}/{variant.name}": read.read_recipe(variant, 0) for variant in read.variants}
    return found


def starts(read: Recipe) -> dict:
    return {name: part for name, part in read.model.parts.items() if part.start.startswith("out/")}


RECIPES = {name: read for name, read in chosen().items() if starts(read)}


@cache
def trained(start: str) -> torch.nn.Module:
    """What the recipe leaves in its folder, on no device."""
    name = Path(start).parent.name
    name = FOLDERS.get(name, name)
    there = (recipe.folder() / f"{name}.toml").is_file()
    read = recipe.read(name if there else f"untested/{name}")
    with torch.device("meta"):
        model = MODELS[read.model.kind][1](read.model_config())
        return getattr(model, "product", model)


@pytest.mark.parametrize("name", RECIPES)
def test_parts_fit_what_they_start_from(name, monkeypatch):
    monkeypatch.setattr(hub, "load", lambda start, dtype: trained(start))
    read = RECIPES[name]
    with torch.device("meta"):
        model = MODELS[read.model.kind][1](read.model_config())
    for part, other in starts(read).items():
        recipe._start(model, part, other)


def test_mini_learns_nothing_that_it_is_asked_about_afterwards():
    """No design and no seed of the questions is among what any stage learns from, what is judged is not learned, and
    every batch has as many of each source, all pictures as large as its codec's."""
    read = recipe.read("mini")
    assert {source.side for source in read.sources.values() if isinstance(source, ScenesConfig)} == {
        hub.load("mini").codec.size[0]
    }
    for number, stage in enumerate(read.stages):
        weights = stage.mixture.weights
        assert stage.batch % sum(weights.values()) == 0 and not set(stage.judge) & set(weights)
        assert not any("twemoji" in getattr(read.sources[name], "data", ()) for name in weights)
        scenes = [read.sources[name] for name in weights if isinstance(read.sources[name], ScenesConfig)]
        seeds = [source.seed for source in scenes]
        assert len(set(seeds)) == len(seeds) and 7171 not in seeds
        for source in scenes:
            assert source.atlas != "emoji" or set(source.asked().vendors) == {"noto", "fluent", "openmoji"}
        if number:  # from the second on rows are of lengths that kernels like
            settings = read.settings(number)
            assert all((1 + 12 * 12 + length) % 16 == 0 for length in (settings.length, settings.prompt))


def test_queries_that_learned_answers_first_fit_the_second_stage(monkeypatch):
    """As the head of scaling-fuse.toml says it."""
    head = (recipe.folder() / "untested" / "scaling-fuse.toml").read_text().split("\nname")[0].replace("#", "")
    changes = shlex.split(head.split("--out out/scaling-queries")[1].replace("\\\n", " "))
    read = recipe.read("scaling-queries", dict(change.split("=", 1) for change in changes))
    assert [part.start for part in read.model.parts.values()].count("out/scaling-fuse/final") == 3
    monkeypatch.setattr(hub, "load", lambda start, dtype: trained(start))
    with torch.device("meta"):
        model = MODELS[read.model.kind][1](read.model_config())
    assert list(read.model.parts)[-1] == "queries"  # which goes over what its layers started from
    for part, other in read.model.parts.items():
        recipe._start(model, part, other)
