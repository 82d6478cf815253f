"""Pixel for pixel and token for token against transformers; closed forms where there is no reference."""

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import LlavaNextProcessor, LlavaOnevisionProcessor
from transformers.image_processing_utils import select_best_resolution
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next import modeling_llava_next as next_model
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import (
    Siglip2ImageProcessorPil,
    get_image_size_for_max_num_patches,
)

from vitrail.config import convert_registered
from vitrail.errors import ConfigError, ImageError
from vitrail.processing.anyres import LLAVA_NEXT_GRIDS, LLAVA_ONEVISION_GRIDS, AnyResPolicy, HD9Policy
from vitrail.processing.image_loading import NORMALIZATIONS, to_pixel_values
from vitrail.processing.patchify import pad_patches, patchify_blocks, patchify_rows
from vitrail.processing.resolution_policies import (
    PRESETS,
    AnyResolutionPolicy,
    CropPolicy,
    FramedPolicy,
    LetterboxPolicy,
    NaFlexPolicy,
    NaivePolicy,
    NativePolicy,
    get_policy,
)
from vitrail.registry import RESOLUTION_POLICIES

# (height, width): one pixel, strips, primes, exact fits, one off, large.
SIZES = [
    (1, 1),
    (2, 3),
    (3, 1000),
    (1000, 3),
    (17, 31),
    (28, 28),
    (101, 97),
    (224, 224),
    (335, 337),
    (336, 672),
    (672, 336),
    (671, 1009),
    (333, 1000),
    (1000, 333),
    (30, 4000),
    (4000, 30),
    (1009, 1013),
    (1200, 1600),
]
sizes = pytest.mark.parametrize(("height", "width"), SIZES)
sides = st.integers(1, 5000)


def picture(height: int, width: int) -> Image.Image:
    """Noise, so that a pixel out of place shows."""
    noise = np.random.default_rng(height * 10007 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def normalised(views: list[Image.Image], norm: str = "clip") -> torch.Tensor:
    return torch.stack([to_pixel_values(view, *NORMALIZATIONS[norm]) for view in views])


def theirs(processor, image: Image.Image) -> torch.Tensor:
    return torch.as_tensor(np.asarray(processor(image, return_tensors="np")["pixel_values"]))


def same(ours: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(ours, reference, rtol=0, atol=0)


# ── one view ───────────────────────────────────────────────────────────────────────────────────────────────────


@sizes
def test_naive_is_siglip(height, width):
    policy, image = NaivePolicy(image_size=224, patch_size=16), picture(height, width)
    same(normalised(policy.apply(image), "half"), theirs(SiglipImageProcessorPil(), image))
    assert policy.layout(height, width).num_tokens == 196


@sizes
@pytest.mark.parametrize("edge", [None, 256])
def test_crop_is_clip(height, width, edge):
    processor = CLIPImageProcessorPil(size={"shortest_edge": edge or 224})
    policy, image = CropPolicy(image_size=224, shortest_edge=edge), picture(height, width)
    same(normalised(policy.apply(image)), theirs(processor, image))
    assert policy.layout(height, width).num_tokens == 256


@sizes
def test_letterbox_is_llava_pad(height, width):
    processor = LlavaImageProcessorPil(
        do_pad=True, size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
    )
    policy, image = LetterboxPolicy(), picture(height, width)
    same(normalised(policy.apply(image)), theirs(processor, image))
    assert policy.layout(height, width).num_tokens == 576


@given(sides, sides)
def test_crop_rounds_like_the_reference(height, width):
    """Ours divides integers, theirs floats: equal for any size a picture has."""
    short, long = sorted((height, width))
    resized = CropPolicy(image_size=224).layout(height, width).views[0].resized_size
    assert sorted(resized) == sorted((224, int(224 * long / short)))


# ── native and naflex ──────────────────────────────────────────────────────────────────────────────────────────

NATIVES = {
    "qwen2-vl": PRESETS["qwen2-vl"],
    "qwen3-vl": PRESETS["qwen3-vl"],
    "tight": NativePolicy(max_pixels=28 * 28 * 16),
}


@sizes
@pytest.mark.parametrize("name", NATIVES)
def test_native_is_qwen(height, width, name):
    policy, image = NATIVES[name], picture(height, width)
    processor = Qwen2VLImageProcessorPil(
        patch_size=policy.patch_size, min_pixels=policy.min_pixels, max_pixels=policy.max_pixels
    )
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="aspect ratio"):
            theirs(processor, image)
        with pytest.raises(ImageError, match="200"):
            policy.layout(height, width)
        return
    out = processor(image, return_tensors="pt")
    (view,) = policy.apply(image)
    ours, grid = patchify_blocks(to_pixel_values(view), policy.patch_size, merge_size=policy.merge_size)
    same(ours, out["pixel_values"])
    assert out["image_grid_thw"].tolist() == [[grid.t, grid.h, grid.w]]
    cut = policy.layout(height, width)
    assert cut.views[0].grid == grid
    assert cut.num_tokens == grid.num_tokens == math.prod(out["image_grid_thw"][0].tolist()) // 4


@given(sides, sides, st.sampled_from([14, 16]), st.integers(1, 64), st.integers(1, 4096))
def test_native_sizes(height, width, patch, least, most):
    factor = patch * 2
    policy = NativePolicy(
        patch_size=patch, min_pixels=min(least, most) * factor**2, max_pixels=max(least, most) * factor**2
    )
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ImageError):
            policy.layout(height, width)
        return
    reference = smart_resize(height, width, factor, policy.min_pixels, policy.max_pixels)
    cut = policy.layout(height, width)
    assert cut.views[0].resized_size == reference
    assert cut.num_tokens * factor**2 == math.prod(reference)


