"""Every part that starts from what another recipe trains finds its weights there, shape by shape: found out before the
first of them is trained, and without a weight."""

from functools import cache
from pathlib import Path

import pytest
import torch

from vitrail import hub, recipe, sweep
from vitrail.recipe import MODELS, Recipe

FOLDERS = {"bsq-vit-scenes": "qlip-scenes"}  # of one recipe with changes that leave its shapes alone


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
