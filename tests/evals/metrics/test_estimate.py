"""Means with intervals by drawing pictures anew."""

import math

import pytest
import torch

from vitrail.errors import DataError
from vitrail.evals.metrics import estimate


def test_the_interval_is_that_of_a_mean():
    values = torch.randn(2000, dtype=torch.float64) * 3 + 7
    found = estimate("PSNR", values)
    half = 1.96 * values.std() / math.sqrt(2000)
    assert found.value == pytest.approx(values.mean().item()) and found.of == 2000
    assert found.interval[0] == pytest.approx((values.mean() - half).item(), abs=0.02)
    assert found.interval[1] == pytest.approx((values.mean() + half).item(), abs=0.02)
    assert estimate("PSNR", values) == found and estimate("PSNR", values, seed=1).interval != found.interval


def test_it_holds_the_truth_as_often_as_it_says():
    within = 0
    for seed in range(200):
        values = torch.empty(60).exponential_(generator=torch.Generator().manual_seed(seed))
        low, high = estimate("x", values, rounds=200).interval
        within += low <= 1 <= high
    assert 175 <= within <= 199  # a little under 95 %, as for all skewed values


def test_one_picture_has_no_interval():
    one = estimate("SSIM", torch.tensor([0.5]))
    assert one.interval == (-math.inf, math.inf) and str(one) == "SSIM 0.5 [no interval] of 1"


def test_values_without_end():
    perfect = estimate("PSNR", torch.tensor([math.inf, 30.0, 31.0]))
    assert perfect.value == math.inf and perfect.interval[0] < 31 and perfect.interval[1] == math.inf
    assert str(perfect).startswith("PSNR inf [30") and str(perfect).endswith(", inf] of 3")


def test_what_has_no_mean():
    for values in (torch.empty(0), torch.tensor([1.0, math.nan]), torch.zeros(2, 2), torch.tensor(1.0)):
        with pytest.raises(DataError, match="cannot be averaged"):
            estimate("x", values)
