import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers import interpreted
from vitrail.data.scenes import backgrounds
from vitrail.data.scenes import scene_renderer as module
from vitrail.data.scenes.atlas import CELL_SIZES
from vitrail.data.scenes.config import PRESETS
from vitrail.data.scenes.packed_pixels import blend_over, extract_channel, lerp, pack_channels, scale_to_256
from vitrail.data.scenes.scene import COLOURS, GRID, SceneBatch
from vitrail.data.scenes.scene_renderer import render_masks, render_scenes
from vitrail.data.scenes.scene_sampler import sample_scenes
from vitrail.errors import ImageError

MIXED = PRESETS["mixed"].replace(tint_probability=0.5)
sizes = st.one_of(st.integers(1, 150), st.tuples(st.integers(1, 120), st.integers(1, 120)))


def scene(atlas, objects, background: int = 0) -> SceneBatch:
    """One scene of (id, colour, box in shares)."""
    rows = [atlas.table.id.index(id) for id, _, _ in objects]
    boxes = [[round(share * GRID) for share in box] for _, _, box in objects]
    colours = [[c.name for c in COLOURS].index(colour) for _, colour, _ in objects]
    none = torch.full((1, len(objects)), -1)
    zero = torch.zeros(1, dtype=torch.int64)
    return SceneBatch(
        zero, torch.tensor([rows]), torch.tensor([colours]), torch.tensor([boxes]), none, zero + background
    )


@settings(max_examples=25)
@given(sizes, st.integers(0, 1000))
def test_both_ways_give_the_same_pixels_and_masks(atlas, size, seed):
    scenes = sample_scenes(MIXED, atlas.table, seed, torch.arange(5))
    assert torch.equal(render_scenes(scenes, atlas, size), render_scenes(scenes, atlas, size, method="everywhere"))
    for a, b in zip(
        render_masks(scenes, atlas, size), render_masks(scenes, atlas, size, method="everywhere"), strict=True
    ):
        assert torch.equal(a, b)


def test_a_batch_may_be_cut_and_ordered_anyhow(atlas, monkeypatch):
    scenes = sample_scenes(MIXED, atlas.table, 0, torch.arange(40))
    whole = render_scenes(scenes, atlas, 48)
    order = torch.randperm(40)
    assert torch.equal(render_scenes(scenes[order], atlas, 48), whole[order])
    assert torch.equal(torch.cat([render_scenes(scenes[i : i + 7], atlas, 48) for i in range(0, 40, 7)]), whole)
    monkeypatch.setitem(module.CHUNK_PIXELS, "cpu", 48 * 48 * 3)
    assert torch.equal(render_scenes(scenes, atlas, 48), whole)
    assert torch.equal(render_scenes(scenes, atlas, 48, method="everywhere"), whole)


@settings(max_examples=60)
@given(st.integers(8, 200), st.integers(8, 200), st.data())
def test_the_box_is_tight_around_what_is_drawn(atlas, H, W, data):
    name = data.draw(st.sampled_from(["square", "bar", "tower", "cross", "step", "stripe"]))
    row = atlas.table.id.index(f"left/{name}")
    aspect = atlas.table.aspect[row].double() / GRID
    size = data.draw(st.floats(0.15, 0.9)) * min(H, W)  # in pixels
    wide, high = (aspect * size).tolist()
    x, y = data.draw(st.floats(0, W - wide)), data.draw(st.floats(0, H - high))
    box = [x / W, y / H, (x + wide) / W, (y + high) / H]
    whole = render_masks(scene(atlas, [(f"left/{name}", "", box)]), atlas, (H, W)).amodal[0, 0]
    edge = 64 if size < CELL_SIZES[-1] else 128  # a quarter of a pixel is enough to be seen; stretched edges are soft
    ys, xs = (whole >= edge).nonzero(as_tuple=True)
    if wide >= 2 and high >= 2:
        found = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
        assert all(abs(a.item() - b) <= 1 for a, b in zip(found, [x, y, x + wide, y + high], strict=True))


