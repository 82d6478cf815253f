"""InternVL's tiles, pixel for pixel and token for token against transformers."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)

from vitrail.config import convert_registered
from vitrail.errors import ConfigError
from vitrail.processing.image_loading import NORMALIZATIONS, to_pixel_values
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.processing.resolution_policies import AnyResolutionPolicy

NORM = NORMALIZATIONS["imagenet"]
SIZES = [(1, 1), (2, 3), (3, 1000), (1000, 3), (17, 31), (449, 447), (448, 896), (671, 1009), (1000, 333), (900, 900)]
sides = st.integers(1, 5000)


def processor(policy: TilesPolicy) -> GotOcr2ImageProcessorPil:
    return GotOcr2ImageProcessorPil(
        size={"height": policy.tile_size, "width": policy.tile_size},
        image_mean=NORM.mean,
        image_std=NORM.std,
        crop_to_patches=True,
        min_patches=policy.min_tiles,
        max_patches=policy.max_tiles,
    )


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(
    "policy",
    [
        TilesPolicy(tile_size=56),
        TilesPolicy(tile_size=84, merge_size=3, min_tiles=2, max_tiles=5),
        TilesPolicy(tile_size=28, max_tiles=1),
    ],
)
def test_pixels(policy, height, width):
    """Noise, so that a pixel out of place shows."""
    noise = np.random.default_rng(height * 10007 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    expected = processor(policy)(image, return_tensors="np")
    views = policy.apply(image)
    assert [len(views)] == list(expected["num_patches"])
    ours = torch.stack([to_pixel_values(view, NORM.mean, NORM.std) for view in views])
    torch.testing.assert_close(ours, torch.as_tensor(np.asarray(expected["pixel_values"])), rtol=0, atol=0)


@example(448, 448, 1, 12)  # half of four tiles, not more
@example(634, 634, 1, 12)
@example(4000, 4000, 1, 12)
@example(100, 200, 3, 3)  # no grid of two
@settings(max_examples=200)
@given(sides, sides, st.integers(1, 14), st.integers(0, 14))
def test_counts(height, width, least, more):
    """The grid is theirs, whatever the picture and however many tiles there may be."""
    policy = TilesPolicy(min_tiles=least, max_tiles=least + more)
    cut = policy.layout(height, width)
    columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), policy.min_tiles, policy.max_tiles)
    tiles = [view for view in cut.views if view.resized_size == (rows * 448, columns * 448)]
    assert len(tiles) == rows * columns and len(cut.views) == rows * columns + (rows * columns > 1)
    assert len(cut.views) == processor(policy).get_number_of_image_patches(height, width)
    assert cut.num_tokens == 256 * len(cut.views)


def test_in_a_table():
    table = TilesPolicy(max_tiles=6).to_dict()
    assert msgspec.convert(table, AnyResolutionPolicy, dec_hook=convert_registered) == TilesPolicy(max_tiles=6)


@pytest.mark.parametrize(
    "bad", [{"min_tiles": 0}, {"min_tiles": 5, "max_tiles": 4}, {"tile_size": 450}, {"merge_size": 3}]
)
def test_bad_values(bad):
    with pytest.raises(ConfigError) as caught:
        TilesPolicy(**bad)
    assert caught.value.remedy
