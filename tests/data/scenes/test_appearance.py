"""Looks: all that is true of a scene stays true, both ways of drawing agree, and without them nothing is changed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.scenes.test_scene_renderer import scene
from vitrail.data.augmentation import AugmentationConfig, augment_images
from vitrail.data.scenes import backgrounds
from vitrail.data.scenes.appearance import (
    FIXED_POINT_ONE,
    NUM_COLOUR_MATRICES,
    Appearance,
    AppearanceSampler,
    sample_colour_matrices,
    select_allowed_matrices,
)
from vitrail.data.scenes.config import PRESETS, SceneConfig
from vitrail.data.scenes.packed_pixels import apply_colour_matrix, extract_channel, pack_channels
from vitrail.data.scenes.scene import COLOURS, SceneBatch
from vitrail.data.scenes.scene_renderer import render_masks, render_scenes
from vitrail.data.scenes.scene_sampler import sample_scenes
from vitrail.data.scenes.scene_source import MAX_COLOUR_CHANGE, SceneSource, SceneSourceConfig
from vitrail.errors import ConfigError

MIXED = PRESETS["mixed"].replace(tint_probability=0.5)
RGB = torch.tensor([colour.rgb for colour in COLOURS[1:]])


def named(rgb: torch.Tensor) -> torch.Tensor:
    """(…, 3) in 0…255 → the row of COLOURS it is called by: the nearest, as the test of tints has it"""
    return 1 + (rgb[..., None, :] - RGB).abs().sum(-1).argmin(-1)


def one(bend=(0, 0), mirrored=False, row=0, far=0.0) -> Appearance:
    shade = sample_colour_matrices(far)[row].flatten().view(12, 1, 1)
    return Appearance(torch.tensor([[mirrored]]), torch.tensor([[bend]]), shade)


def colour_names(atlas, config: SceneConfig, seed: int, count: int) -> tuple[SceneBatch, Appearance]:
    scenes = sample_scenes(config, atlas.table, seed, torch.arange(count))
    look = AppearanceSampler(config, atlas.table)(seed, scenes)
    assert look is not None
    return scenes, look


@settings(max_examples=4)
@given(st.integers(1, 60), st.integers(0, 1000), st.floats(0, 1), st.floats(0, 0.8), st.floats(0, 0.4))
def test_both_ways_give_the_same_pixels_and_masks(atlas, size, seed, mirror, bend, shade):
    config = MIXED.replace(flip_probability=mirror, shape_jitter=bend, colour_jitter=max(shade, 0.01))
    scenes, look = colour_names(atlas, config, seed, 5)
    assert torch.equal(
        render_scenes(scenes, atlas, size, appearance=look),
        render_scenes(scenes, atlas, size, method="everywhere", appearance=look),
    )
    both = (render_masks(scenes, atlas, size, way, look) for way in ("windows", "everywhere"))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_no_transform_changes_nothing(atlas):
    """No appearance, and the identity."""
    scenes = sample_scenes(MIXED, atlas.table, 3, torch.arange(20))
    assert AppearanceSampler(MIXED, atlas.table)(3, scenes) is None
    plain = AppearanceSampler(MIXED.replace(flip_probability=1.0), atlas.table)(3, scenes)
    assert plain is not None
    still = plain._replace(is_mirrored=torch.zeros_like(plain.is_mirrored))
    assert torch.equal(render_scenes(scenes, atlas, 64, appearance=still), render_scenes(scenes, atlas, 64))


def test_transform_depends_only_on_seed_and_index(atlas):
    config = MIXED.replace(flip_probability=0.5, shape_jitter=0.4, colour_jitter=0.3)
    scenes, look = colour_names(atlas, config, 8, 30)
    order = torch.randperm(30)[:11]
    other = AppearanceSampler(config, atlas.table)(8, scenes[order])
    assert other is not None
    assert torch.equal(other.colour_matrix, look.colour_matrix[:, order]) and torch.equal(other.bend, look.bend[order])
    assert torch.equal(
        render_scenes(scenes[order], atlas, 40, appearance=other),
        render_scenes(scenes, atlas, 40, appearance=look)[order],
    )
    fresh = AppearanceSampler(config, atlas.table)(9, scenes)
    assert fresh is not None and not torch.equal(fresh.bend, look.bend)


def test_what_is_mirrored_is_the_mirror_image(atlas):
    """Of a box that lies in the middle of the picture, all of it."""
    drawn = scene(atlas, [("left/step", "", (0.2, 0.1, 0.8, 0.7))])
    there, back = (render_masks(drawn, atlas, 64, appearance=one(mirrored=m)).amodal[0, 0].int() for m in (False, True))
    assert (there.flip(-1) - back).abs().max() <= 3 and not torch.equal(there, back)


def test_bend_moves_the_middle_only(atlas):
    """The stripe's upper part is 53 of 112 lines; at u lies what was at u + b · u · (1 − u), which is solved here."""
    drawn = scene(atlas, [("left/stripe", "", (0, 0, 1, 1))])
    edge = 53 / 112
    for b in (-128, 0, 96):
        pixels = render_scenes(drawn, atlas, 256, appearance=one(bend=(0, b)))[0].float()
        light = (pixels[:, :, 128].mean(0) > 200).float()
        found = float(light.argmax()) / 256
        k = b / 256
        want = edge if b == 0 else (1 + k - ((1 + k) ** 2 - 4 * k * edge) ** 0.5) / (2 * k)
        assert found == pytest.approx(want, abs=0.012)


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.floats(0.0, 0.8))
def test_boxes_stay_tight_and_backgrounds_bare(atlas, seed, bend):
    """What is drawn of each thing reaches from end to end of where it reached before, within a pixel."""
    config = PRESETS["plain"].replace(flip_probability=0.5, shape_jitter=max(bend, 0.01), colour_jitter=0.3)
    scenes, look = colour_names(atlas, config, seed, 4)
    plain, other = render_masks(scenes, atlas, 64), render_masks(scenes, atlas, 64, appearance=look)
    for axis in (2, 3):
        before, after = ((m.amodal > 96).any(axis).int() for m in (plain, other))  # (B, O, 64)
        ends = [(x.argmax(-1), x.flip(-1).argmax(-1)) for x in (before, after)]
        for a, b in zip(*ends, strict=True):
            assert (a - b).abs().max() <= 2
    pixels, empty = (
        render_scenes(scenes, atlas, 64, appearance=look),
        backgrounds.render_backgrounds(scenes.background, 64, 64),
    )
    for c in range(3):
        bare = other.background == 255
        assert torch.equal(pixels[:, c][bare].long(), extract_channel(empty, c)[bare])


