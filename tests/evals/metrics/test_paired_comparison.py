"""Bootstrap intervals, and paired comparison of two models."""

import math

import pytest
import torch

from vitrail.errors import DataError
from vitrail.evals.metrics.estimate import estimate_mean
from vitrail.evals.metrics.paired_comparison import compare_paired, mcnemar_p_value
from vitrail.evals.metrics.resampling import bootstrap_interval, ratio_of_columns, sum_by_group


def test_mcnemar_matches_scipy():
    stats = pytest.importorskip("scipy.stats")
    for first, second in ((0, 0), (1, 0), (5, 5), (3, 11), (40, 12), (900, 1100)):
        expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
        assert mcnemar_p_value(first, second) == pytest.approx(expected, rel=1e-9)


def test_paired_comparison():
    first, second = [1] * 60 + [0] * 40, [1] * 40 + [0] * 60
    found = compare_paired(first, second)
    assert found.difference == pytest.approx(0.2) and found.only_one_correct == (20, 0)
    assert 0.1 < found.interval[0] < 0.2 < found.interval[1] < 0.3  # narrower than two separate intervals
    assert found.p_value == pytest.approx(2 * 0.5**20)
    assert str(found).startswith("+20.0% [")
    grouped = compare_paired(first, second, [n // 20 for n in range(100)])
    assert grouped.p_value is None and grouped.interval[1] - grouped.interval[0] > found.interval[1] - found.interval[0]
    assert compare_paired([0.5, 1], [0.5, 0]).p_value is None
    with pytest.raises(DataError, match="1 and 2 scores"):
        compare_paired([1], [1, 0])


def test_bootstrap_interval_matches_that_of_a_mean():
    values = torch.rand(200, generator=torch.Generator().manual_seed(1))
    table = torch.stack([values, torch.ones(200)], 1)
    low, high = bootstrap_interval(table, ratio_of_columns(0, 1))
    other = estimate_mean("x", values)
    assert (low, high) == pytest.approx(other.interval, abs=5e-3)
    assert bootstrap_interval(table[:1], ratio_of_columns(0, 1)) == (-math.inf, math.inf)


def test_groups_are_summed():
    table = torch.tensor([[1.0, 1], [0, 1], [1, 1]])
    assert sum_by_group(table, ["b", "a", "b"]).tolist() == [[2, 2], [0, 1]]
    assert ratio_of_columns(0, 1)(torch.tensor([3.0, 0])).item() == 0