def test_native_budget_is_an_aim():
    """Both corners named in the docstring, as the reference has them."""
    strip = NativePolicy(max_pixels=28 * 28 * 16).layout(30, 4000)
    assert strip.num_tokens == 46 == math.prod(smart_resize(30, 4000, 28, 56 * 56, 28 * 28 * 16)) // 28**2
    assert NativePolicy().layout(13, 2600).num_tokens < NativePolicy().layout(15, 2600).num_tokens // 3


@sizes
def test_naflex_is_siglip2(height, width):
    policy, image = NaFlexPolicy(), picture(height, width)
    out = Siglip2ImageProcessorPil()(image, return_tensors="pt")
    (view,) = policy.apply(image)
    rows, grid = patchify_rows(to_pixel_values(view, *NORMALIZATIONS["half"]), policy.patch_size)
    padded, mask = pad_patches(rows, policy.max_patches)
    same(padded, out["pixel_values"][0])
    assert mask.int().tolist() == out["pixel_attention_mask"][0].tolist()
    assert [[grid.h, grid.w]] == out["spatial_shapes"].tolist()
    assert policy.layout(height, width).num_tokens == grid.num_tokens == int(mask.sum())


@given(sides, sides, st.sampled_from([14, 16, 32]), st.integers(1, 2048))
def test_naflex_sizes(height, width, patch, most):
    cut = NaFlexPolicy(patch_size=patch, max_patches=most).layout(height, width)
    assert cut.views[0].resized_size == get_image_size_for_max_num_patches(height, width, patch, most)
    assert 1 <= cut.num_tokens <= most


# ── anyres ─────────────────────────────────────────────────────────────────────────────────────────────────────


def pins(grids, tile: int) -> list[list[int]]:
    return [[rows * tile, columns * tile] for rows, columns in grids]


def next_tokens(height: int, width: int) -> int:
    """transformers' own count for LLaVA-NeXT, without building a tokenizer."""
    processor = object.__new__(LlavaNextProcessor)
    processor.image_processor = LlavaNextImageProcessorPil()
    processor.patch_size, processor.num_additional_image_tokens = 14, 0
    return processor._get_number_of_features(height, width, 336, 336)


def onevision_tokens(height: int, width: int, most: int) -> int:
    processor = object.__new__(LlavaOnevisionProcessor)
    processor.image_processor = LlavaOnevisionImageProcessorPil()
    processor.num_image_tokens, processor.vision_aspect_ratio = 729, f"anyres_max_{most}"
    return processor._get_number_of_features(height, width, 384, 384)