def test_words_are_not_mirrored_or_bent_and_appearances_differ(atlas):
    config = PRESETS["words"].replace(flip_probability=1.0, shape_jitter=0.8, colour_jitter=0.2)
    scenes, look = colour_names(atlas, config, 0, 200)
    thing = torch.tensor([kind == "thing" for kind in atlas.table.kind])[scenes.sprite.clamp(min=0)] & scenes.is_filled
    assert torch.equal(look.is_mirrored, thing)
    assert not look.bend[~thing].any() and (look.bend[thing] != 0).float().mean() > 0.9
    assert look.bend.abs().max() <= 205 and len(look.colour_matrix[0][scenes.is_filled].unique()) > 100


@settings(max_examples=40)
@given(
    st.floats(0, 0.5),
    st.integers(0, NUM_COLOUR_MATRICES - 1),
    st.lists(st.integers(0, 255), min_size=3, max_size=3),
    st.integers(0, 255),
)
def test_shading_in_whole_numbers_is_the_affine_map(far, row, rgb, opacity):
    made = sample_colour_matrices(far)[row]
    colours = torch.tensor(rgb) * opacity // 255
    layer = pack_channels(torch.cat([colours, torch.tensor([opacity])])[:, None])
    found = apply_colour_matrix(layer, made.flatten()[:, None])
    want = (made.double() / FIXED_POINT_ONE @ torch.tensor([*colours.tolist(), opacity]).double()).clamp(0, opacity)
    for c in range(3):
        assert abs(float(extract_channel(found, c)) - float(want[c])) <= 0.51
    assert extract_channel(found, 3) == opacity