@pytest.mark.parametrize("side", [16, 33, 64, 100, 224])
def test_boxes_of_round_shapes_and_words_are_tight_too(atlas, side):
    for id in ("right/ball", "left/egg", "left/tent", "left/ring", "letters/aileron/tea"):
        row = atlas.table.id.index(id)
        w, h = (0.7 * atlas.table.aspect[row] / GRID).tolist()
        box = (0.13, 0.21, 0.13 + w, 0.21 + h)
        whole = render_masks(scene(atlas, [(id, "", box)]), atlas, side).amodal[0, 0]
        ys, xs = (whole >= 64).nonzero(as_tuple=True)
        found = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
        near = max(1, 0.7 * side / CELL_SIZES[-1] / 2)  # a pixel; half a texel where the largest level is stretched
        assert all(abs(a.item() - b * side) <= near for a, b in zip(found, box, strict=True)), id


def test_higher_slots_cover_lower_ones(atlas):
    box = (0.2, 0.2, 0.7, 0.7)
    pixels = render_scenes(scene(atlas, [("left/square", "red", box), ("left/square", "blue", box)]), atlas, 40)
    red, blue = (torch.tensor(c.rgb) for c in COLOURS if c.name in ("red", "blue"))
    assert (pixels[0, :, 18, 18] - blue).abs().max() <= 2
    pixels = render_scenes(scene(atlas, [("left/square", "blue", box), ("left/square", "red", box)]), atlas, 40)
    assert (pixels[0, :, 18, 18] - red).abs().max() <= 2


def test_visible_parts_and_the_background_add_up(atlas):
    scenes = sample_scenes(PRESETS["crowded"], atlas.table, 1, torch.arange(30))
    whole, visible, background = render_masks(scenes, atlas, 50)
    assert (visible.int().sum(1) + background == 255).all()
    assert (visible <= whole).all()
    last = scenes.num_objects - 1
    rows = torch.arange(30)
    assert (visible[rows, last].int() - whole[rows, last]).abs().max() <= 1  # the nearest is seen whole
    assert not whole[~scenes.is_filled].any()
    # Where masks say that nothing lies, the picture is the background's.
    pixels = render_scenes(scenes, atlas, 50)
    empty = backgrounds.render_backgrounds(scenes.background, 50, 50)
    bare = background == 255
    assert bare.float().mean() > 0.1
    for c in range(3):
        assert torch.equal(pixels[:, c][bare].long(), extract_channel(empty, c)[bare])


def test_opacity_blends_with_the_background(atlas):
    scenes = sample_scenes(PRESETS["plain"], atlas.table, 1, torch.arange(12))
    whole, faint, bare = (render_scenes(scenes, atlas, 50, opacity=x).int() for x in (1.0, 0.25, 0.0))
    assert torch.equal(render_scenes(scenes, atlas, 50).int(), whole)
    empty = backgrounds.render_backgrounds(scenes.background, 50, 50)
    assert all(torch.equal(bare[:, c].long(), extract_channel(empty, c)) for c in range(3))
    assert (faint - (0.25 * whole + 0.75 * bare)).abs().max() <= 2  # nothing overlaps in plain scenes
    other = render_scenes(scenes, atlas, 50, method="everywhere", opacity=0.25)
    assert torch.equal(other.int(), faint)


def test_tints_have_the_colour_they_are_called(atlas):
    def nearest_colour(rgb: torch.Tensor) -> str:
        return min(COLOURS[1:], key=lambda c: (rgb - torch.tensor(c.rgb)).abs().sum().item()).name

    for colour in COLOURS[1:]:
        for id in ("left/ball", "right/tent", "left/square"):
            drawn = scene(atlas, [(id, colour.name, (0.1, 0.1, 0.9, 0.9))])
            covered = render_masks(drawn, atlas, 64).amodal[0, 0] == 255
            mean = render_scenes(drawn, atlas, 64)[0][:, covered].float().mean(1)
            assert nearest_colour(mean) == colour.name, (id, colour.name, mean)


def test_a_tint_keeps_shades(atlas):
    box = (0.1, 0.1, 0.9, 0.9)
    pixels = render_scenes(scene(atlas, [("left/stripe", "green", box)]), atlas, 64)[0].float()
    dark, light = pixels[:, 16, 32], pixels[:, 48, 32]  # the lower half is drawn nearly white
    assert light.sum() > dark.sum() + 100
    assert dark.argmax() == light.argmax() == 1


