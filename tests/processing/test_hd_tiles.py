"""Tiles of Phi-3-vision and Phi-4-multimodal match the published processors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.processing.hd_tiles import DynamicHDPolicy, HDTransformPolicy

# Recorded from the published processors, for (height, width): (rows, columns) of tiles and tokens of Phi-3-vision with
# 4 and 16 crops, then these and covered patches of all views of Phi-4-multimodal with 4 and 36 crops.
RECORDED = {
    (336, 336): [((2, 2), 757), ((4, 4), 2509), ((1, 1), 545, 2048), ((1, 1), 545, 2048)],
    (40, 90): [((1, 2), 457), ((3, 5), 2353), ((1, 1), 409, 1504), ((1, 1), 409, 1504)],
    (90, 40): [((2, 1), 469), ((5, 3), 2377), ((1, 1), 417, 1504), ((1, 1), 417, 1504)],
    (500, 700): [((2, 2), 757), ((3, 4), 1921), ((2, 2), 1032, 3968), ((2, 2), 1032, 3968)],
    (1000, 999): [((2, 2), 757), ((4, 4), 2509), ((2, 2), 1329, 5120), ((3, 3), 2625, 10240)],
    (20, 300): [((1, 4), 745), ((1, 15), 2329), ((1, 1), 307, 1120), ((1, 1), 307, 1120)],
    (300, 20): [((4, 1), 781), ((15, 1), 2497), ((1, 1), 321, 1120), ((1, 1), 321, 1120)],
    (449, 896): [((1, 2), 457), ((3, 5), 2353), ((2, 2), 834, 3136), ((2, 2), 834, 3136)],
    (448, 448): [((2, 2), 757), ((4, 4), 2509), ((1, 1), 545, 2048), ((1, 1), 545, 2048)],
    (3000, 1200): [((2, 1), 469), ((5, 2), 1657), ((3, 1), 953, 3584), ((7, 3), 5425, 21184)],
    (1152, 497): [((2, 1), 469), ((5, 3), 2377), ((2, 1), 753, 2816), ((3, 2), 1329, 5056)],
}


@pytest.mark.parametrize("size", RECORDED)
def test_tiles_and_tokens_are_those_recorded(size):
    for max_tiles, (tiles, tokens) in zip((4, 16), RECORDED[size][:2], strict=True):
        layout = HDTransformPolicy(max_tiles=max_tiles).layout(*size)
        assert (layout.spans[0].view_grid, layout.num_tokens) == (tiles, tokens)
    for max_tiles, (tiles, tokens, covered) in zip((4, 36), RECORDED[size][2:], strict=True):
        policy = DynamicHDPolicy(max_tiles=max_tiles)
        layout = policy.layout(*size)
        assert (layout.spans[0].view_grid, layout.num_tokens) == (tiles, tokens)
        assert sum(h * w for h, w in policy.list_covered_grids(*size)) == covered


def picture(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def expected_views(canvas: Image.Image, side: int) -> list[Tensor]:
    """Normalize a canvas, interpolate the whole, and cut tiles row by row."""
    pixels = (torch.from_numpy(np.array(canvas)).movedim(-1, 0) / 255 - 0.4) / 0.3
    whole = torch.nn.functional.interpolate(pixels[None], size=(side, side), mode="bicubic", align_corners=False)[0]
    rows, columns = (length // side for length in pixels.shape[1:])
    places = [(y * side, x * side) for y in range(rows) for x in range(columns)]
    return [*(pixels[:, y : y + side, x : x + side] for y, x in places), whole]


def check_views(policy, image: Image.Image, canvas: Image.Image) -> None:
    expected = expected_views(canvas, policy.tile_size)
    found = policy.to_pixel_values(image, (0.4,) * 3, (0.3,) * 3)
    assert len(found) == len(expected) == len(policy.layout(image.height, image.width).views)
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-5)
    for view, reference in zip(policy.apply(image), expected, strict=True):  # for display, in whole levels
        levels = (reference * 0.3 + 0.4).mul(255).clamp(0, 255).movedim(0, -1).numpy()
        assert np.abs(np.array(view) - levels).max() <= 0.51


@pytest.mark.parametrize("size", [(40, 90), (90, 40), (33, 31), (7, 100), (60, 60)])
@pytest.mark.parametrize("max_tiles", [1, 4, 7])
def test_pixels_of_phi3_vision(size, max_tiles):
    """A portrait is transposed, enlarged and transposed back; then half of the padding is above or left."""
    side, image = 12, picture(*size)
    wide = image.transpose(Image.Transpose.TRANSPOSE) if image.width < image.height else image
    ratio, scale = wide.width / wide.height, 1
    while scale * math.ceil(scale / ratio) <= max_tiles:
        scale += 1
    width = (scale - 1) * side
    height = int(width / ratio) or 1
    resized, padded = wide.resize((width, height), Image.Resampling.BILINEAR), math.ceil(height / side) * side
    canvas = Image.new("RGB", (width, padded), (255, 255, 255))
    canvas.paste(resized, (0, (padded - height) // 2))
    canvas = canvas if wide is image else canvas.transpose(Image.Transpose.TRANSPOSE)
    check_views(HDTransformPolicy(tile_size=side, patch_size=3, max_tiles=max_tiles), image, canvas)


@pytest.mark.parametrize(
    ("size", "tiles"), [((40, 90), (4, 8)), ((90, 40), (8, 4)), ((33, 31), (3, 3)), ((12, 12), (1, 1))]
)
def test_pixels_of_phi4_multimodal(size, tiles):
    """The image keeps its aspect ratio at the top left."""
    side, image = 12, picture(*size)
    tall, wide = (count * side for count in tiles)
    scale = min(tall / image.height, wide / image.width)
    resized = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BILINEAR)
    canvas = Image.new("RGB", (wide, tall), (255, 255, 255))
    canvas.paste(resized, (0, 0))
    check_views(DynamicHDPolicy(tile_size=side, patch_size=3), image, canvas)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 40))
def test_covered_patches_and_tokens_agree(height, width, max_tiles):
    """Every tile has covered patches, and a token is read if the image covers one of its patches."""
    policy = DynamicHDPolicy(tile_size=56, max_tiles=max_tiles)
    layout, covered = policy.layout(height, width), policy.list_covered_grids(height, width)
    (rows, columns), (*tiles, whole) = layout.spans[0].view_grid, covered
    assert whole == (4, 4) and len(tiles) == rows * columns <= max(max_tiles, 1)
    assert all(1 <= h <= 4 and 1 <= w <= 4 for h, w in tiles)
    tall, wide = sum(h for h, _ in tiles[::columns]), sum(w for _, w in tiles[:columns])
    assert layout.spans[0].size == (math.ceil(tall / 2), math.ceil(wide / 2))
    assert (tall, wide) == tuple(math.ceil(side / 14) for side in layout.views[0].resized_size)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 40))
def test_phi3_vision_has_at_most_the_given_tiles(height, width, max_tiles):
    layout = HDTransformPolicy(tile_size=56, max_tiles=max_tiles).layout(height, width)
    rows, columns = layout.spans[0].view_grid
    assert rows * columns <= max_tiles and len(layout.views) == rows * columns + 1
    assert layout.num_tokens == (rows * columns + 1) * 4 + 1 + (rows + 1) * 2


@pytest.mark.parametrize("kind", [HDTransformPolicy, DynamicHDPolicy])
def test_invalid_settings_raise(kind):
    with pytest.raises(ConfigError, match="max_tiles is 0"):
        kind(max_tiles=0)
    with pytest.raises(ConfigError):
        kind(tile_size=70)  # five patches, which do not merge