@sizes
def test_anyres_is_llava_next(height, width):
    processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": 336},
        crop_size={"height": 336, "width": 336},
        image_grid_pinpoints=pins(LLAVA_NEXT_GRIDS, 336),
    )
    policy, image = AnyResPolicy(), picture(height, width)
    views = policy.apply(image)
    same(normalised(views), theirs(processor, image)[0])
    assert len(views) == next_model.image_size_to_num_patches((height, width), pins(LLAVA_NEXT_GRIDS, 336), 336)
    assert policy.layout(height, width).num_tokens == next_tokens(height, width)


@sizes
def test_anyres_is_llava_onevision(height, width):
    policy, image = PRESETS["llava-onevision"], picture(height, width)
    processor = LlavaOnevisionImageProcessorPil(image_grid_pinpoints=pins(LLAVA_ONEVISION_GRIDS, 384))
    same(normalised(policy.apply(image)), theirs(processor, image)[0])
    assert policy.layout(height, width).num_tokens == onevision_tokens(height, width, 9)


@given(sides, sides)
def test_anyres_counts(height, width):
    assert AnyResPolicy().layout(height, width).num_tokens == next_tokens(height, width)


shapes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=8)


@given(sides, sides, shapes)
def test_best_grid(height, width, grids):
    """Any list in any order: what wins among equals depends on both."""
    layout = AnyResPolicy(grids=tuple(grids)).layout(height, width).spans[1].view_grid
    assert select_best_resolution((height, width), pins(grids, 336)) == (layout[0] * 336, layout[1] * 336)


@example(1152, 700, 4)  # 81 × 50 tokens for 4 × 729: 1.18 times too many on a side, shrunk
@example(1150, 560, 4)  # 1.05, let be
@settings(max_examples=50)
@given(sides, sides, st.sampled_from([1, 2, 4, 9]))
def test_anyres_max_counts(height, width, most):
    policy = PRESETS["llava-onevision"].replace(max_tiles=most)
    assert policy.layout(height, width).num_tokens == onevision_tokens(height, width, most)


@pytest.mark.parametrize(("height", "width"), [(480, 640), (640, 480), (333, 1000), (50, 2000), (3, 1000)])
def test_spans_say_which_tokens_the_model_packs(height, width):
    """Pack features by the span alone, and by transformers' model code: the same tokens in the same order."""
    cut = AnyResPolicy().layout(height, width)
    base, tiles = cut.spans
    rows, columns = tiles.view_grid
    views = torch.arange(len(cut.views) * 576.0).reshape(-1, 576, 1)
    newline = torch.tensor([-1.0])

    mosaic = (
        views[tiles.first_view :].reshape(rows, columns, 24, 24).permute(0, 2, 1, 3).reshape(rows * 24, columns * 24)
    )
    top, left, high, wide = tiles.window
    kept = mosaic[top : top + high, left : left + wide]
    ours = torch.cat([views[base.first_view, :, 0], torch.cat([kept, newline.expand(high, 1)], 1).flatten()])

    model = object.__new__(next_model.LlavaNextModel)
    torch.nn.Module.__init__(model)
    tower = type("", (), {"image_size": 336, "patch_size": 14})
    model.config = type("", (), {"vision_config": tower, "image_grid_pinpoints": pins(LLAVA_NEXT_GRIDS, 336)})
    (packed,), _ = model.pack_image_features([views], torch.tensor([[height, width]]), "default", newline)
    assert ours.tolist() == packed[:, 0].tolist()
    assert cut.num_tokens == len(packed)


def test_shrunk_spans_have_the_model_size():
    cut = PRESETS["llava-onevision"].layout(2000, 2300)
    rows, columns = cut.spans[1].view_grid
    model = object.__new__(LlavaOnevisionModel)
    torch.nn.Module.__init__(model)
    tower = type("", (), {"image_size": 384, "patch_size": 14})
    model.config = type("", (), {"vision_config": tower, "image_grid_pinpoints": pins(LLAVA_ONEVISION_GRIDS, 384)})
    features = torch.zeros(1 + rows * columns, 729, 1)
    _, (count,) = model.pack_image_features([features], torch.tensor([[2000, 2300]]), torch.zeros(1))
    assert cut.num_tokens == count
    assert cut.spans[1].size[0] < cut.spans[1].window[2]