def test_words_of_any_colour_stand_out(atlas):
    for colour in COLOURS:
        for background in range(12):
            drawn = scene(atlas, [("letters/aileron-bold/tea", colour.name, (0.1, 0.3, 0.9, 0.7))], background)
            covered = render_masks(drawn, atlas, 96).amodal[0, 0] == 255
            inside = render_scenes(drawn, atlas, 96)[0][:, covered].float().mean(0)
            assert inside.quantile(0.95) - inside.quantile(0.05) > 80, colour.name


# ── against Pillow ─────────────────────────────────────────────────────────────────────────────────────────────


def composed(scenes: SceneBatch, number: int, sprites, side: int, times: int = 8) -> np.ndarray:
    """The same scene by Pillow alone: pasted at `times` the size from the sprites as they came, and averaged."""
    ground = backgrounds.render_backgrounds(scenes.background[number : number + 1], side, side)[0]
    rgb = torch.stack([extract_channel(ground, c) for c in range(3)], -1).byte().numpy()
    canvas = Image.fromarray(rgb).resize((side * times, side * times), Image.Resampling.NEAREST).convert("RGBA")
    for slot in range(int(scenes.num_objects[number])):
        image = Image.fromarray(sprites[int(scenes.sprite[number, slot])].rgba)
        image = image.crop(image.getchannel("A").point(lambda a: 255 * (a >= 32)).getbbox())
        x0, y0, x1, y1 = (round(n * side * times / GRID) for n in scenes.box[number, slot].tolist())
        image = image.resize((max(1, x1 - x0), max(1, y1 - y0)), Image.Resampling.LANCZOS)
        canvas.alpha_composite(image, (x0, y0))
    return np.asarray(canvas.convert("RGB").reduce(times))


@pytest.mark.parametrize("side", [48, 64, 96])
def test_pixels_are_nearly_those_of_pillow(atlas, sprites, side):
    scenes = sample_scenes(MIXED.replace(tint_probability=0.0), atlas.table, 3, torch.arange(24))
    ours = render_scenes(scenes, atlas, side).permute(0, 2, 3, 1).numpy().astype(int)
    theirs = np.stack([composed(scenes, i, sprites, side) for i in range(24)]).astype(int)
    covered = (render_masks(scenes, atlas, side).background < 255).numpy()
    apart = np.abs(ours - theirs).mean(-1)
    assert apart.mean() < 1.0
    assert apart[covered].mean() < 4.0  # levels of 255, where objects lie: edges and letters
    assert np.abs((ours - theirs)[covered].mean()) < 0.5  # and no lighter or darker


def test_a_small_picture_is_a_large_one_reduced(atlas):
    scenes = sample_scenes(MIXED, atlas.table, 4, torch.arange(20))
    small = render_scenes(scenes, atlas, 40).float()
    large = torch.nn.functional.avg_pool2d(render_scenes(scenes, atlas, 160).float(), 4)
    assert (small - large).abs().mean() < 2.5


