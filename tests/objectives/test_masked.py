"""Masks of exactly so many patches, and losses against formulas written out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError
from vitrail.objectives.masked import at, block_places, feature_loss, flags, masked_count, pixel_loss, random_places

KINDS = {"blocks": block_places, "random": random_places}


@settings(max_examples=60)
@given(st.sampled_from(list(KINDS)), st.integers(1, 9), st.integers(1, 9), st.floats(0.01, 0.99), st.integers(0, 999))
def test_every_picture_has_exactly_as_many_masked_patches(kind, h, w, ratio, seed):
    torch.manual_seed(seed)
    if not 0 < round(ratio * h * w) < h * w:
        with pytest.raises(ConfigError, match="at least one"):
            masked_count(h * w, ratio)
        return
    count = masked_count(h * w, ratio)
    masked = flags(KINDS[kind](5, (h, w), count), h * w)
    assert masked.shape == (5, h * w) and masked.dtype == torch.bool
    assert masked.sum(1).tolist() == [count] * 5 and abs(count - ratio * h * w) <= 0.5


def neighbours(masked: torch.Tensor) -> float:
    """masked (B, h, w) → of a masked patch's neighbours, the share that is masked too"""
    both = (masked[:, 1:] & masked[:, :-1]).sum() + (masked[..., 1:] & masked[..., :-1]).sum()
    mixed = (masked[:, 1:] ^ masked[:, :-1]).sum() + (masked[..., 1:] ^ masked[..., :-1]).sum()
    return float(2 * both / (2 * both + mixed))


@pytest.mark.parametrize("ratio", [0.2, 0.4, 0.6])
def test_blocks_hang_together_and_random_patches_do_not(ratio):
    count = masked_count(14 * 14, ratio)
    share = {kind: neighbours(flags(f(400, (14, 14), count), 196).view(-1, 14, 14)) for kind, f in KINDS.items()}
    assert abs(share["random"] - ratio) < 0.02
    assert share["blocks"] > 0.78


def test_a_first_block_is_a_rectangle():
    """Of fewer patches than the smallest rectangle has inside a picture, all lie in one, its last ring perhaps in part;
    of one that reaches over an edge too little may be left, and there is a second."""
    masked, whole = flags(block_places(300, (14, 14), 9), 196).view(-1, 14, 14), 0
    for picture in masked:
        rows, columns = picture.any(1).nonzero()[:, 0], picture.any(0).nonzero()[:, 0]
        height, width = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
        whole += (height - 2) * (width - 2) <= 9 <= height * width <= 25
    assert whole > 240


def test_every_patch_is_masked_now_and_then_and_seen_now_and_then():
    for places in KINDS.values():
        often = flags(places(3000, (8, 8), 26), 64).float().mean(0)
        assert 0.1 < float(often.min()) and float(often.max()) < 0.75


def test_masks_are_drawn_anew_and_again_from_the_same_seed():
    torch.manual_seed(1)
    first, second = block_places(4, (8, 8), 20), block_places(4, (8, 8), 20)
    torch.manual_seed(1)
    assert torch.equal(first, block_places(4, (8, 8), 20)) and not torch.equal(first, second)


def test_what_is_at_places():
    x, places = torch.arange(24.0).view(2, 4, 3), torch.tensor([[2, 0], [3, 3]])
    assert at(x, places).tolist() == [[[6, 7, 8], [0, 1, 2]], [[21, 22, 23], [21, 22, 23]]]


def test_pixel_loss_is_the_formula():
    said, patches = torch.randn(2, 3, 12), torch.rand(2, 3, 12)
    plain = 0.0
    for b in range(2):
        for m in range(3):
            p = patches[b, m].tolist()
            mean = sum(p) / 12
            deviation = math.sqrt(sum((x - mean) ** 2 for x in p) / 11 + 1e-6)
            plain += sum((s - (x - mean) / deviation) ** 2 for s, x in zip(said[b, m].tolist(), p, strict=True)) / 12
    assert float(pixel_loss(said, patches)) == pytest.approx(plain, rel=1e-5)
    assert float(pixel_loss(said, patches * 7 - 2)) == pytest.approx(plain, rel=1e-3)  # how bright says nothing
    assert pixel_loss(torch.zeros(1, 1, 12), torch.full((1, 1, 12), 0.25)) == 0  # a flat patch is no division by zero


def test_feature_loss_is_one_minus_cosine():
    said, features = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    plain = sum(
        1 - float(a @ b / a.norm() / b.norm()) for a, b in zip(said.view(6, 8), features.view(6, 8), strict=True)
    )
    assert float(feature_loss(said, features)) == pytest.approx(plain, rel=1e-5)
    assert float(feature_loss(features * 3, features)) == pytest.approx(0, abs=1e-5)
    assert float(feature_loss(-features, features)) == pytest.approx(12, rel=1e-5)
