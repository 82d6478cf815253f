"""Augmentation: each option has the intended effect only, for every shape, and keeps the range."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.augmentation import AugmentationConfig, augment_images
from vitrail.errors import ConfigError, ImageError

# Options that accept any value in 0…1.
PROBABILITIES = (
    *("flip_probability", "recolour_probability", "grayscale_probability", "blur_probability", "erase_probability"),
    *("background_probability", "colour_jitter", "max_noise"),
)


def picture(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def test_default_changes_nothing():
    x = picture(5, 3, 9, 9)
    assert torch.equal(augment_images(x), x / 255 * 2 - 1)


def test_other_shapes_are_resized_to_a_square():
    x = picture(5, 4, 20, 32)
    for config in (
        AugmentationConfig(),
        AugmentationConfig(max_rotation=5.0, blur_probability=1.0, erase_probability=1.0, background_probability=1.0),
    ):
        assert augment_images(x, config).shape == (5, 3, 32, 32)
    tall = torch.zeros(1, 3, 16, 8, dtype=torch.uint8)
    tall[:, :, :, 4:] = 255
    assert torch.equal(augment_images(tall)[0, 0, :, 9:], torch.ones(16, 7)) and augment_images(tall)[0, 0, 0, 0] == -1


def test_small_crops_of_large_images_keep_detail():
    """Stripes of two pixels stay visible in a crop of 32 pixels at size 32."""
    stripes = torch.zeros(8, 3, 256, 256, dtype=torch.uint8)
    stripes[..., ::4], stripes[..., 1::4] = 255, 255
    assert (
        augment_images(stripes, AugmentationConfig(image_size=32, crop_area=(1 / 64, 1 / 64), max_shift=0.5)).std()
        > 0.6
    )


def test_aspect_ratio_without_crop_area_crosses_the_edge():
    x = picture(300, 3, 16, 16)
    assert (augment_images(x, AugmentationConfig(max_aspect_ratio=1.5)) - augment_images(x)).abs().mean(
        (1, 2, 3)
    ).median() > 0.05


@settings(max_examples=40)
@given(
    st.integers(1, 4),
    st.sampled_from([3, 4]),
    st.integers(4, 40),
    st.integers(4, 40),
    st.one_of(st.none(), st.integers(1, 24)),
    st.floats(0.1, 1),
    st.floats(1, 2),
    st.floats(0, 1),
)
def test_all_options_keep_shape_and_range(B, C, H, W, S, least, most, much):
    chances = dict.fromkeys(PROBABILITIES, much)
    moved = {"crop_area": (least, most), "max_aspect_ratio": 1.3, "max_shift": much / 2, "max_rotation": 90 * much}
    config = AugmentationConfig(image_size=S or H, log_gamma=(-much, much), **moved, **chances)
    made = augment_images(picture(B, C, H, W), config)
    assert made.shape == (B, 3, S or H, S or H) and made.dtype == torch.float32
    assert made.isfinite().all() and made.abs().max() <= 1


def test_output_need_not_be_square():
    x = picture(5, 3, 12, 20)
    assert torch.equal(augment_images(x, size=(12, 20)), x / 255 * 2 - 1)
    assert torch.equal(
        augment_images(x, AugmentationConfig(flip_probability=1.0), size=(12, 20)), (x / 255 * 2 - 1).flip(-1)
    )
    near = augment_images(x, AugmentationConfig(max_rotation=1e-6), size=(12, 20))
    torch.testing.assert_close(near, x / 255 * 2 - 1, atol=1e-3, rtol=0)
    squares = torch.zeros(200, 4, 32, 64, dtype=torch.uint8)
    squares[:, 3, 12:20, 28:36] = 255  # a square stays a square under rotation
    torch.manual_seed(0)
    turned = augment_images(squares, AugmentationConfig(max_rotation=180.0), size=(32, 64)) < 0
    high, wide = (turned[:, 0].any(axis).sum(1) for axis in (2, 1))
    assert (high - wide).abs().max() <= 1 and high.min() >= 8 and high.max() == 10


@settings(max_examples=40)
@given(
    st.sampled_from([3, 4]), st.integers(4, 40), st.integers(4, 40), st.integers(1, 30), st.integers(1, 30),
    st.floats(0.1, 1), st.floats(0, 1),
)  # fmt: skip
def test_all_options_work_for_any_size(C, h, w, H, W, least, much):
    chances = dict.fromkeys(PROBABILITIES, much)
    moved = {
        "crop_area": (least, 1.5),
        "max_aspect_ratio": 1.3,
        "max_shift": much / 2,
        "max_rotation": 90 * much,
        "sharpness": (-much, much),
    }
    made = augment_images(picture(2, C, h, w), AugmentationConfig(log_gamma=(-much, much), **moved, **chances), (H, W))
    assert made.shape == (2, 3, H, W) and made.isfinite().all() and made.abs().max() <= 1


def test_flip_with_and_without_rotation():
    x = picture(64, 3, 8, 8)
    for config in (
        AugmentationConfig(flip_probability=1.0),
        AugmentationConfig(flip_probability=1.0, max_rotation=1e-6),
    ):
        torch.testing.assert_close(augment_images(x, config), augment_images(x).flip(-1), atol=1e-4, rtol=0)


def test_rotation_is_exact_in_both_directions():
    x = picture(200, 3, 8, 8)
    torch.manual_seed(0)
    made = augment_images(x, AugmentationConfig(max_rotation=90.0))
    turns = [augment_images(x).rot90(k, (2, 3)) for k in (1, -1)]
    # No angle is exactly 90°; the nearest of 200 draws is close enough to tell the directions apart.
    near = torch.stack([(made - turn).abs().mean((1, 2, 3)) for turn in turns])
    assert near.min(1).values.max() < 0.2


def test_crops_are_inside_and_reach_the_edges():
    """Pixels encode their position: a crop of a quarter of the area covers half of each side, at any position."""
    line = torch.arange(64, dtype=torch.uint8) * 4
    x = torch.stack([line.expand(64, 64), line[:, None].expand(64, 64), torch.zeros(64, 64, dtype=torch.uint8)])
    made = (
        (augment_images(x.expand(500, 3, 64, 64), AugmentationConfig(crop_area=(0.25, 0.25), max_shift=0.5)) + 1)
        / 2
        * 255
        / 4
    )
    across, down = made[:, 0], made[:, 1]
    torch.testing.assert_close(across[:, 0, -1] - across[:, 0, 0], torch.full((500,), 31.5), atol=0.6, rtol=0)
    torch.testing.assert_close(down[:, -1, 0] - down[:, 0, 0], torch.full((500,), 31.5), atol=0.6, rtol=0)
    assert across[:, 0, 0].min() < 1.5 and across[:, 0, -1].max() > 61.5
    held = (
        (augment_images(x.expand(50, 3, 64, 64), AugmentationConfig(crop_area=(0.25, 0.25), max_shift=0.0)) + 1)
        / 2
        * 255
        / 4
    )
    torch.testing.assert_close(held[:, 0, 0, 0], torch.full((50,), 15.75), atol=0.6, rtol=0)


def test_crops_of_other_aspect_ratios_are_inside():
    line = torch.arange(64, dtype=torch.uint8) * 4
    x = torch.stack([line.expand(64, 64), line[:, None].expand(64, 64), torch.zeros(64, 64, dtype=torch.uint8)])
    made = augment_images(
        x.expand(400, 3, 64, 64), AugmentationConfig(crop_area=(0.9, 0.9), max_aspect_ratio=1.33, max_shift=0.5)
    )
    # Outside of an edge the image is reflected, and the line would run backwards.
    assert made[:, 0, 32].diff(dim=1).min() >= 0 and made[:, 1, :, 32].diff(dim=1).min() >= 0


def test_transparent_pixels_show_the_background():
    x = picture(300, 4, 6, 6)
    x[:, 3] = 0
    assert augment_images(x).eq(1).all()
    other = augment_images(x, AugmentationConfig(background_probability=1.0))
    assert other.lt(0.9).any((1, 2, 3)).float().mean() > 0.9
    some = augment_images(x, AugmentationConfig(background_probability=0.3)).lt(1).any(1).any(1).any(1).float().mean()
    assert 0.15 < some < 0.45


@settings(max_examples=30)
@given(st.floats(-2, 2), st.floats(0, 1))
def test_gamma_keeps_the_order_of_colours(least, span):
    ramp = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(7, 3, 16, 16)
    made = (augment_images(ramp, AugmentationConfig(log_gamma=(least, min(2.0, least + span)))) + 1) / 2
    flat = made.reshape(7, 3, 256)
    torch.testing.assert_close(flat[..., [0, 255]], torch.tensor([0.0, 1.0]).expand(7, 3, 2), atol=1e-6, rtol=0)
    assert flat.diff(dim=2).min() >= 0 and torch.equal(flat[:, 0], flat[:, 2])
    # There is one exponent for each image, and it is within the range.
    seen = (flat[:, 0, 100:200].clamp(1e-6).log() / (torch.arange(100, 200) / 255).log()).log()
    assert (seen.amax(1) - seen.amin(1)).max() < 1e-2
    assert least - 1e-2 <= seen.min() and seen.max() <= min(2.0, least + span) + 1e-2


def test_gamma_differs_by_image_and_draws_no_numbers_if_disabled():
    x = picture(1, 3, 8, 8).expand(6, 3, 8, 8)
    made = augment_images(x, AugmentationConfig(log_gamma=(-0.5, 0.5)))
    assert len({round(float(some.mean()), 4) for some in made}) == 6
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(augment_images(x, AugmentationConfig(log_gamma=(0.0, 0.0))), augment_images(x)) and torch.equal(
        torch.rand(1), expected
    )


def test_gamma_does_not_change_opacity_and_background():
    x = picture(20, 4, 8, 8)
    x[:, :3] = 255  # white stays white for any exponent, so only opacity and background could differ
    made = []
    for gamma in ((0.0, 0.0), (0.7, 0.7)):
        torch.manual_seed(3)
        if gamma == (0.0, 0.0):
            torch.rand(20, 1, 1, 1)  # random numbers of the exponents
        made.append(augment_images(x, AugmentationConfig(log_gamma=gamma, background_probability=1.0)))
    assert torch.equal(*made) and made[0].min() < 0.5
    x[:, :3], x[:, 3] = 51, 128  # on white: gamma applies to the colour before blending, not to the result
    opaque = 128 / 255
    bent = torch.tensor(0.2 ** math.exp(0.7) * opaque + 1 - opaque) * 2 - 1
    torch.testing.assert_close(
        augment_images(x, AugmentationConfig(log_gamma=(0.7, 0.7))), bent.expand(20, 3, 8, 8), atol=1e-5, rtol=0
    )


def test_grayscale_keeps_brightness():
    x = picture(40, 3, 8, 8)
    made = (augment_images(x, AugmentationConfig(grayscale_probability=1.0)) + 1) / 2
    luma = torch.einsum("c,bchw->bhw", torch.tensor([0.299, 0.587, 0.114]), x / 255)
    torch.testing.assert_close(made, luma[:, None].expand_as(made), atol=1e-4, rtol=0)


def test_blur_smooths_and_keeps_the_mean():
    x = picture(20, 3, 32, 32)
    made, plain = augment_images(x, AugmentationConfig(blur_probability=1.0)), augment_images(x)
    assert made.diff(dim=-1).abs().mean() < 0.6 * plain.diff(dim=-1).abs().mean()
    torch.testing.assert_close(made.mean((1, 2, 3)), plain.mean((1, 2, 3)), atol=0.05, rtol=0)


def test_erased_patches_cover_at_most_a_quarter():
    x = torch.zeros(300, 3, 20, 20, dtype=torch.uint8)
    hidden = (augment_images(x, AugmentationConfig(erase_probability=1.0)) > -1).any(1).float().mean((1, 2))
    assert hidden.max() <= 0.36 and hidden.mean() > 0.05  # a patch of half a side covers up to eleven of twenty pixels


def test_results_depend_on_the_seed():
    x, config = (
        picture(6, 4, 16, 16),
        AugmentationConfig(
            crop_area=(0.5, 1.5), max_rotation=30.0, colour_jitter=0.5, blur_probability=0.5, background_probability=0.5
        ),
    )
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(augment_images(x, config))
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


@pytest.mark.parametrize(
    "change",
    [
        {"crop_area": (0.0, 1.0)},
        {"crop_area": (0.9, 0.5)},
        {"max_aspect_ratio": 0.5},
        {"flip_probability": 1.5},
        {"max_rotation": -3.0},
        {"image_size": 0},
        {"log_gamma": (0.2, 0.1)},
        {"log_gamma": (-3.0, 0.0)},
    ],
)
def test_invalid_settings_are_refused(change):
    with pytest.raises(ConfigError):
        AugmentationConfig(**change)


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 4, 4), picture(2, 1, 4, 4), picture(3, 4, 4)])
def test_other_inputs_are_refused(x):
    with pytest.raises(ImageError):
        augment_images(x)


def test_sharpness_interpolates_a_binomial_blur():
    """Compared with a convolution by the binomial kernel, at both ends and between."""
    x = picture(6, 3, 11, 13)
    square = torch.nn.functional.interpolate(x / 255, (13, 13), mode="bilinear")
    line = torch.tensor([1.0, 2.0, 1.0]) / 4
    kernel = (line[:, None] * line).expand(3, 1, 3, 3)
    soft = torch.nn.functional.conv2d(torch.nn.functional.pad(square, [1] * 4, mode="replicate"), kernel, groups=3)
    for far in (-1.0, -0.4, 0.0, 0.7):
        made = augment_images(x, AugmentationConfig(sharpness=(far, far)))
        want = (square + far * (square - soft)).clamp(0, 1) * 2 - 1
        assert torch.allclose(made, want, atol=1e-5)
    with pytest.raises(ConfigError, match="sharpness"):
        AugmentationConfig(sharpness=(0.5, 0.2))