# ── arithmetic ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_blending_does_not_overflow_lanes():
    opacity, below = torch.arange(256)[:, None], torch.arange(256)
    for share in (0, 1, 2):
        colour = (opacity * share + 1) // 2
        top = pack_channels(torch.stack([colour, opacity, opacity * 0, opacity]))
        under = pack_channels(torch.stack([below, below, below, torch.full_like(below, 255)]))
        out = blend_over(top, under)
        assert (out & ~0x00FF00FF00FF00FF == 0).all()
        assert (extract_channel(out, 3) == 255).all()
        exact = colour + below * (1 - opacity / 255)
        assert (extract_channel(out, 0) - exact).abs().max() <= 1.01
    assert scale_to_256(torch.tensor([0, 127, 128, 255])).tolist() == [0, 127, 129, 256]


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 256))
def test_lerp_is_the_rounded_mean(a, b, share):
    mixed = lerp(
        pack_channels(torch.tensor([a, b, 0, 255])), pack_channels(torch.tensor([b, a, 255, 255])), torch.tensor(share)
    )
    expected = [(p * (256 - share) + q * share + 128) // 256 for p, q in ((a, b), (b, a), (0, 255), (255, 255))]
    assert [extract_channel(mixed, c).item() for c in range(4)] == expected


# ── backgrounds and errors ─────────────────────────────────────────────────────────────────────────────────────


def test_backgrounds_are_opaque_varied_and_the_same_at_any_size():
    numbers = torch.arange(600)
    large = backgrounds.render_backgrounds(numbers, 64, 64)
    assert (extract_channel(large, 3) == 255).all()
    rgb = torch.stack([extract_channel(large, c) for c in range(3)], 1).float()
    spread = rgb.flatten(2).std(2).mean(1)
    for kind, row in enumerate(backgrounds.BACKGROUND_KINDS):
        here = spread[numbers % len(backgrounds.BACKGROUND_KINDS) == kind]
        assert (here == 0).all() if row.name == "flat" else (here > 2).float().mean() > 0.9, row.name
    assert rgb.mean((2, 3)).std(0).min() > 25  # they differ from one another
    noise = rgb[numbers % len(backgrounds.BACKGROUND_KINDS) == backgrounds.BACKGROUND_NAMES.index("noise")][:, 0]
    steps = noise.diff(dim=2).abs().flatten(1).amax(1)  # smooth: no step is near the whole range
    assert (steps <= 0.5 * (noise.flatten(1).amax(1) - noise.flatten(1).amin(1)) + 1).all()
    smooth = numbers % len(backgrounds.BACKGROUND_KINDS) == backgrounds.BACKGROUND_NAMES.index("photo")
    small = backgrounds.render_backgrounds(numbers[smooth], 32, 32)
    reduced = torch.nn.functional.avg_pool2d(rgb[smooth], 2)
    assert (reduced[:, 0] - extract_channel(small, 0)).abs().max() < 6


def test_invalid_sizes_and_devices(atlas):
    scenes = sample_scenes(MIXED, atlas.table, 0, torch.arange(2))
    with pytest.raises(ImageError, match="0 × 5"):
        render_scenes(scenes, atlas, (0, 5))
    with pytest.raises(ImageError, match="meta"):
        render_scenes(scenes.to("meta"), atlas, 8)
    assert render_scenes(scenes[:0], atlas, 8).shape == (0, 3, 8, 8)


FUSED = """
import sys
import torch
from vitrail.data.scenes.appearance import AppearanceSampler
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.config import PRESETS
from vitrail.data.scenes.scene_renderer import render_scenes
from vitrail.data.scenes.scene_sampler import sample_scenes

atlas, plain = Atlas.load(sys.argv[1]), PRESETS["mixed"].replace(tint_probability=0.5)
for size in (1, (13, 40)):  # one block, and two blocks of which the first ends within a line
    for config in (plain, plain.replace(flip_probability=0.5, shape_jitter=0.4, colour_jitter=0.3)):
        for count in (0, 4):
            scenes = sample_scenes(config, atlas.table, 3, torch.arange(count))
            appearance = AppearanceSampler(config, atlas.table)(3, scenes)
            for opacity in (1.0, 0.3):
                expected = render_scenes(scenes, atlas, size, "everywhere", opacity, appearance)
                assert torch.equal(render_scenes(scenes, atlas, size, "fused", opacity, appearance), expected)
print("agreed")
"""


def test_one_kernel_draws_the_same_bits(atlas, tmp_path):
    pytest.importorskip("triton")
    atlas.save(tmp_path / "atlas.safetensors")
    interpreted(FUSED, str(tmp_path / "atlas.safetensors"))


def test_unknown_rendering_method_is_refused(atlas):
    scenes = sample_scenes(MIXED, atlas.table, 0, torch.arange(2))
    for draw in (render_scenes, render_masks):
        with pytest.raises(ImageError, match="unknown rendering method False"):
            draw(scenes, atlas, 8, False)


def test_the_kernel_of_a_gpu_is_refused_on_a_cpu(atlas):
    pytest.importorskip("triton")
    with pytest.raises(ImageError, match="needs a GPU, and the scenes are on cpu"):
        render_scenes(sample_scenes(MIXED, atlas.table, 0, torch.arange(2)), atlas, 8, "fused")


@pytest.mark.slow
def test_a_compiled_renderer_draws_the_same_bits(atlas):
    scenes = sample_scenes(PRESETS["relations"].replace(tint_probability=0.5), atlas.table, 0, torch.arange(8))
    expected = render_scenes(scenes, atlas, 24)
    compiled = torch.compile(lambda scenes: render_scenes(scenes, atlas, 24, method="everywhere"), fullgraph=True)
    assert torch.equal(compiled(scenes), expected)
