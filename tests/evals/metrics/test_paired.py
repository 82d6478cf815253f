"""Intervals from pictures drawn anew, and two models on the same items."""

import math

import pytest
import torch

from vitrail.errors import DataError
from vitrail.evals.metrics.estimate import estimate
from vitrail.evals.metrics.paired import mcnemar, paired
from vitrail.evals.metrics.resample import interval, share_of, together


def test_mcnemar_as_scipy():
    stats = pytest.importorskip("scipy.stats")
    for first, second in ((0, 0), (1, 0), (5, 5), (3, 11), (40, 12), (900, 1100)):
        expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
        assert mcnemar(first, second) == pytest.approx(expected, rel=1e-9)


def test_paired():
    first, second = [1] * 60 + [0] * 40, [1] * 40 + [0] * 60
    found = paired(first, second)
    assert found.difference == pytest.approx(0.2) and found.only == (20, 0)
    assert 0.1 < found.interval[0] < 0.2 < found.interval[1] < 0.3  # narrower than two intervals apart would be
    assert found.p == pytest.approx(2 * 0.5**20)
    assert str(found).startswith("+20.0% [")
    grouped = paired(first, second, [n // 20 for n in range(100)])
    assert grouped.p is None and grouped.interval[1] - grouped.interval[0] > found.interval[1] - found.interval[0]
    assert paired([0.5, 1], [0.5, 0]).p is None
    with pytest.raises(DataError, match="1 and 2 scores"):
        paired([1], [1, 0])


def test_interval_is_that_of_a_mean():
    values = torch.rand(200, generator=torch.Generator().manual_seed(1))
    table = torch.stack([values, torch.ones(200)], 1)
    low, high = interval(table, share_of(0, 1))
    other = estimate("x", values)
    assert (low, high) == pytest.approx(other.interval, abs=5e-3)
    assert interval(table[:1], share_of(0, 1)) == (-math.inf, math.inf)


def test_groups_are_added_up():
    table = torch.tensor([[1.0, 1], [0, 1], [1, 1]])
    assert together(table, ["b", "a", "b"]).tolist() == [[2, 2], [0, 1]]
    assert share_of(0, 1)(torch.tensor([3.0, 0])).item() == 0