@pytest.mark.parametrize("far", [0.05, 0.2, 0.4])
def test_a_shaded_colour_keeps_its_name_in_any_view(far):
    """All shades that a colour may have, each seen in views that go as far as scenes allow."""
    made = sample_colour_matrices(far)
    rows = select_allowed_matrices(made)
    assert torch.equal(rows[0], torch.arange(NUM_COLOUR_MATRICES))
    how = AugmentationConfig(colour_jitter=MAX_COLOUR_CHANGE, log_gamma=(-MAX_COLOUR_CHANGE, MAX_COLOUR_CHANGE))
    for colour in range(1, len(COLOURS)):
        full = torch.tensor([*COLOURS[colour].rgb, 255])
        colour_names = (torch.einsum("kij,j->ki", made[rows[colour]], full) / FIXED_POINT_ONE).clamp(0, 255)
        assert (named(colour_names) == colour).all(), COLOURS[colour].name
        seen = (augment_images(colour_names.round().byte()[..., None, None], how)[..., 0, 0] + 1) * 127.5
        assert (named(seen) == colour).all(), COLOURS[colour].name
        assert len(rows[colour].unique()) > NUM_COLOUR_MATRICES / 16  # and yet there are many


def test_tinted_things_keep_their_colour_name(atlas):
    """On rendered things of several shades and designs that are named correctly without appearance changes."""
    config = PRESETS["colours"].replace(colour_jitter=0.3, flip_probability=0.5, shape_jitter=0.4)
    scenes, look = colour_names(atlas, config, 4, 160)
    shown = {"plain": None, "worn": look}
    cover = render_masks(scenes, atlas, 64, appearance=look).visible == 255  # (B, O, H, W)
    right = {}
    for name, how in shown.items():
        pixels = render_scenes(scenes, atlas, 64, appearance=how).float()
        mean = torch.einsum("bohw,bchw->boc", cover.float(), pixels) / cover.sum((2, 3)).clamp(min=1)[..., None]
        right[name] = (named(mean) == scenes.colour)[(cover.sum((2, 3)) > 40) & (scenes.colour > 0)]
    assert right["plain"].float().mean() > 0.7
    assert right["worn"][right["plain"]].float().mean() > 0.97


def test_augmentation_that_invalidates_answers_is_refused(atlas):
    source = SceneSourceConfig(
        atlas="-",
        image_size=16,
        augmentation=AugmentationConfig(
            colour_jitter=0.05, log_gamma=(-0.05, 0.05), sharpness=(-0.5, 0.5), max_noise=0.02
        ),
    )
    assert SceneSource(source, atlas).render_indices(torch.arange(3)).pixels.shape == (3, 3, 16, 16)
    for changes, message in (
        ({"flip_probability": 0.5}, "augmentation.flip_probability"),
        ({"crop_area": (0.5, 1.0)}, "augmentation.crop_area"),
        ({"max_rotation": 5.0}, "augmentation.max_rotation"),
        ({"erase_probability": 0.2}, "augmentation.erase_probability"),
        ({"blur_probability": 0.2}, "augmentation.blur_probability"),
        ({"colour_jitter": 0.3}, "names"),
        ({"log_gamma": (-0.4, 0.0)}, "names"),
    ):
        with pytest.raises(ConfigError, match=message):
            SceneSourceConfig(atlas="-", augmentation=AugmentationConfig(**changes))
    for field, value in (("flip_probability", 1.5), ("shape_jitter", 0.9), ("colour_jitter", -0.1)):
        with pytest.raises(ConfigError, match=field):
            SceneConfig(**{field: value})
