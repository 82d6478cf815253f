"""Two models on the same items: the difference with its interval, and whether it can be chance."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from vitrail.errors import DataError
from vitrail.evals.metrics.resample import interval, together


@dataclass(frozen=True)
class Paired:
    """`difference` is the first less the second. Of items that are right or wrong, `only` counts those that one of the
    two alone has right, and p is McNemar's: how likely a split as uneven as that is if neither is better."""

    difference: float
    interval: tuple[float, float]
    of: int
    only: tuple[int, int] | None = None
    p: float | None = None

    def __str__(self) -> str:
        low, high = self.interval
        told = f"{self.difference:+.1%} [{low:+.1%}, {high:+.1%}] of {self.of:,}"
        if self.only is not None:
            told += f"; only the first right {self.only[0]:,}, only the second {self.only[1]:,}, p = {self.p:.3g}"
        return told


def paired(
    first: Sequence[float], second: Sequence[float], groups: Sequence[Hashable] | None = None, *, seed: int = 0
) -> Paired:
    """Scores of the same items in the same order. Whole `groups` are drawn anew, such as the questions of a picture;
    McNemar's test takes items for independent, so there is none with them."""
    if len(first) != len(second) or not len(first):
        raise DataError(f"{len(first):,} and {len(second):,} scores to compare", "give both models' of the same items")
    a, b = (torch.tensor(list(map(float, scores)), dtype=torch.float64) for scores in (first, second))
    table = torch.stack([a - b, torch.ones_like(a)], 1)
    rows = table if groups is None else together(table, groups)
    found = interval(rows, lambda sums: sums[..., 0] / sums[..., 1], seed=seed)
    counted = groups is None and bool(((a == 0) | (a == 1)).all() and ((b == 0) | (b == 1)).all())
    if not counted:
        return Paired((a - b).mean().item(), found, len(a))
    only = int((a > b).sum()), int((b > a).sum())
    return Paired((a - b).mean().item(), found, len(a), only, mcnemar(*only))


def mcnemar(first: int, second: int) -> float:
    """The exact two-sided p of so many items that only the one has right, and so many that only the other has."""
    n, less = first + second, min(first, second)
    # As exact fractions of 2ⁿ, which have no float from n = 1024 on.
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(less + 1)) / 2**n)
