"""Things by their names, and by the name of a group."""

import pytest
import torch

from vitrail import recipe
from vitrail.data.scenes import things as module
from vitrail.data.scenes.config import SceneConfig
from vitrail.data.scenes.layout import Layout
from vitrail.data.scenes.things import HUNDRED, things
from vitrail.errors import DataError


def shown(table, rows) -> set[str]:
    return {table.names[c] for c in table.concept[rows].tolist()}


def test_the_hundred_are_what_the_judge_knows():
    read = recipe.read("judge").model.config
    assert read is not None and sorted(read["concepts"]) == sorted(HUNDRED) and len(set(HUNDRED)) == 100


def test_the_thirty_are_those_that_it_knows_first():
    """So that `eval drawing --concepts 30` asks for what a generator of them learned."""
    read = recipe.read("judge").model.config
    assert read is not None and tuple(read["concepts"][:30]) == module.GROUPS["thirty"]


def test_a_group_is_those_that_there_are(atlas, monkeypatch):
    table = atlas.table
    every = shown(table, things(table))
    one, other, third = sorted(every)[:3]
    monkeypatch.setitem(module.GROUPS, "some", (one, other, "nothing of the kind"))
    assert shown(table, things(table, names=["some"])) == {one, other}
    assert shown(table, things(table, names=["some", third])) == {one, other, third}
    scenes = Layout(SceneConfig(objects=(1, 2), names=("some",)), table)(0, torch.arange(64))
    assert shown(table, scenes.sprite[scenes.filled]) == {one, other}


def test_what_is_not_there_is_refused(atlas, monkeypatch):
    monkeypatch.setitem(module.GROUPS, "none", ("nothing of the kind",))
    with pytest.raises(DataError, match="none of the things 'none'"):
        things(atlas.table, names=["none"])
    with pytest.raises(DataError, match="no sprite has the name"):
        things(atlas.table, names=["balll"])
