"""Stress scenes: their properties, and scores of a model that knows the answers."""

from dataclasses import replace

import pytest
import torch

from data.scenes.conftest import drawn
from evals.test_drawing_judge import shapes
from vitrail.data.language import SceneLanguage, balance_answers, generate_questions
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.config import PRESETS
from vitrail.data.scenes.scene import GRID
from vitrail.data.scenes.scene_renderer import render_scenes
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.errors import ConfigError
from vitrail.evals.suites import scene_benchmarks
from vitrail.evals.suites.stress_scenes import ORDINARY_PRESET, STRESS_PRESETS, evaluate_stress_scenes, sub_patch_sizes

KIND = "existence_random"


def source_of(preset, changes, atlas=None):
    config = SceneSourceConfig(
        atlas="-", preset=preset, image_size=32, seed=5, scene={"combinations": "all", **changes}
    )
    return SceneSource(config, atlas or shapes())


def test_scores_have_the_ordinary_baseline(monkeypatch):
    monkeypatch.setattr(scene_benchmarks, "BASELINE_SCENES", 20)
    asked = []

    def open_scenes(preset, changes):
        asked.append((preset, changes))
        source = source_of(preset, changes)
        return source, balance_answers(
            SceneLanguage.build(source.atlas.table), source.sample_scenes(torch.arange(2**20)[-50:])
        )

    def answerer(pixels, questions):  # correct on ordinary scenes only
        source, words = open_scenes(*asked.pop())
        if asked[-1][0] != ORDINARY_PRESET:
            return ["?"] * len(questions)
        index = torch.arange(scene_benchmarks.BATCH)
        output, shown = (
            generate_questions(words, source.sample_scenes(index), 5, KIND),
            source.render_indices(index).pixels,
        )
        read = words.pieces.to_texts
        result = zip(read(output.question), shown, read(output.answer), strict=True)
        known = {(question, picture.sum().item()): answer for question, picture, answer in result}
        return [known[q, p.sum().item()] for q, p in zip(questions, pixels, strict=True)]

    scores = evaluate_stress_scenes(answerer, open_scenes, (KIND,), 5, patch_fraction=0.25)
    names = (KIND, "refusals of answerable questions")
    assert [(score.name, score.subset["scenes"]) for score in scores] == [
        (name, preset) for preset in (ORDINARY_PRESET, *STRESS_PRESETS) for name in names
    ]
    assert [preset for preset, _ in asked] == [ORDINARY_PRESET, *STRESS_PRESETS]
    assert dict(asked)["sub-patch"] == {"sizes": [0.15, 0.25]} and dict(asked)["transparent"] == {}
    for score in scores:
        seen = float(score.name == KIND)
        assert (score.value, score.baselines.get("ordinary")) == (
            (seen, None) if score.subset["scenes"] == ORDINARY_PRESET else (0, seen)
        )
        assert score.name != KIND or "blind" in score.baselines


def test_stress_presets():
    atlas = Atlas.build(drawn())
    boxes = {}
    for preset in (ORDINARY_PRESET, *STRESS_PRESETS):
        scenes = source_of(preset, STRESS_PRESETS.get(preset, {}), atlas).sample_scenes(torch.arange(100))
        boxes[preset] = (scenes.box.float() / GRID)[scenes.is_filled], scenes
    sides = {preset: (box[:, 2:] - box[:, :2]).amax(1) for preset, (box, _) in boxes.items()}
    assert sides["sub-patch"].max() <= 1 / 14 and sides[ORDINARY_PRESET].min() > 1 / 8
    assert (_overlap(boxes["occluded"][1]) > 0.3).float().mean() > 0.3 and _overlap(
        boxes[ORDINARY_PRESET][1]
    ).max() == 0
    assert boxes["crowded"][1].num_objects.min() >= 6
    assert (
        PRESETS["transparent"].replace(opacity=1.0)
        == PRESETS["moving"].replace(motion_blur=0.0)
        == PRESETS[ORDINARY_PRESET]
    )


def test_moving_objects_are_blurred_along_their_path():
    atlas, index = Atlas.build(drawn()), torch.arange(60)
    changes = {"objects": [1, 1], "tint_probability": 0.0, "backgrounds": ["flat"], "sizes": [0.2, 0.2]}
    plain, moving = (source_of(preset, changes, atlas) for preset in (ORDINARY_PRESET, "moving"))
    scenes = moving.sample_scenes(index)
    assert torch.equal(scenes.box, plain.sample_scenes(index).box)  # the ground truth is unchanged
    still, seen = plain.render_indices(index).pixels.int(), moving.render_indices(index).pixels.int()
    ground = still.flatten(2).median(2).values[..., None, None]
    there = [((shown - ground).abs().sum(1) > 3).flatten(1).float() for shown in (still, seen)]
    assert (there[1].sum(1) > 1.3 * there[0].sum(1)).float().mean() > 0.9  # it covers more pixels
    assert (
        (seen - ground).abs().sum((1, 2, 3)) < 1.1 * (still - ground).abs().sum((1, 2, 3))
    ).all()  # with lower contrast
    assert torch.equal(moving.render_indices(index[7:9]).pixels, seen[7:9].byte())  # independent of other objects
    # The ground truth is the middle of the path: the object extends equally to both sides of its centre.
    weight = (seen - ground).abs().sum(1).double()  # (B, H, W)
    at = torch.arange(32) + 0.5
    centre = torch.stack([(weight.sum(1) * at).sum(1), (weight.sum(2) * at).sum(1)], 1) / weight.sum((1, 2))[:, None]
    own = (still - ground).abs().sum(1).double()
    middle = torch.stack([(own.sum(1) * at).sum(1), (own.sum(2) * at).sum(1)], 1) / own.sum((1, 2))[:, None]
    inside = ((scenes.box[:, 0] > 0.15 * GRID) & (scenes.box[:, 0] < 0.85 * GRID)).all(1)  # the whole path is visible
    assert inside.sum() > 8 and (centre - middle)[inside].abs().max() < 0.5
    away = scenes.box.clone()
    away[:, :, ::2] += 2 * GRID  # nothing is visible outside the image
    for way in ("windows", "everywhere"):
        assert torch.equal(
            render_scenes(replace(scenes, box=away), atlas, 32, way), render_scenes(_empty(scenes), atlas, 32, way)
        )


def _empty(scenes):
    return replace(scenes, sprite=torch.full_like(scenes.sprite, -1), box=torch.zeros_like(scenes.box))


def _overlap(scenes):
    """(B,) largest fraction of a box that another box covers"""
    box = scenes.box.double()
    low, high = (
        f(box[:, :, None, s], box[:, None, :, s])
        for f, s in ((torch.maximum, slice(0, 2)), (torch.minimum, slice(2, 4)))
    )
    common = (high - low).clamp(min=0).prod(-1)  # (B, O, O)
    own = (box[..., 2:] - box[..., :2]).prod(-1).clamp(min=1)
    return (common / own[:, :, None] * ~torch.eye(box.shape[1], dtype=torch.bool)).flatten(1).amax(1)


@pytest.mark.parametrize("patch", [0.0, 0.01, 1.5])
def test_invalid_patch_sizes_raise(patch):
    with pytest.raises(ConfigError, match="patch"):
        sub_patch_sizes(patch)


def test_objects_leaving_the_image_raise():
    with pytest.raises(ConfigError, match="motion"):
        source_of(ORDINARY_PRESET, {"motion_blur": 0.6})


def test_faint_objects_raise():
    with pytest.raises(ConfigError, match="opacity"):
        source_of(ORDINARY_PRESET, {"opacity": 0.01})
