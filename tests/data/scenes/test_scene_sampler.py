from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.scenes import backgrounds
from vitrail.data.scenes.config import PRESETS, SceneConfig
from vitrail.data.scenes.frame_sprites import INNER_FRACTION
from vitrail.data.scenes.scene import COLOURS, GRID, SceneBatch
from vitrail.data.scenes.scene_sampler import SceneSampler, find_held_out_colour, sample_scenes
from vitrail.errors import ConfigError, DataError

INDEX = torch.arange(64)


@st.composite
def configs(draw) -> SceneConfig:
    low = draw(st.integers(1, 8))
    high = draw(st.integers(low, 8))
    across = {1: 1, 2: 2, 3: 2, 4: 2}.get(high, 3)
    least = draw(st.floats(0.05, min(0.9, 1 / across)))
    share = st.floats(0, 1)
    return SceneConfig(
        objects=(low, high),
        slots=draw(st.sampled_from([0, 8])),
        sizes=(least, draw(st.floats(least, 0.9))),
        max_overlap=draw(st.floats(0, 0.6)),
        min_visible=draw(st.floats(0, 0.6)),
        tint_probability=draw(share),
        repeat_probability=draw(share),
        max_groups=draw(st.integers(1, 4)),
        inside_probability=draw(share),
        word_probability=draw(share),
        grid_size=draw(st.sampled_from([0, 0, 8, 16])),
        aspect_ratio=draw(st.sampled_from([(1, 1), (4, 3), (9, 16)])),
    )


def equal(a: SceneBatch, b: SceneBatch) -> bool:
    return all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(SceneBatch))


def uncovered(boxes: list[list[int]], which: int) -> float:
    """The share of a box that lies under no later one, by cutting it along all their edges."""
    x0, y0, x1, y1 = boxes[which]
    later = boxes[which + 1 :]
    xs = sorted({x0, x1} | {x for box in later for x in (box[0], box[2]) if x0 < x < x1})
    ys = sorted({y0, y1} | {y for box in later for y in (box[1], box[3]) if y0 < y < y1})
    free = 0
    for a, b in pairwise(xs):
        for c, d in pairwise(ys):
            if not any(p <= a and b <= r and q <= c and d <= s for p, q, r, s in later):
                free += (b - a) * (d - c)
    return free / ((x1 - x0) * (y1 - y0))


@settings(max_examples=60)
@given(configs(), st.integers(0, 2**32))
def test_every_scene_keeps_to_its_config(atlas, config, seed):
    scenes = sample_scenes(config, atlas.table, seed, INDEX)
    low, high = config.objects
    assert scenes.sprite.shape == (64, config.slots or high)
    assert ((scenes.num_objects >= low) & (scenes.num_objects <= high)).all()
    filled = scenes.is_filled
    assert (filled.long().diff(dim=1) <= 0).all()  # filled slots come first
    size = scenes.box[..., 2:] - scenes.box[..., :2]
    assert (size[filled] > 0).all()
    assert (scenes.box[filled] >= 0).all() and (scenes.box[filled] <= GRID).all()
    assert not scenes.box[~filled].any() and not scenes.colour[~filled].any()
    for number in range(64):
        boxes, inside = scenes.box[number][filled[number]].tolist(), scenes.frame_slot[number].tolist()
        for a, box in enumerate(boxes):
            assert uncovered(boxes, a) >= config.min_visible - 0.002
            for b in range(a + 1, len(boxes)):
                if inside[b] != a:
                    assert _common(box, boxes[b]) <= config.max_overlap * min(_area(box), _area(boxes[b])) + GRID
            if inside[a] >= 0:
                assert inside[a] == a - 1 and atlas.table.kind[scenes.sprite[number, a - 1]] == "frame"
                assert _lies_inside(box, boxes[a - 1])


def _area(box: list[int]) -> int:
    return (box[2] - box[0]) * (box[3] - box[1])


def _common(a: list[int], b: list[int]) -> int:
    return max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))


def _lies_inside(box: list[int], frame: list[int]) -> bool:
    """In the middle that a frame's rim leaves free, but for rounding."""
    for i in (0, 1):
        side = frame[i + 2] - frame[i]
        rim = side * (1 - INNER_FRACTION) / 2
        if box[i] < frame[i] + rim - 3 or box[i + 2] > frame[i + 2] - rim + 10:
            return False
    return True


