"""Views: each change does what it says and nothing else, on every shape, and never leaves the range."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.views import ViewsConfig, views
from vitrail.errors import ConfigError, ImageError


def picture(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def test_without_a_change_pixels_are_as_they_are():
    x = picture(5, 3, 9, 9)
    assert torch.equal(views(x), x / 255 * 2 - 1)


def test_what_is_not_square_is_squashed_first():
    x = picture(5, 4, 20, 32)
    for config in (ViewsConfig(), ViewsConfig(turn=5.0, blur=1.0, erase=1.0, ground=1.0)):
        assert views(x, config).shape == (5, 3, 32, 32)
    tall = torch.zeros(1, 3, 16, 8, dtype=torch.uint8)
    tall[:, :, :, 4:] = 255
    assert torch.equal(views(tall)[0, 0, :, 9:], torch.ones(16, 7)) and views(tall)[0, 0, 0, 0] == -1


def test_a_close_view_of_a_large_picture_keeps_its_detail():
    """Stripes of two pixels, of which a 32-pixel cut at side 32 must show every one."""
    stripes = torch.zeros(8, 3, 256, 256, dtype=torch.uint8)
    stripes[..., ::4], stripes[..., 1::4] = 255, 255
    assert views(stripes, ViewsConfig(side=32, area=(1 / 64, 1 / 64), shift=0.5)).std() > 0.6


def test_a_stretch_without_an_area_reaches_over_the_edge():
    x = picture(300, 3, 16, 16)
    assert (views(x, ViewsConfig(stretch=1.5)) - views(x)).abs().mean((1, 2, 3)).median() > 0.05


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
def test_all_changes_at_once_keep_shape_and_range(B, C, H, W, S, least, most, much):
    chances = dict.fromkeys(("mirror", "colour", "repaint", "grey", "blur", "noise", "erase", "ground"), much)
    moved = {"area": (least, most), "stretch": 1.3, "shift": much / 2, "turn": 90 * much}
    config = ViewsConfig(side=S or H, gamma=(-much, much), **moved, **chances)
    made = views(picture(B, C, H, W), config)
    assert made.shape == (B, 3, S or H, S or H) and made.dtype == torch.float32
    assert made.isfinite().all() and made.abs().max() <= 1


def test_views_need_not_be_square():
    x = picture(5, 3, 12, 20)
    assert torch.equal(views(x, size=(12, 20)), x / 255 * 2 - 1)
    assert torch.equal(views(x, ViewsConfig(mirror=1.0), size=(12, 20)), (x / 255 * 2 - 1).flip(-1))
    near = views(x, ViewsConfig(turn=1e-6), size=(12, 20))
    torch.testing.assert_close(near, x / 255 * 2 - 1, atol=1e-3, rtol=0)
    squares = torch.zeros(200, 4, 32, 64, dtype=torch.uint8)
    squares[:, 3, 12:20, 28:36] = 255  # a square stays one, however far it is turned
    torch.manual_seed(0)
    turned = views(squares, ViewsConfig(turn=180.0), size=(32, 64)) < 0
    high, wide = (turned[:, 0].any(axis).sum(1) for axis in (2, 1))
    assert (high - wide).abs().max() <= 1 and high.min() >= 8 and high.max() == 10


@settings(max_examples=40)
@given(
    st.sampled_from([3, 4]), st.integers(4, 40), st.integers(4, 40), st.integers(1, 30), st.integers(1, 30),
    st.floats(0.1, 1), st.floats(0, 1),
)  # fmt: skip
def test_all_changes_at_once_keep_any_size(C, h, w, H, W, least, much):
    chances = dict.fromkeys(("mirror", "colour", "repaint", "grey", "blur", "noise", "erase", "ground"), much)
    moved = {"area": (least, 1.5), "stretch": 1.3, "shift": much / 2, "turn": 90 * much, "focus": (-much, much)}
    made = views(picture(2, C, h, w), ViewsConfig(gamma=(-much, much), **moved, **chances), (H, W))
    assert made.shape == (2, 3, H, W) and made.isfinite().all() and made.abs().max() <= 1


def test_a_mirror_is_a_mirror_whether_or_not_the_view_moves():
    x = picture(64, 3, 8, 8)
    for config in (ViewsConfig(mirror=1.0), ViewsConfig(mirror=1.0, turn=1e-6)):
        torch.testing.assert_close(views(x, config), views(x).flip(-1), atol=1e-4, rtol=0)


def test_a_quarter_turn_is_exact_and_either_way():
    x = picture(200, 3, 8, 8)
    torch.manual_seed(0)
    made = views(x, ViewsConfig(turn=90.0))
    turns = [views(x).rot90(k, (2, 3)) for k in (1, -1)]
    # No angle is exactly 90°; the nearest in 200 draws is near enough to tell one way from the other.
    near = torch.stack([(made - turn).abs().mean((1, 2, 3)) for turn in turns])
    assert near.min(1).values.max() < 0.2


def test_a_view_of_a_part_lies_inside_and_reaches_the_edges():
    """Pixels that say where they are: a view of a quarter of the area spans half of each side, anywhere."""
    line = torch.arange(64, dtype=torch.uint8) * 4
    x = torch.stack([line.expand(64, 64), line[:, None].expand(64, 64), torch.zeros(64, 64, dtype=torch.uint8)])
    made = (views(x.expand(500, 3, 64, 64), ViewsConfig(area=(0.25, 0.25), shift=0.5)) + 1) / 2 * 255 / 4
    across, down = made[:, 0], made[:, 1]
    torch.testing.assert_close(across[:, 0, -1] - across[:, 0, 0], torch.full((500,), 31.5), atol=0.6, rtol=0)
    torch.testing.assert_close(down[:, -1, 0] - down[:, 0, 0], torch.full((500,), 31.5), atol=0.6, rtol=0)
    assert across[:, 0, 0].min() < 1.5 and across[:, 0, -1].max() > 61.5
    held = (views(x.expand(50, 3, 64, 64), ViewsConfig(area=(0.25, 0.25), shift=0.0)) + 1) / 2 * 255 / 4
    torch.testing.assert_close(held[:, 0, 0, 0], torch.full((50,), 15.75), atol=0.6, rtol=0)


def test_a_stretched_view_of_a_part_lies_inside_too():
    line = torch.arange(64, dtype=torch.uint8) * 4
    x = torch.stack([line.expand(64, 64), line[:, None].expand(64, 64), torch.zeros(64, 64, dtype=torch.uint8)])
    made = views(x.expand(400, 3, 64, 64), ViewsConfig(area=(0.9, 0.9), stretch=1.33, shift=0.5))
    # Beyond an edge the picture is mirrored, and the line would run back.
    assert made[:, 0, 32].diff(dim=1).min() >= 0 and made[:, 1, :, 32].diff(dim=1).min() >= 0


def test_what_is_transparent_shows_white_or_another_ground_and_hides_its_colours():
    x = picture(300, 4, 6, 6)
    x[:, 3] = 0
    assert views(x).eq(1).all()
    other = views(x, ViewsConfig(ground=1.0))
    assert other.lt(0.9).any((1, 2, 3)).float().mean() > 0.9
    some = views(x, ViewsConfig(ground=0.3)).lt(1).any(1).any(1).any(1).float().mean()
    assert 0.15 < some < 0.45


@settings(max_examples=30)
@given(st.floats(-2, 2), st.floats(0, 1))
def test_gamma_bends_colours_and_keeps_their_order(least, span):
    ramp = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(7, 3, 16, 16)
    made = (views(ramp, ViewsConfig(gamma=(least, min(2.0, least + span)))) + 1) / 2
    flat = made.reshape(7, 3, 256)
    torch.testing.assert_close(flat[..., [0, 255]], torch.tensor([0.0, 1.0]).expand(7, 3, 2), atol=1e-6, rtol=0)
    assert flat.diff(dim=2).min() >= 0 and torch.equal(flat[:, 0], flat[:, 2])
    # The exponent, of any colour between, is one a picture and in the range.
    seen = (flat[:, 0, 100:200].clamp(1e-6).log() / (torch.arange(100, 200) / 255).log()).log()
    assert (seen.amax(1) - seen.amin(1)).max() < 1e-2
    assert least - 1e-2 <= seen.min() and seen.max() <= min(2.0, least + span) + 1e-2


def test_gamma_of_one_picture_is_not_that_of_another_and_without_it_no_chance_is_drawn():
    x = picture(1, 3, 8, 8).expand(6, 3, 8, 8)
    made = views(x, ViewsConfig(gamma=(-0.5, 0.5)))
    assert len({round(float(some.mean()), 4) for some in made}) == 6
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(views(x, ViewsConfig(gamma=(0.0, 0.0))), views(x)) and torch.equal(torch.rand(1), expected)


def test_gamma_leaves_opacity_and_the_ground_as_they_are():
    x = picture(20, 4, 8, 8)
    x[:, :3] = 255  # white stays white whatever its exponent, so only opacity and ground could make a difference
    made = []
    for gamma in ((0.0, 0.0), (0.7, 0.7)):
        torch.manual_seed(3)
        if gamma == (0.0, 0.0):
            torch.rand(20, 1, 1, 1)  # what the exponents take
        made.append(views(x, ViewsConfig(gamma=gamma, ground=1.0)))
    assert torch.equal(*made) and made[0].min() < 0.5
    x[:, :3], x[:, 3] = 51, 128  # on white: the colour is bent before it is mixed, not what is mixed
    opaque = 128 / 255
    bent = torch.tensor(0.2 ** math.exp(0.7) * opaque + 1 - opaque) * 2 - 1
    torch.testing.assert_close(views(x, ViewsConfig(gamma=(0.7, 0.7))), bent.expand(20, 3, 8, 8), atol=1e-5, rtol=0)


def test_grey_has_one_colour_and_keeps_its_brightness():
    x = picture(40, 3, 8, 8)
    made = (views(x, ViewsConfig(grey=1.0)) + 1) / 2
    luma = torch.einsum("c,bchw->bhw", torch.tensor([0.299, 0.587, 0.114]), x / 255)
    torch.testing.assert_close(made, luma[:, None].expand_as(made), atol=1e-4, rtol=0)


def test_blur_keeps_the_mean_and_smooths():
    x = picture(20, 3, 32, 32)
    made, plain = views(x, ViewsConfig(blur=1.0)), views(x)
    assert made.diff(dim=-1).abs().mean() < 0.6 * plain.diff(dim=-1).abs().mean()
    torch.testing.assert_close(made.mean((1, 2, 3)), plain.mean((1, 2, 3)), atol=0.05, rtol=0)


def test_erased_patches_are_of_one_colour_and_no_larger_than_a_quarter():
    x = torch.zeros(300, 3, 20, 20, dtype=torch.uint8)
    hidden = (views(x, ViewsConfig(erase=1.0)) > -1).any(1).float().mean((1, 2))
    assert hidden.max() <= 0.36 and hidden.mean() > 0.05  # a patch of half a side covers up to eleven of twenty pixels


def test_chance_follows_the_seed():
    x, config = picture(6, 4, 16, 16), ViewsConfig(area=(0.5, 1.5), turn=30.0, colour=0.5, blur=0.5, ground=0.5)
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(views(x, config))
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


@pytest.mark.parametrize(
    "change",
    [
        {"area": (0.0, 1.0)},
        {"area": (0.9, 0.5)},
        {"stretch": 0.5},
        {"mirror": 1.5},
        {"turn": -3.0},
        {"side": 0},
        {"gamma": (0.2, 0.1)},
        {"gamma": (-3.0, 0.0)},
    ],
)
def test_what_cannot_be_is_refused(change):
    with pytest.raises(ConfigError):
        ViewsConfig(**change)


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 4, 4), picture(2, 1, 4, 4), picture(3, 4, 4)])
def test_other_pictures_are_refused(x):
    with pytest.raises(ImageError):
        views(x)


def test_focus_goes_from_the_blur_of_three_pixels_to_what_is_sharper():
    """Against a convolution with the binomial kernel, at both ends and between."""
    x = picture(6, 3, 11, 13)
    square = torch.nn.functional.interpolate(x / 255, (13, 13), mode="bilinear")
    line = torch.tensor([1.0, 2.0, 1.0]) / 4
    kernel = (line[:, None] * line).expand(3, 1, 3, 3)
    soft = torch.nn.functional.conv2d(torch.nn.functional.pad(square, [1] * 4, mode="replicate"), kernel, groups=3)
    for far in (-1.0, -0.4, 0.0, 0.7):
        made = views(x, ViewsConfig(focus=(far, far)))
        want = (square + far * (square - soft)).clamp(0, 1) * 2 - 1
        assert torch.allclose(made, want, atol=1e-5)
    with pytest.raises(ConfigError, match="focus"):
        ViewsConfig(focus=(0.5, 0.2))
