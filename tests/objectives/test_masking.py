"""Patch masks, and masked-prediction losses against explicit formulas."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError
from vitrail.objectives.masking import (
    count_masked_patches,
    feature_loss,
    gather_patches,
    indices_to_mask,
    pixel_loss,
    sample_block_indices,
    sample_random_indices,
)

KINDS = {"blocks": sample_block_indices, "random": sample_random_indices}


@settings(max_examples=60)
@given(st.sampled_from(list(KINDS)), st.integers(1, 9), st.integers(1, 9), st.floats(0.01, 0.99), st.integers(0, 999))
def test_number_of_masked_patches_is_exact(kind, h, w, ratio, seed):
    torch.manual_seed(seed)
    if not 0 < round(ratio * h * w) < h * w:
        with pytest.raises(ConfigError, match="at least one"):
            count_masked_patches(h * w, ratio)
        return
    count = count_masked_patches(h * w, ratio)
    masked = indices_to_mask(KINDS[kind](5, (h, w), count), h * w)
    assert masked.shape == (5, h * w) and masked.dtype == torch.bool
    assert masked.sum(1).tolist() == [count] * 5 and abs(count - ratio * h * w) <= 0.5


def neighbours(masked: torch.Tensor) -> float:
    """Return the fraction of masked patches' neighbours that are masked too."""
    both = (masked[:, 1:] & masked[:, :-1]).sum() + (masked[..., 1:] & masked[..., :-1]).sum()
    mixed = (masked[:, 1:] ^ masked[:, :-1]).sum() + (masked[..., 1:] ^ masked[..., :-1]).sum()
    return float(2 * both / (2 * both + mixed))


@pytest.mark.parametrize("ratio", [0.2, 0.4, 0.6])
def test_blocks_are_connected_and_random_patches_are_not(ratio):
    count = count_masked_patches(14 * 14, ratio)
    share = {
        kind: neighbours(indices_to_mask(f(400, (14, 14), count), 196).view(-1, 14, 14)) for kind, f in KINDS.items()
    }
    assert abs(share["random"] - ratio) < 0.02
    assert share["blocks"] > 0.78


def test_first_block_is_a_rectangle():
    """If the mask is smaller than the smallest rectangle, it lies in one rectangle, unless that crosses the border."""
    masked, whole = indices_to_mask(sample_block_indices(300, (14, 14), 9), 196).view(-1, 14, 14), 0
    for picture in masked:
        rows, columns = picture.any(1).nonzero()[:, 0], picture.any(0).nonzero()[:, 0]
        height, width = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
        whole += (height - 2) * (width - 2) <= 9 <= height * width <= 25
    assert whole > 240


def test_every_patch_is_masked_sometimes():
    for places in KINDS.values():
        often = indices_to_mask(places(3000, (8, 8), 26), 64).float().mean(0)
        assert 0.1 < float(often.min()) and float(often.max()) < 0.75


def test_masks_depend_on_the_seed():
    torch.manual_seed(1)
    first, second = sample_block_indices(4, (8, 8), 20), sample_block_indices(4, (8, 8), 20)
    torch.manual_seed(1)
    assert torch.equal(first, sample_block_indices(4, (8, 8), 20)) and not torch.equal(first, second)


def test_gather_patches():
    x, places = torch.arange(24.0).view(2, 4, 3), torch.tensor([[2, 0], [3, 3]])
    assert gather_patches(x, places).tolist() == [[[6, 7, 8], [0, 1, 2]], [[21, 22, 23], [21, 22, 23]]]


def test_pixel_loss_equals_the_formula():
    output, patches = torch.randn(2, 3, 12), torch.rand(2, 3, 12)
    plain = 0.0
    for b in range(2):
        for m in range(3):
            p = patches[b, m].tolist()
            mean = sum(p) / 12
            deviation = math.sqrt(sum((x - mean) ** 2 for x in p) / 11 + 1e-6)
            plain += sum((s - (x - mean) / deviation) ** 2 for s, x in zip(output[b, m].tolist(), p, strict=True)) / 12
    assert float(pixel_loss(output, patches)) == pytest.approx(plain, rel=1e-5)
    assert float(pixel_loss(output, patches * 7 - 2)) == pytest.approx(plain, rel=1e-3)  # brightness has no effect
    assert (
        pixel_loss(torch.zeros(1, 1, 12), torch.full((1, 1, 12), 0.25)) == 0
    )  # a constant patch gives no division by zero


def test_feature_loss_is_one_minus_cosine():
    output, features = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    plain = sum(
        1 - float(a @ b / a.norm() / b.norm()) for a, b in zip(output.view(6, 8), features.view(6, 8), strict=True)
    )
    assert float(feature_loss(output, features)) == pytest.approx(plain, rel=1e-5)
    assert float(feature_loss(features * 3, features)) == pytest.approx(0, abs=1e-5)
    assert float(feature_loss(-features, features)) == pytest.approx(12, rel=1e-5)