def test_enough_of_every_box_stays_visible_where_all_overlap(atlas):
    config = SceneConfig(objects=(8, 8), sizes=(0.3, 0.33), max_overlap=0.6, min_visible=0.6)
    scenes = sample_scenes(config, atlas.table, 0, torch.arange(300))
    shares = [uncovered(boxes, slot) for boxes in scenes.box.tolist() for slot in range(8)]
    assert 0.598 <= min(shares) < 0.7 and sum(share < 1 for share in shares) > 500


@pytest.mark.parametrize("name", PRESETS)
def test_a_batch_may_be_cut_and_ordered_anyhow(atlas, name):
    ready = SceneSampler(PRESETS[name], atlas.table)
    index = torch.cat([torch.arange(20), torch.tensor([2**40, 7])])
    whole = ready(5, index)
    order = torch.randperm(len(index))
    assert equal(ready(5, index[order]), whole[order])
    parts = [ready(5, part) for part in index.split(9)]
    for f in fields(SceneBatch):
        assert torch.equal(torch.cat([getattr(part, f.name) for part in parts]), getattr(whole, f.name))
    assert not equal(ready(6, index), whole)
    assert torch.equal(whole.box[7], whole.box[21])  # sample 7 twice


def test_sizes_keep_their_range_unless_there_is_no_room(atlas):
    config = SceneConfig(objects=(1, 1), sizes=(0.2, 0.3))
    scenes = sample_scenes(config, atlas.table, 0, torch.arange(500))
    longer = (scenes.box[..., 2:] - scenes.box[..., :2]).amax(-1)[:, 0] / GRID
    assert longer.min() > 0.199 and longer.max() < 0.301
    assert longer.max() - longer.min() > 0.09


def test_shapes_are_true_in_pictures_of_any_ratio(atlas):
    config = SceneConfig(aspect_ratio=(16, 9), objects=(1, 1), sizes=(0.4, 0.5), things=("bar",))
    box = sample_scenes(config, atlas.table, 0, torch.arange(50)).box[:, 0].float()
    width, height = (box[:, 2] - box[:, 0]) * 16, (box[:, 3] - box[:, 1]) * 9
    assert (width / height - 3).abs().max() < 0.03


