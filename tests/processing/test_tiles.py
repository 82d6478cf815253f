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

from vitrail.errors import ConfigError
from vitrail.processing.images import NORMS, to_array
from vitrail.processing.resolution import AnyPolicy, Tiles

NORM = NORMS["imagenet"]
SIZES = [(1, 1), (2, 3), (3, 1000), (1000, 3), (17, 31), (449, 447), (448, 896), (671, 1009), (1000, 333), (900, 900)]
sides = st.integers(1, 5000)


def processor(policy: Tiles) -> GotOcr2ImageProcessorPil:
    return GotOcr2ImageProcessorPil(
        size={"height": policy.tile, "width": policy.tile},
        image_mean=NORM.mean,
        image_std=NORM.std,
        crop_to_patches=True,
        min_patches=policy.least,
        max_patches=policy.most,
    )


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("policy", [Tiles(tile=56), Tiles(tile=84, merge=3, least=2, most=5), Tiles(tile=28, most=1)])
def test_pixels(policy, height, width):
    """Noise, so that a pixel out of place shows."""
    noise = np.random.default_rng(height * 10007 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    expected = processor(policy)(image, return_tensors="np")
    views = policy.apply(image)
    assert [len(views)] == list(expected["num_patches"])
    ours = torch.stack([to_array(view, NORM.mean, NORM.std) for view in views])
    torch.testing.assert_close(ours, torch.as_tensor(np.asarray(expected["pixel_values"])), rtol=0, atol=0)


@example(448, 448, 1, 12)  # half of four tiles, not more
@example(634, 634, 1, 12)
@example(4000, 4000, 1, 12)
@example(100, 200, 3, 3)  # no grid of two
@settings(max_examples=200)
@given(sides, sides, st.integers(1, 14), st.integers(0, 14))
def test_counts(height, width, least, more):
    """The grid is theirs, whatever the picture and however many tiles there may be."""
    policy = Tiles(least=least, most=least + more)
    cut = policy.cut(height, width)
    columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), policy.least, policy.most)
    tiles = [view for view in cut.views if view.resized == (rows * 448, columns * 448)]
    assert len(tiles) == rows * columns and len(cut.views) == rows * columns + (rows * columns > 1)
    assert len(cut.views) == processor(policy).get_number_of_image_patches(height, width)
    assert cut.tokens == 256 * len(cut.views)


def test_in_a_table():
    assert msgspec.convert(Tiles(most=6).plain(), AnyPolicy) == Tiles(most=6)


@pytest.mark.parametrize("bad", [{"least": 0}, {"least": 5, "most": 4}, {"tile": 450}, {"merge": 3}])
def test_bad_values(bad):
    with pytest.raises(ConfigError) as caught:
        Tiles(**bad)
    assert caught.value.remedy
