"""Bootstrap intervals of metrics that are functions of sums over items.

N items, G groups of dependent items, K columns, R draws
"""

import math
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from vitrail.evals.metrics.estimate import BOOTSTRAP_ROUNDS, TAIL_FRACTION

SumsMeasure = Callable[[Tensor], Tensor]
"""A metric as a function of sums: (…, K) → values (…)."""


def sum_by_group(table: Tensor, groups: Sequence[Hashable]) -> Tensor:
    """Sum the rows (N, K) of each group: (G, K), in order of first occurrence."""
    number: dict[Hashable, int] = {}
    rows = torch.tensor([number.setdefault(group, len(number)) for group in groups])
    return torch.zeros(len(number), table.shape[1], dtype=torch.float64).index_add_(0, rows, table.double())


def bootstrap_interval(
    table: Tensor, measure: SumsMeasure, *, rounds: int = BOOTSTRAP_ROUNDS, seed: int = 0
) -> tuple[float, float]:
    """95 % bootstrap interval of a metric of the column sums of a table (G, K).

    The interval is infinite for a single row, or if the metric is undefined for most draws.
    """
    table = table.double()
    if len(table) < 2:
        return -math.inf, math.inf
    generator = torch.Generator().manual_seed(seed)
    draws = (torch.randint(len(table), (len(table),), generator=generator) for _ in range(rounds))
    sums = torch.stack([draw.bincount(minlength=len(table)).double() @ table for draw in draws])  # (R, K)
    values = measure(sums)
    values = values[~values.isnan()].sort().values
    if len(values) < rounds / 2:
        return -math.inf, math.inf
    last = len(values) - 1
    return values[math.floor(TAIL_FRACTION * last)].item(), values[math.ceil((1 - TAIL_FRACTION) * last)].item()


def ratio_of_columns(numerator: int, denominator: int) -> SumsMeasure:
    """Metric that divides one column by another; 0 for a zero denominator, as in the benchmarks' scripts."""
    return lambda sums: torch.where(
        sums[..., denominator] > 0, sums[..., numerator] / sums[..., denominator].clamp(min=1e-300), 0.0
    )