def test_snapped_boxes_lie_on_the_grid(atlas):
    scenes = sample_scenes(PRESETS["drawing"], atlas.table, 0, torch.arange(200))
    box = scenes.box[scenes.is_filled]
    assert not (box[:, :2] % (GRID // 8)).any()
    assert not ((box[:, 2:] - box[:, :2]).amax(-1) % (GRID // 8)).any()


def test_concepts_differ_unless_they_repeat(atlas):
    index = torch.arange(300)
    concept = atlas.table.concept
    scenes = sample_scenes(SceneConfig(objects=(2, 8), sizes=(0.1, 0.2)), atlas.table, 0, index)
    for row, filled in zip(scenes.sprite, scenes.is_filled, strict=True):
        assert len(set(concept[row[filled]].tolist())) == filled.sum()
    scenes = sample_scenes(PRESETS["counting"], atlas.table, 0, index)
    kinds = [len(set(concept[row[f]].tolist())) for row, f in zip(scenes.sprite, scenes.is_filled, strict=True)]
    assert max(kinds) == 3 and min(kinds) == 1
    most = [concept[row[f]].bincount().max().item() for row, f in zip(scenes.sprite, scenes.is_filled, strict=True)]
    assert set(most) == set(range(1, 9))


def test_held_out_colours_are_never_worn_in_training(atlas):
    index = torch.arange(3000)
    table = atlas.table

    def colour_names(part: str) -> set[tuple[str, int]]:
        config = PRESETS["mixed"].replace(
            tint_probability=1.0, combinations=part, inside_probability=1.0, word_probability=0.3
        )
        scenes = sample_scenes(config, table, 0, index)
        at = scenes.colour > 0
        names = [table.names[c] for c in table.concept[scenes.sprite[at]].tolist()]
        return set(zip(names, scenes.colour[at].tolist(), strict=True))

    train, test, everything = colour_names("train"), colour_names("test"), colour_names("all")
    assert not train & test
    assert train | test == everything
    assert test == {(name, find_held_out_colour(name)) for name, _ in test}
    assert len(train) == 9 * len(test)


def test_words_frames_vendors_and_fonts_follow_the_config(atlas):
    table = atlas.table
    config = PRESETS["mixed"].replace(
        vendors=("right",), fonts=("aileron-bold",), word_probability=0.5, inside_probability=1.0
    )
    scenes = sample_scenes(config, table, 0, torch.arange(200))
    shown = {(table.kind[i], table.vendor[i]) for i in scenes.sprite[scenes.is_filled].tolist()}
    assert shown == {("thing", "right"), ("word", "aileron-bold"), ("frame", "drawn")}
    plain = sample_scenes(PRESETS["plain"], table, 0, torch.arange(200))
    assert {table.kind[i] for i in plain.sprite[plain.is_filled].tolist()} == {"thing"}
    words = sample_scenes(SceneConfig(word_probability=1.0), table, 0, torch.arange(200))
    assert {table.kind[i] for i in words.sprite[words.is_filled].tolist()} == {"word"}


def test_every_value_that_can_be_drawn_is_drawn(atlas):
    scenes = sample_scenes(PRESETS["mixed"].replace(tint_probability=0.5), atlas.table, 0, torch.arange(3000))
    assert set(scenes.sprite[scenes.is_filled].tolist()) == set(range(len(atlas)))
    assert set(scenes.colour[scenes.is_filled].tolist()) == set(range(len(COLOURS)))
    assert set(scenes.num_objects.tolist()) == set(range(1, 9))
    assert set((scenes.background % 6).tolist()) == set(range(6))
    share = (scenes.colour[scenes.is_filled] > 0).float().mean()
    assert share == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objects": (3, 2)}, "3 to 2"),
        ({"objects": (1, 8), "sizes": (0.5, 0.6)}, "do not fit into an image"),
        ({"sizes": (0.4, 0.2)}, "sizes"),
        ({"max_overlap": 1.5}, "overlap"),
        ({"min_visible": 0.9}, "at most 0.6"),
        ({"slots": 2}, "slots"),
        ({"grid_size": 1}, "grid_size is 1"),
        ({"aspect_ratio": (9, 1)}, "9:1"),
        ({"backgrounds": ("falt",)}, "did you mean 'flat'"),
        ({"backgrounds": ()}, "backgrounds is empty"),
        ({"max_groups": 0}, "groups"),
        ({"combinations": "tests"}, "choose from"),
    ],
)
def test_what_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        SceneConfig(**change)


def test_what_an_atlas_lacks_is_named(atlas):
    few = atlas.select(range(4))
    with pytest.raises(ConfigError, match="2 different things"):
        SceneSampler(SceneConfig(objects=(1, 4)), few.table)
    with pytest.raises(ConfigError, match="0 different words"):
        SceneSampler(SceneConfig(objects=(1, 2), word_probability=0.1), few.table)
    with pytest.raises(ConfigError, match="0 different frames"):
        SceneSampler(SceneConfig(objects=(1, 2), inside_probability=0.1), few.table)
    with pytest.raises(DataError, match="'balll'"):
        SceneSampler(SceneConfig(things=("balll",)), atlas.table)


def test_presets_survive_plain_data():
    for config in PRESETS.values():
        assert SceneConfig.from_dict(config.to_dict()) == config


def test_the_other_parts_of_a_batch(atlas):
    scenes = sample_scenes(PRESETS["plain"], atlas.table, 0, INDEX)
    assert len(scenes) == 64 and len(scenes[3:7]) == 4
    assert torch.equal(scenes.doubled_centre, scenes.box[..., :2] + scenes.box[..., 2:])


def test_so_many_grounds(atlas):
    table = atlas.table
    few = sample_scenes(SceneConfig(backgrounds=("flat", "noise"), num_backgrounds=3), table, 7, torch.arange(400))
    assert len(few.background.unique()) == 6  # three of each kind
    many = sample_scenes(SceneConfig(backgrounds=("flat", "noise")), table, 7, torch.arange(400))
    assert len(many.background.unique()) == 400
    assert torch.equal(
        few.background % len(backgrounds.BACKGROUND_KINDS), many.background % len(backgrounds.BACKGROUND_KINDS)
    )
    for wrong in (-1, 1 << 21):
        with pytest.raises(ConfigError, match="num_backgrounds is"):
            SceneConfig(num_backgrounds=wrong)
