"""Annotated scenes in plain values: JSON equals the tensors, and shards return it unchanged."""

import numpy as np
import pytest
import torch

from data.scenes.conftest import drawn
from vitrail.data.scene_annotations import SceneAnnotator
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.frame_sprites import draw_frame_sprites
from vitrail.data.scenes.scene import COLOURS, GRID
from vitrail.data.scenes.scene_source import SceneSample, SceneSource, SceneSourceConfig, group_by_source
from vitrail.data.scenes.word_sprites import BUILT_IN_FONTS, draw_word_sprites
from vitrail.data.shards import ShardDataset, ShardsConfig, write_shards
from vitrail.errors import ConfigError

TEXTS = ["tea", "red", "ten", "sun", "map", "fox", "two", "ice", "bird"]


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    return Atlas.build(
        [
            *drawn(),
            *draw_frame_sprites(),
            *draw_word_sprites(TEXTS, BUILT_IN_FONTS[:1]),
        ]
    )


@pytest.fixture(scope="module")
def source(atlas) -> SceneSource:
    return SceneSource(
        SceneSourceConfig(atlas="-", preset="mixed", image_size=48, seed=3, num_samples=5000), atlas, "mixed"
    )


def test_ground_truth_equals_the_scene(source):
    annotator = SceneAnnotator(source, num_questions=4)
    scenes, table = source.sample_scenes(torch.arange(10, 40)), source.atlas.table
    for b, annotation in enumerate(annotator.annotate(10, 40)):
        assert annotation.key == f"{annotator.settings_id}-{10 + b:010}" and annotation.pixels.shape == (48, 48, 3)
        assert len(annotation.ground_truth["objects"]) == int(scenes.num_objects[b])
        for slot, obj in enumerate(annotation.ground_truth["objects"]):
            row = int(scenes.sprite[b, slot])
            assert obj["name"] == table.names[int(table.concept[row])] and obj["sprite"] == table.id[row]
            assert obj["colour"] == COLOURS[int(scenes.colour[b, slot])].name
            assert [x * GRID for x in obj["box"]] == scenes.box[b, slot].tolist()
        assert annotation.ground_truth["caption"] and annotation.ground_truth["description"].count(
            "."
        ) >= annotation.ground_truth["caption"].count(".")
        kinds = [q["kind"] for q in annotation.ground_truth["questions"]]
        assert kinds and len(set(kinds)) == len(kinds) <= 4
        assert all(q["question"] and q["answer"] for q in annotation.ground_truth["questions"])
        if "preference" in annotation.ground_truth:
            assert annotation.ground_truth["preference"]["chosen"] != annotation.ground_truth["preference"]["rejected"]


def test_annotations_do_not_depend_on_the_batch(source):
    annotator = SceneAnnotator(source)
    alone = [next(annotator.annotate(i, i + 1)) for i in (7, 300)]
    together = list(annotator.annotate(0, 301))
    for annotation in alone:
        other = together[int(annotation.key.split("-")[1])]
        assert annotation.ground_truth == other.ground_truth and np.array_equal(annotation.pixels, other.pixels)
    paraphrased = {annotation.key: annotation for annotation in SceneAnnotator(source, held_out=True).annotate(0, 60)}
    both = [
        (annotation.ground_truth, other.ground_truth)
        for annotation, other in zip(together, paraphrased.values(), strict=False)
    ]
    pairs = [(annotation["swaps"], other["swaps"]) for annotation, other in both if "swaps" in annotation]
    assert len(pairs) > 20 and not any(a == b for a, b in pairs)  # no training sentence among the paraphrases
    assert not paraphrased.keys() & {annotation.key for annotation in together}
    larger = SceneSource(source.config.replace(num_samples=6000), source.atlas)  # balanced over other scenes
    assert SceneAnnotator(larger).settings_id != annotator.settings_id
    held_out = next(SceneAnnotator(source, held_out=True).annotate(7, 8))
    assert np.array_equal(held_out.pixels, alone[0].pixels)
    assert held_out.ground_truth["questions"] != alone[0].ground_truth["questions"]


def test_shards_round_trip(source, tmp_path):
    annotations = list(SceneAnnotator(source).annotate(0, 12))
    write_shards(
        (annotation.to_sample() for annotation in annotations), tmp_path, name="mixed", max_samples=5, quiet=True
    )
    shards = ShardDataset(ShardsConfig(paths=str(tmp_path / "*.tar")))
    assert len(shards) == 12
    for i, annotation in enumerate(annotations):
        sample = shards[i]
        assert sample["json"] == annotation.ground_truth and sample["txt"] == annotation.ground_truth["caption"]
        assert np.array_equal(sample["png"], annotation.pixels)


def test_blind_baselines_are_near_chance(source):
    by_kind = {b.kind: b for b in SceneAnnotator(source).compute_baselines(0, 3000)}
    # with few names, the name itself carries some information
    assert abs(by_kind["existence_random"].majority - 0.5) < 0.05
    assert abs(by_kind["relation"].blind - 0.5) < 0.1
    assert abs(by_kind["choice_position"].blind - 0.25) < 0.1


def test_questions_are_about_possible_objects(atlas):
    names = ["ball", "egg", "tent", "cross"]
    config = SceneSourceConfig(atlas="-", preset="plain", scene={"things": names}, image_size=48, num_samples=5000)
    for annotation in SceneAnnotator(SceneSource(config, atlas), num_questions=12).annotate(0, 40):
        questions = " ".join(q["question"] for q in annotation.ground_truth["questions"])
        assert not any(f" {name}" in questions for name in ("square", "tower", "hoop", "plate", "moon"))


def test_invalid_ranges_are_refused(source):
    for start, stop in ((-1, 3), (3, 3), (4990, 5001)):
        with pytest.raises(ConfigError, match="5,000"):
            next(SceneAnnotator(source).annotate(start, stop))


def test_samples_are_indices_grouped_by_source(source):
    assert source[5] == SceneSample("mixed", 5) and len(source) == 5000
    with pytest.raises(IndexError):
        source[5000]
    batch = group_by_source([SceneSample("a", 3), SceneSample("b", 1), SceneSample("a", 9)])
    assert {name: index.tolist() for name, index in batch.items()} == {"a": [3, 9], "b": [1]}
    few = source.with_things(["ball", "egg"])
    assert {n for n, k in zip(few.atlas.table.names, few.atlas.table.category, strict=True) if k == "shape"} == {
        "ball",
        "egg",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [({"preset": "crowdy"}, "crowded"), ({"image_size": 2}, "8 pixels"), ({"scene": {"sizse": [0.1, 0.2]}}, "sizse")],
)
def test_invalid_scene_settings_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        SceneSourceConfig(**({"atlas": "emoji"} | change))
