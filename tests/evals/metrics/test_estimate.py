"""Means with bootstrap intervals."""

import math

import pytest
import torch

from vitrail.errors import DataError
from vitrail.evals.metrics import estimate_mean


def test_interval_matches_that_of_a_mean():
    values = torch.randn(2000, dtype=torch.float64) * 3 + 7
    found = estimate_mean("PSNR", values)
    half = 1.96 * values.std() / math.sqrt(2000)
    assert found.value == pytest.approx(values.mean().item()) and found.count == 2000
    assert found.interval[0] == pytest.approx((values.mean() - half).item(), abs=0.02)
    assert found.interval[1] == pytest.approx((values.mean() + half).item(), abs=0.02)
    assert estimate_mean("PSNR", values) == found and estimate_mean("PSNR", values, seed=1).interval != found.interval


def test_interval_coverage():
    within = 0
    for seed in range(200):
        values = torch.empty(60).exponential_(generator=torch.Generator().manual_seed(seed))
        low, high = estimate_mean("x", values, rounds=200).interval
        within += low <= 1 <= high
    assert 175 <= within <= 199  # slightly below 95 % for skewed values


def test_one_image_has_an_infinite_interval():
    one = estimate_mean("SSIM", torch.tensor([0.5]))
    assert one.interval == (-math.inf, math.inf) and str(one) == "SSIM 0.5 [no interval] of 1"


def test_infinite_values():
    perfect = estimate_mean("PSNR", torch.tensor([math.inf, 30.0, 31.0]))
    assert perfect.value == math.inf and perfect.interval[0] < 31 and perfect.interval[1] == math.inf
    assert str(perfect).startswith("PSNR inf [30") and str(perfect).endswith(", inf] of 3")


def test_invalid_values_raise():
    for values in (torch.empty(0), torch.tensor([1.0, math.nan]), torch.zeros(2, 2), torch.tensor(1.0)):
        with pytest.raises(DataError, match="cannot be averaged"):
            estimate_mean("x", values)
