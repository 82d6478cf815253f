"""Llama-3.2-Vision's canvas, pixel for pixel and ratio for ratio against transformers."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.mllama.image_processing_pil_mllama import (
    MllamaImageProcessorPil,
    get_all_supported_aspect_ratios,
    get_image_size_fit_to_canvas,
    get_optimal_tiled_canvas,
)

from vitrail.config import convert_registered
from vitrail.errors import ConfigError
from vitrail.processing.image_loading import NORMALIZATIONS, to_pixel_values
from vitrail.processing.mllama_canvas import CanvasPolicy
from vitrail.processing.resolution_policies import AnyResolutionPolicy

NORM = NORMALIZATIONS["clip"]
SIZES = [
    (1, 1),
    (2, 3),
    (3, 1000),
    (1000, 3),
    (17, 31),
    (56, 56),
    (57, 55),
    (112, 56),
    (113, 225),
    (671, 1009),
    (9, 57),
]
sides = st.integers(1, 5000)


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(
    "policy",
    [
        CanvasPolicy(tile_size=56),
        CanvasPolicy(tile_size=42, max_tiles=6, resample="bicubic"),
        CanvasPolicy(max_tiles=1),
    ],
)
def test_pixels(policy, height, width):
    """Noise, so that a pixel out of place shows."""
    noise = np.random.default_rng(height * 10007 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    processor = MllamaImageProcessorPil(
        size={"height": policy.tile_size, "width": policy.tile_size},
        max_image_tiles=policy.max_tiles,
        image_mean=NORM.mean,
        image_std=NORM.std,
        resample={"bilinear": 2, "bicubic": 3}[policy.resample],
    )
    expected = processor(image, return_tensors="pt")
    ours = torch.stack([to_pixel_values(view, NORM.mean, NORM.std) for view in policy.apply(image)])
    assert expected["num_tiles"] == [[len(ours)]]
    torch.testing.assert_close(ours, expected["pixel_values"][0, 0, : len(ours)], rtol=0, atol=0)
    layout = policy.layout(height, width).spans[0].view_grid
    assert 1 + policy.tile_grids.index(layout) == expected["aspect_ratio_ids"].item()


@example(560, 560, 4)
@example(561, 560, 4)
@example(1120, 1120, 4)
@example(1121, 1120, 4)
@example(1, 5000, 4)
@settings(max_examples=300)
@given(sides, sides, st.integers(1, 9))
def test_counts(height, width, most):
    """The canvas and the size on it are theirs, whatever the picture and however many tiles there may be."""
    policy = CanvasPolicy(max_tiles=most)
    cut = policy.layout(height, width)
    tall, wide = get_optimal_tiled_canvas(height, width, most, 560)
    assert cut.spans[0].view_grid == (tall // 560, wide // 560)
    assert {view.resized_size for view in cut.views} == {get_image_size_fit_to_canvas(height, width, tall, wide, 560)}
    assert len(cut.views) == tall * wide // 560**2 and cut.num_tokens == 1600 * len(cut.views)
    assert list(policy.tile_grids) == get_all_supported_aspect_ratios(most)


def test_in_a_table():
    table = CanvasPolicy(max_tiles=6).to_dict()
    assert msgspec.convert(table, AnyResolutionPolicy, dec_hook=convert_registered) == CanvasPolicy(max_tiles=6)


@pytest.mark.parametrize("bad", [{"max_tiles": 0}, {"tile_size": 561}, {"patch_size": 0}])
def test_bad_values(bad):
    with pytest.raises(ConfigError) as caught:
        CanvasPolicy(**bad)
    assert caught.value.remedy
