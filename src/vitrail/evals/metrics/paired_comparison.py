"""Paired comparison of two models on the same items: difference, interval and McNemar's test."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from vitrail.errors import DataError
from vitrail.evals.metrics.resampling import bootstrap_interval, sum_by_group


@dataclass(frozen=True)
class PairedComparison:
    """Difference of the mean scores: first minus second.

    For binary scores, `only_one_correct` counts the items that only the first or only the second model has right, and
    `p_value` is that of McNemar's test.
    """

    difference: float
    interval: tuple[float, float]
    count: int
    only_one_correct: tuple[int, int] | None = None
    p_value: float | None = None

    def __str__(self) -> str:
        low, high = self.interval
        text = f"{self.difference:+.1%} [{low:+.1%}, {high:+.1%}] of {self.count:,}"
        if self.only_one_correct is not None:
            first, second = self.only_one_correct
            text += f"; only the first right {first:,}, only the second {second:,}, p = {self.p_value:.3g}"
        return text


def compare_paired(
    first: Sequence[float], second: Sequence[float], groups: Sequence[Hashable] | None = None, *, seed: int = 0
) -> PairedComparison:
    """Compare scores of the same items in the same order.

    The bootstrap draws whole `groups`, such as all questions of an image. With groups there is no McNemar test, because
    it assumes independent items.
    """
    if len(first) != len(second) or not len(first):
        raise DataError(
            f"{len(first):,} and {len(second):,} scores to compare", "pass the scores of both models on the same items"
        )
    a, b = (torch.tensor(list(map(float, scores)), dtype=torch.float64) for scores in (first, second))
    table = torch.stack([a - b, torch.ones_like(a)], 1)
    rows = table if groups is None else sum_by_group(table, groups)
    interval_95 = bootstrap_interval(rows, lambda sums: sums[..., 0] / sums[..., 1], seed=seed)
    is_binary = groups is None and bool(((a == 0) | (a == 1)).all() and ((b == 0) | (b == 1)).all())
    if not is_binary:
        return PairedComparison((a - b).mean().item(), interval_95, len(a))
    discordant = int((a > b).sum()), int((b > a).sum())
    return PairedComparison((a - b).mean().item(), interval_95, len(a), discordant, mcnemar_p_value(*discordant))


def mcnemar_p_value(first: int, second: int) -> float:
    """Exact two-sided p-value of McNemar's test, from the numbers of items that only one model has right."""
    n, smaller = first + second, min(first, second)
    # Exact integers: 2ⁿ overflows a float from n = 1024 on.
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(smaller + 1)) / 2**n)
