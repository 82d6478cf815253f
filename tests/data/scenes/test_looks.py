"""Looks: all that is true of a scene stays true, both ways of drawing agree, and without them nothing is changed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.scenes.test_render import scene
from vitrail.data.scenes import backgrounds
from vitrail.data.scenes.config import PRESETS, SceneConfig
from vitrail.data.scenes.lanes import channel, pack, shaded
from vitrail.data.scenes.layout import layout
from vitrail.data.scenes.looks import ONE, K, Look, Looks, allowed, shades
from vitrail.data.scenes.render import masks, render
from vitrail.data.scenes.scene import COLOURS, Scenes
from vitrail.data.scenes.source import SAFE, ScenesConfig, SceneSource
from vitrail.data.views import ViewsConfig, views
from vitrail.errors import ConfigError

MIXED = PRESETS["mixed"].with_(tint=0.5)
RGB = torch.tensor([colour.rgb for colour in COLOURS[1:]])


def named(rgb: torch.Tensor) -> torch.Tensor:
    """(…, 3) in 0…255 → the row of COLOURS it is called by: the nearest, as the test of tints has it"""
    return 1 + (rgb[..., None, :] - RGB).abs().sum(-1).argmin(-1)


def one(bend=(0, 0), mirrored=False, row=0, far=0.0) -> Look:
    shade = shades(far)[row].flatten().view(12, 1, 1)
    return Look(torch.tensor([[mirrored]]), torch.tensor([[bend]]), shade)


def worn(atlas, config: SceneConfig, seed: int, count: int) -> tuple[Scenes, Look]:
    scenes = layout(config, atlas.table, seed, torch.arange(count))
    look = Looks(config, atlas.table)(seed, scenes)
    assert look is not None
    return scenes, look


@settings(max_examples=4)
@given(st.integers(1, 60), st.integers(0, 1000), st.floats(0, 1), st.floats(0, 0.8), st.floats(0, 0.4))
def test_both_ways_give_the_same_pixels_and_masks(atlas, size, seed, mirror, bend, shade):
    config = MIXED.with_(mirror=mirror, bend=bend, shade=max(shade, 0.01))
    scenes, look = worn(atlas, config, seed, 5)
    assert torch.equal(render(scenes, atlas, size, look=look), render(scenes, atlas, size, way="everywhere", look=look))
    both = (masks(scenes, atlas, size, way, look) for way in ("windows", "everywhere"))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_without_a_look_nothing_is_changed(atlas):
    """None at all, and one that leaves everything as it is."""
    scenes = layout(MIXED, atlas.table, 3, torch.arange(20))
    assert Looks(MIXED, atlas.table)(3, scenes) is None
    plain = Looks(MIXED.with_(mirror=1.0), atlas.table)(3, scenes)
    assert plain is not None
    still = plain._replace(mirrored=torch.zeros_like(plain.mirrored))
    assert torch.equal(render(scenes, atlas, 64, look=still), render(scenes, atlas, 64))


def test_a_look_follows_from_seed_and_index_alone(atlas):
    config = MIXED.with_(mirror=0.5, bend=0.4, shade=0.3)
    scenes, look = worn(atlas, config, 8, 30)
    order = torch.randperm(30)[:11]
    other = Looks(config, atlas.table)(8, scenes[order])
    assert other is not None
    assert torch.equal(other.shade, look.shade[:, order]) and torch.equal(other.bend, look.bend[order])
    assert torch.equal(render(scenes[order], atlas, 40, look=other), render(scenes, atlas, 40, look=look)[order])
    fresh = Looks(config, atlas.table)(9, scenes)
    assert fresh is not None and not torch.equal(fresh.bend, look.bend)


def test_what_is_mirrored_is_the_mirror_image(atlas):
    """Of a box that lies in the middle of the picture, all of it."""
    drawn = scene(atlas, [("left/step", "", (0.2, 0.1, 0.8, 0.7))])
    there, back = (masks(drawn, atlas, 64, look=one(mirrored=m)).whole[0, 0].int() for m in (False, True))
    assert (there.flip(-1) - back).abs().max() <= 3 and not torch.equal(there, back)


def test_a_bend_moves_the_middle_and_leaves_the_ends(atlas):
    """The stripe's upper part is 53 of 112 lines; at u lies what was at u + b · u · (1 − u), which is solved here."""
    drawn = scene(atlas, [("left/stripe", "", (0, 0, 1, 1))])
    edge = 53 / 112
    for b in (-128, 0, 96):
        pixels = render(drawn, atlas, 256, look=one(bend=(0, b)))[0].float()
        light = (pixels[:, :, 128].mean(0) > 200).float()
        found = float(light.argmax()) / 256
        k = b / 256
        want = edge if b == 0 else (1 + k - ((1 + k) ** 2 - 4 * k * edge) ** 0.5) / (2 * k)
        assert found == pytest.approx(want, abs=0.012)


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.floats(0.0, 0.8))
def test_boxes_stay_tight_and_backgrounds_bare(atlas, seed, bend):
    """What is drawn of each thing reaches from end to end of where it reached before, within a pixel."""
    config = PRESETS["plain"].with_(mirror=0.5, bend=max(bend, 0.01), shade=0.3)
    scenes, look = worn(atlas, config, seed, 4)
    plain, other = masks(scenes, atlas, 64), masks(scenes, atlas, 64, look=look)
    for axis in (2, 3):
        before, after = ((m.whole > 96).any(axis).int() for m in (plain, other))  # (B, O, 64)
        ends = [(x.argmax(-1), x.flip(-1).argmax(-1)) for x in (before, after)]
        for a, b in zip(*ends, strict=True):
            assert (a - b).abs().max() <= 2
    pixels, empty = render(scenes, atlas, 64, look=look), backgrounds.backdrop(scenes.background, 64, 64)
    for c in range(3):
        bare = other.background == 255
        assert torch.equal(pixels[:, c][bare].long(), channel(empty, c)[bare])