def test_anyres_pins():
    """A square picture: base 24², a 48 × 48 mosaic with 48 newlines. A strip under one token row: the base alone."""
    assert AnyResPolicy().layout(672, 672).num_tokens == 576 + 48 * 49 == 2928
    assert AnyResPolicy().layout(336, 672).num_tokens == 576 + 24 * 49
    assert AnyResPolicy().layout(3, 1000).num_tokens == 576 == next_tokens(3, 1000)
    shapes = {(600, 1200): (1, 2), (1200, 600): (2, 1), (900, 900): (2, 2), (400, 1200): (1, 3), (1200, 400): (3, 1)}
    assert {size: AnyResPolicy().layout(*size).spans[1].view_grid for size in shapes} == shapes
    assert AnyResPolicy().layout(9, 9).spans[1].view_grid == (
        1,
        2,
    )  # every grid holds it whole: the first of the smallest


# ── hd9 ────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(sides, sides)
def test_hd9_is_always_1450(height, width):
    cut = HD9Policy().layout(height, width)
    assert cut.num_tokens == 1450 == 10 * 144 + 10
    assert len(cut.views) == 10
    # 3×3 convolution, stride 2, padding 1 on 24 patches
    assert all(view.grid.num_rows == (24 + 2 - 3) // 2 + 1 for view in cut.views)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (17, 31), (700, 300), (1008, 1008), (1200, 1600)])
def test_hd9_views_are_the_padded_square(height, width):
    image = picture(height, width)
    side = max(height, width)
    padded = Image.new("RGB", (side, side), "white")
    padded.paste(image, ((side - width) // 2, (side - height) // 2))
    whole, *tiles = (np.asarray(view) for view in HD9Policy().apply(image))
    assert np.array_equal(whole, np.asarray(padded.resize((336, 336), Image.Resampling.BICUBIC)))
    mosaic = np.block([[[tiles[row * 3 + column]] for column in range(3)] for row in range(3)])
    assert np.array_equal(mosaic, np.asarray(padded.resize((1008, 1008), Image.Resampling.BICUBIC)))


# ── all of them ────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.sampled_from(sorted(RESOLUTION_POLICIES)), st.integers(1, 600), st.integers(1, 600))
@settings(max_examples=60)
def test_apply_matches_layout(name, height, width):
    policy = get_policy(name)
    if name == "native" and max(height, width) > 200 * min(height, width):
        return
    cut = policy.layout(height, width)
    views = policy.apply(Image.new("RGB", (width, height)))
    assert [(view.height, view.width) for view in views] == [view.canvas_size for view in cut.views]
    assert all(view.mode == "RGB" for view in views)
    for span in cut.spans:
        grid = cut.views[span.first_view].grid
        top, left, rows, columns = span.window
        assert 0 <= top <= top + rows <= span.view_grid[0] * grid.num_rows
        assert 0 <= left <= left + columns <= span.view_grid[1] * grid.num_columns
    last = cut.spans[-1]
    assert last.first_view + math.prod(last.view_grid) == len(cut.views)


@given(st.sampled_from(sorted(RESOLUTION_POLICIES)), st.integers(20, 600), st.integers(20, 600))
@settings(max_examples=60)
def test_picture_says_where_padding_is(name, height, width):
    """A white picture on black padding: a canvas pixel well inside the picture is white, well outside black."""
    policy = get_policy(name)
    if "fill_colour" in policy.__struct_fields__:
        policy = policy.replace(fill_colour=(0, 0, 0))
    cut = policy.layout(height, width)
    for view, made in zip(cut.views, policy.apply(Image.new("RGB", (width, height), "white")), strict=True):
        top, left, high, wide = cut.image_box(view)
        y, x = np.mgrid[: view.canvas_size[0], : view.canvas_size[1]] + 0.5
        slack = 3 * max(1, view.resized_size[0] / view.source[2])  # the reach of the bicubic filter
        depth = np.minimum(np.minimum(y - top, top + high - y), np.minimum(x - left, left + wide - x))
        pixels = np.asarray(made)[..., 0]
        assert (pixels[depth > slack] == 255).all()
        assert (pixels[depth < -slack] == 0).all()


def test_stretch():
    assert NaivePolicy().layout(100, 200).views[0].stretch == 0.5
    assert LetterboxPolicy().layout(100, 200).views[0].stretch == 1
    assert FramedPolicy().layout(100, 200).views[0].stretch == CropPolicy().layout(100, 200).views[0].stretch == 1


@pytest.mark.parametrize("name", [*RESOLUTION_POLICIES, *PRESETS])
@pytest.mark.parametrize(("height", "width"), [(0, 5), (5, 0), (-1, 4)])
def test_no_picture(name, height, width):
    with pytest.raises(ImageError, match="at least one pixel"):
        get_policy(name).layout(height, width)


def test_only_rgb():
    with pytest.raises(ImageError, match="load_image"):
        NaivePolicy().apply(Image.new("L", (9, 9)))


@pytest.mark.parametrize("policy", [LetterboxPolicy(), CropPolicy(), HD9Policy()])
def test_strips_do_not_explode(policy):
    assert policy.layout(1, 20_000_000).num_tokens > 0
    with pytest.raises(ImageError, match="too thin"):
        policy.apply(Image.new("RGB", (300_000, 1)))


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (NaivePolicy, {"image_size": 384}),
        (NaivePolicy, {"image_size": 0}),
        (NaivePolicy, {"patch_size": 0}),
        (NaivePolicy, {"unread_pixels": 20}),
        (NaivePolicy, {"unread_pixels": -1}),
        (LetterboxPolicy, {"image_size": 337}),
        (FramedPolicy, {"image_size": 385}),
        (FramedPolicy, {"min_size": 0}),
        (FramedPolicy, {"high_res_size": 10}),
        (CropPolicy, {"image_size": 100}),
        (CropPolicy, {"shortest_edge": 300}),
        (NativePolicy, {"min_pixels": 10, "max_pixels": 9}),
        (NativePolicy, {"min_pixels": 0}),
        (NativePolicy, {"min_pixels": 1, "max_pixels": 28 * 28 - 1}),
        (NativePolicy, {"patch_size": 0}),
        (NativePolicy, {"merge_size": 0}),
        (NaFlexPolicy, {"max_patches": 0}),
        (NaFlexPolicy, {"patch_size": -1}),
        (AnyResPolicy, {"grids": ()}),
        (AnyResPolicy, {"grids": ((0, 1),)}),
        (AnyResPolicy, {"max_tiles": 0}),
        (AnyResPolicy, {"tile_size": 384}),
        (HD9Policy, {"patch_size": 13}),
        (HD9Policy, {"merge_size": 5}),
    ],
)
def test_bad_values(kind, bad):
    with pytest.raises(ConfigError) as caught:
        kind(**bad)
    assert caught.value.remedy


@pytest.mark.parametrize("policy", [*(kind() for kind in RESOLUTION_POLICIES.values()), *PRESETS.values()])
def test_plain_and_back(policy):
    """A recipe can name any policy by its tag."""
    union = msgspec.convert(policy.to_dict(), AnyResolutionPolicy, dec_hook=convert_registered)
    assert union == policy == type(policy).from_dict(policy.to_dict())


def test_named():
    assert get_policy("llava-next") == AnyResPolicy() == get_policy("anyres")
    with pytest.raises(ConfigError, match="naflex"):
        get_policy("naflx")


def test_native_budgets_are_qwens():
    ours, theirs = NativePolicy(), Qwen2VLImageProcessorPil().size
    assert (ours.min_pixels, ours.max_pixels) == (theirs["shortest_edge"], theirs["longest_edge"]) == (3136, 1_003_520)
