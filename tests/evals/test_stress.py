"""Hard scenes: what makes them hard is there, and who knows the truth is right on all of them."""

from dataclasses import replace

import pytest
import torch

from data.scenes.conftest import drawn
from evals.test_judge import shapes
from vitrail.data.scenes.config import PRESETS
from vitrail.data.scenes.render import render
from vitrail.data.scenes.scene import GRID
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.scenes.sprites import Atlas
from vitrail.data.words import Words, ask, balanced
from vitrail.errors import ConfigError
from vitrail.evals.suites import talking
from vitrail.evals.suites.stress import ORDINARY, STRESSES, below_a_patch, stressed

KIND = "existence_random"


def source_of(preset, changes, atlas=None):
    config = ScenesConfig(atlas="-", preset=preset, side=32, seed=5, scene={"combinations": "all", **changes})
    return SceneSource(config, atlas or shapes())


def test_every_score_stands_beside_the_ordinary_one(monkeypatch):
    monkeypatch.setattr(talking, "GUESSED", 20)
    asked = []

    def open_scenes(preset, changes):
        asked.append((preset, changes))
        source = source_of(preset, changes)
        return source, balanced(Words.of(source.atlas.table), source.scenes(torch.arange(2**20)[-50:]))

    def answerer(pixels, questions):  # sees on ordinary scenes alone
        source, words = open_scenes(*asked.pop())
        if asked[-1][0] != ORDINARY:
            return ["?"] * len(questions)
        index = torch.arange(talking.BATCH)
        said, shown = ask(words, source.scenes(index), 5, KIND), source.draw(index).pixels
        read = words.pieces.read
        told = zip(read(said.question), shown, read(said.answer), strict=True)
        known = {(question, picture.sum().item()): answer for question, picture, answer in told}
        return [known[q, p.sum().item()] for q, p in zip(questions, pixels, strict=True)]

    scores = stressed(answerer, open_scenes, (KIND,), 5, patch=0.25)
    names = (KIND, "refused though it can be answered")
    assert [(score.name, score.part["scenes"]) for score in scores] == [
        (name, preset) for preset in (ORDINARY, *STRESSES) for name in names
    ]
    assert [preset for preset, _ in asked] == [ORDINARY, *STRESSES]
    assert dict(asked)["sub-patch"] == {"sizes": [0.15, 0.25]} and dict(asked)["transparent"] == {}
    for score in scores:
        seen = float(score.name == KIND)
        assert (score.value, score.beside.get("ordinary")) == (
            (seen, None) if score.part["scenes"] == ORDINARY else (0, seen)
        )
        assert score.name != KIND or "blind" in score.beside


def test_what_makes_them_hard():
    atlas = Atlas.build(drawn())
    boxes = {}
    for preset in (ORDINARY, *STRESSES):
        scenes = source_of(preset, STRESSES.get(preset, {}), atlas).scenes(torch.arange(100))
        boxes[preset] = (scenes.box.float() / GRID)[scenes.filled], scenes
    sides = {preset: (box[:, 2:] - box[:, :2]).amax(1) for preset, (box, _) in boxes.items()}
    assert sides["sub-patch"].max() <= 1 / 14 and sides[ORDINARY].min() > 1 / 8
    assert (_overlap(boxes["occluded"][1]) > 0.3).float().mean() > 0.3 and _overlap(boxes[ORDINARY][1]).max() == 0
    assert boxes["crowded"][1].count.min() >= 6
    assert PRESETS["transparent"].with_(opacity=1.0) == PRESETS["moving"].with_(motion=0.0) == PRESETS[ORDINARY]


def test_things_that_move_are_seen_along_their_way():
    atlas, index = Atlas.build(drawn()), torch.arange(60)
    changes = {"objects": [1, 1], "tint": 0.0, "backgrounds": ["flat"], "sizes": [0.2, 0.2]}
    plain, moving = (source_of(preset, changes, atlas) for preset in (ORDINARY, "moving"))
    scenes = moving.scenes(index)
    assert torch.equal(scenes.box, plain.scenes(index).box)  # what is true is as before
    still, seen = plain.draw(index).pixels.int(), moving.draw(index).pixels.int()
    ground = still.flatten(2).median(2).values[..., None, None]
    there = [((shown - ground).abs().sum(1) > 3).flatten(1).float() for shown in (still, seen)]
    assert (there[1].sum(1) > 1.3 * there[0].sum(1)).float().mean() > 0.9  # it is in more places
    assert ((seen - ground).abs().sum((1, 2, 3)) < 1.1 * (still - ground).abs().sum((1, 2, 3))).all()  # and fainter
    assert torch.equal(moving.draw(index[7:9]).pixels, seen[7:9].byte())  # whoever is beside it
    # What is true is true of the middle of the way: there as much lies before a thing's centre as behind it.
    weight = (seen - ground).abs().sum(1).double()  # (B, H, W)
    at = torch.arange(32) + 0.5
    centre = torch.stack([(weight.sum(1) * at).sum(1), (weight.sum(2) * at).sum(1)], 1) / weight.sum((1, 2))[:, None]
    own = (still - ground).abs().sum(1).double()
    middle = torch.stack([(own.sum(1) * at).sum(1), (own.sum(2) * at).sum(1)], 1) / own.sum((1, 2))[:, None]
    inside = ((scenes.box[:, 0] > 0.15 * GRID) & (scenes.box[:, 0] < 0.85 * GRID)).all(1)  # none of its way is lost
    assert inside.sum() > 8 and (centre - middle)[inside].abs().max() < 0.5
    away = scenes.box.clone()
    away[:, :, ::2] += 2 * GRID  # beyond the picture there is nothing to see
    for way in ("windows", "everywhere"):
        assert torch.equal(render(replace(scenes, box=away), atlas, 32, way), render(_empty(scenes), atlas, 32, way))


def _empty(scenes):
    return replace(scenes, sprite=torch.full_like(scenes.sprite, -1), box=torch.zeros_like(scenes.box))


def _overlap(scenes):
    """(B,) the largest share of a box that another covers"""
    box = scenes.box.double()
    low, high = (
        f(box[:, :, None, s], box[:, None, :, s])
        for f, s in ((torch.maximum, slice(0, 2)), (torch.minimum, slice(2, 4)))
    )
    common = (high - low).clamp(min=0).prod(-1)  # (B, O, O)
    own = (box[..., 2:] - box[..., :2]).prod(-1).clamp(min=1)
    return (common / own[:, :, None] * ~torch.eye(box.shape[1], dtype=torch.bool)).flatten(1).amax(1)


@pytest.mark.parametrize("patch", [0.0, 0.01, 1.5])
def test_patches_that_cannot_be(patch):
    with pytest.raises(ConfigError, match="patch"):
        below_a_patch(patch)


def test_things_that_leave_the_picture_are_refused():
    with pytest.raises(ConfigError, match="motion"):
        source_of(ORDINARY, {"motion": 0.6})


def test_faint_things_are_refused():
    with pytest.raises(ConfigError, match="opacity"):
        source_of(ORDINARY, {"opacity": 0.01})