def test_words_are_neither_mirrored_nor_bent_and_looks_differ(atlas):
    config = PRESETS["words"].with_(mirror=1.0, bend=0.8, shade=0.2)
    scenes, look = worn(atlas, config, 0, 200)
    thing = torch.tensor([kind == "thing" for kind in atlas.table.kind])[scenes.sprite.clamp(min=0)] & scenes.filled
    assert torch.equal(look.mirrored, thing)
    assert not look.bend[~thing].any() and (look.bend[thing] != 0).float().mean() > 0.9
    assert look.bend.abs().max() <= 205 and len(look.shade[0][scenes.filled].unique()) > 100


@settings(max_examples=40)
@given(
    st.floats(0, 0.5), st.integers(0, K - 1), st.lists(st.integers(0, 255), min_size=3, max_size=3), st.integers(0, 255)
)
def test_shading_in_whole_numbers_is_the_affine_map(far, row, rgb, opacity):
    made = shades(far)[row]
    colours = torch.tensor(rgb) * opacity // 255
    layer = pack(torch.cat([colours, torch.tensor([opacity])])[:, None])
    found = shaded(layer, made.flatten()[:, None])
    want = (made.double() / ONE @ torch.tensor([*colours.tolist(), opacity]).double()).clamp(0, opacity)
    for c in range(3):
        assert abs(float(channel(found, c)) - float(want[c])) <= 0.51
    assert channel(found, 3) == opacity


@pytest.mark.parametrize("far", [0.05, 0.2, 0.4])
def test_a_shaded_colour_keeps_its_name_in_any_view(far):
    """All shades that a colour may have, each seen in views that go as far as scenes allow."""
    made = shades(far)
    rows = allowed(made)
    assert torch.equal(rows[0], torch.arange(K))
    how = ViewsConfig(colour=SAFE, gamma=(-SAFE, SAFE))
    for colour in range(1, len(COLOURS)):
        full = torch.tensor([*COLOURS[colour].rgb, 255])
        worn = (torch.einsum("kij,j->ki", made[rows[colour]], full) / ONE).clamp(0, 255)
        assert (named(worn) == colour).all(), COLOURS[colour].name
        seen = (views(worn.round().byte()[..., None, None], how)[..., 0, 0] + 1) * 127.5
        assert (named(seen) == colour).all(), COLOURS[colour].name
        assert len(rows[colour].unique()) > K / 16  # and yet there are many


def test_tinted_things_are_still_called_by_their_colour(atlas):
    """Drawn ones, of several shades and designs: those that the namer is right about as they are."""
    config = PRESETS["colours"].with_(shade=0.3, mirror=0.5, bend=0.4)
    scenes, look = worn(atlas, config, 4, 160)
    shown = {"plain": None, "worn": look}
    cover = masks(scenes, atlas, 64, look=look).visible == 255  # (B, O, H, W)
    right = {}
    for name, how in shown.items():
        pixels = render(scenes, atlas, 64, look=how).float()
        mean = torch.einsum("bohw,bchw->boc", cover.float(), pixels) / cover.sum((2, 3)).clamp(min=1)[..., None]
        right[name] = (named(mean) == scenes.colour)[(cover.sum((2, 3)) > 40) & (scenes.colour > 0)]
    assert right["plain"].float().mean() > 0.7
    assert right["worn"][right["plain"]].float().mean() > 0.97


def test_views_that_would_lie_are_refused(atlas):
    source = ScenesConfig(
        atlas="-", side=16, views=ViewsConfig(colour=0.05, gamma=(-0.05, 0.05), focus=(-0.5, 0.5), noise=0.02)
    )
    assert SceneSource(source, atlas).draw(torch.arange(3)).pixels.shape == (3, 3, 16, 16)
    for views_, says in (
        ({"mirror": 0.5}, "views.mirror"), ({"area": (0.5, 1.0)}, "views.area"), ({"turn": 5.0}, "views.turn"),
        ({"erase": 0.2}, "views.erase"), ({"blur": 0.2}, "views.blur"), ({"colour": 0.3}, "names"),
        ({"gamma": (-0.4, 0.0)}, "names"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            ScenesConfig(atlas="-", views=ViewsConfig(**views_))
    for field, value in (("mirror", 1.5), ("bend", 0.9), ("shade", -0.1)):
        with pytest.raises(ConfigError, match=field):
            SceneConfig(**{field: value})
