"""Things by their names, and by the name of a group."""

import pytest
import torch

from vitrail import recipe
from vitrail.data.scenes import thing_names as module
from vitrail.data.scenes.config import SceneConfig
from vitrail.data.scenes.scene_sampler import SceneSampler
from vitrail.data.scenes.thing_names import HUNDRED_THINGS, find_things
from vitrail.errors import DataError


def shown(table, rows) -> set[str]:
    return {table.names[c] for c in table.concept[rows].tolist()}


def test_hundred_concepts_equal_those_of_the_judge():
    read = recipe.load_recipe("judge").model.config
    assert read is not None and sorted(read["concepts"]) == sorted(HUNDRED_THINGS) and len(set(HUNDRED_THINGS)) == 100


def test_first_thirty_concepts_are_a_prefix():
    """`eval drawing --concepts 30` uses the concepts that a generator of thirty is trained on."""
    read = recipe.load_recipe("judge").model.config
    assert read is not None and tuple(read["concepts"][:30]) == module.THING_GROUPS["thirty"]


def test_group_selects_the_things_of_the_atlas(atlas, monkeypatch):
    table = atlas.table
    every = shown(table, find_things(table))
    one, other, third = sorted(every)[:3]
    monkeypatch.setitem(module.THING_GROUPS, "some", (one, other, "nothing of the kind"))
    assert shown(table, find_things(table, names=["some"])) == {one, other}
    assert shown(table, find_things(table, names=["some", third])) == {one, other, third}
    scenes = SceneSampler(SceneConfig(objects=(1, 2), things=("some",)), table)(0, torch.arange(64))
    assert shown(table, scenes.sprite[scenes.is_filled]) == {one, other}


def test_what_is_not_there_is_refused(atlas, monkeypatch):
    monkeypatch.setitem(module.THING_GROUPS, "none", ("nothing of the kind",))
    with pytest.raises(DataError, match="no thing of the group 'none'"):
        find_things(atlas.table, names=["none"])
    with pytest.raises(DataError, match="no sprite has the name"):
        find_things(atlas.table, names=["balll"])
