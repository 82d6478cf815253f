"""Scenes told in plain values: what the JSON says is what the tensors say, and shards give it back."""

import numpy as np
import pytest
import torch

from data.scenes.conftest import drawn
from vitrail.data.scenes.frames import frame_sprites
from vitrail.data.scenes.letters import BUILT_IN, word_sprites
from vitrail.data.scenes.scene import COLOURS, GRID
from vitrail.data.scenes.source import Asked, ScenesConfig, SceneSource, by_source
from vitrail.data.scenes.sprites import Atlas
from vitrail.data.shards import Shards, ShardsConfig, write_shards
from vitrail.data.told import Teller
from vitrail.errors import ConfigError

TEXTS = ["tea", "red", "ten", "sun", "map", "fox", "two", "ice", "bird"]


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    return Atlas.build(
        [
            *drawn(),
            *frame_sprites(),
            *word_sprites(TEXTS, BUILT_IN[:1]),
        ]
    )


@pytest.fixture(scope="module")
def source(atlas) -> SceneSource:
    return SceneSource(ScenesConfig(atlas="-", preset="mixed", side=48, seed=3, count=5000), atlas, "mixed")


def test_the_truth_is_that_of_the_scene(source):
    teller = Teller(source, questions=4)
    scenes, table = source.scenes(torch.arange(10, 40)), source.atlas.table
    for b, told in enumerate(teller.told(10, 40)):
        assert told.key == f"{teller.settings}-{10 + b:010}" and told.pixels.shape == (48, 48, 3)
        assert len(told.truth["objects"]) == int(scenes.count[b])
        for slot, thing in enumerate(told.truth["objects"]):
            row = int(scenes.sprite[b, slot])
            assert thing["name"] == table.names[int(table.concept[row])] and thing["sprite"] == table.id[row]
            assert thing["colour"] == COLOURS[int(scenes.colour[b, slot])].name
            assert [x * GRID for x in thing["box"]] == scenes.box[b, slot].tolist()
        assert told.truth["caption"] and told.truth["description"].count(".") >= told.truth["caption"].count(".")
        kinds = [q["kind"] for q in told.truth["questions"]]
        assert kinds and len(set(kinds)) == len(kinds) <= 4
        assert all(q["question"] and q["answer"] for q in told.truth["questions"])
        if "preference" in told.truth:
            assert told.truth["preference"]["chosen"] != told.truth["preference"]["rejected"]


def test_a_scene_is_told_alike_whoever_tells_it_with_whom(source):
    teller = Teller(source)
    alone = [next(teller.told(i, i + 1)) for i in (7, 300)]
    together = list(teller.told(0, 301))
    for told in alone:
        other = together[int(told.key.split("-")[1])]
        assert told.truth == other.truth and np.array_equal(told.pixels, other.pixels)
    strange = {told.key: told for told in Teller(source, held_out=True).told(0, 60)}
    both = [(told.truth, other.truth) for told, other in zip(together, strange.values(), strict=False)]
    pairs = [(told["swaps"], other["swaps"]) for told, other in both if "swaps" in told]
    assert len(pairs) > 20 and not any(a == b for a, b in pairs)  # no sentence of training is among the others
    assert not strange.keys() & {told.key for told in together}
    more = SceneSource(source.config.with_(count=6000), source.atlas)  # balanced over other scenes
    assert Teller(more).settings != teller.settings
    held_out = next(Teller(source, held_out=True).told(7, 8))
    assert np.array_equal(held_out.pixels, alone[0].pixels)
    assert held_out.truth["questions"] != alone[0].truth["questions"]


def test_shards_give_it_back(source, tmp_path):
    told = list(Teller(source).told(0, 12))
    write_shards((each.sample() for each in told), tmp_path, name="mixed", count=5, quiet=True)
    shards = Shards(ShardsConfig(paths=str(tmp_path / "*.tar")))
    assert len(shards) == 12
    for i, each in enumerate(told):
        sample = shards[i]
        assert sample["json"] == each.truth and sample["txt"] == each.truth["caption"]
        assert np.array_equal(sample["png"], each.pixels)


def test_baselines_are_near_chance(source):
    found = {b.kind: b for b in Teller(source).baselines(0, 3000)}
    assert abs(found["existence_random"].majority - 0.5) < 0.05  # so few names tell a little by themselves
    assert abs(found["relation"].blind - 0.5) < 0.1
    assert abs(found["choice_position"].blind - 0.25) < 0.1


def test_what_cannot_appear_is_not_asked_about(atlas):
    names = ["ball", "egg", "tent", "cross"]
    config = ScenesConfig(atlas="-", preset="plain", scene={"names": names}, side=48, count=5000)
    for told in Teller(SceneSource(config, atlas), questions=12).told(0, 40):
        asked = " ".join(q["question"] for q in told.truth["questions"])
        assert not any(f" {name}" in asked for name in ("square", "tower", "hoop", "plate", "moon"))


def test_scenes_that_are_not_there_are_refused(source):
    for start, stop in ((-1, 3), (3, 3), (4990, 5001)):
        with pytest.raises(ConfigError, match="5,000"):
            next(Teller(source).told(start, stop))


def test_samples_are_numbers_grouped_by_source(source):
    assert source[5] == Asked("mixed", 5) and len(source) == 5000
    with pytest.raises(IndexError):
        source[5000]
    batch = by_source([Asked("a", 3), Asked("b", 1), Asked("a", 9)])
    assert {name: index.tolist() for name, index in batch.items()} == {"a": [3, 9], "b": [1]}
    few = source.only(["ball", "egg"])
    assert {n for n, k in zip(few.atlas.table.names, few.atlas.table.category, strict=True) if k == "shape"} == {
        "ball",
        "egg",
    }


@pytest.mark.parametrize(
    ("change", "says"),
    [({"preset": "crowdy"}, "crowded"), ({"side": 2}, "8 pixels"), ({"scene": {"sizse": [0.1, 0.2]}}, "sizse")],
)
def test_impossible_scenes_are_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        ScenesConfig(**({"atlas": "emoji"} | change))
