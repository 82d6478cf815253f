"""The interval of any measure that is a function of sums, from drawing pictures anew.

N items, G groups of them that stand or fall together, K columns, R draws
"""

import math
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from vitrail.evals.metrics.estimate import ROUNDS, TAIL

Measure = Callable[[Tensor], Tensor]
"""sums (…, K) → values (…)"""


def together(table: Tensor, groups: Sequence[Hashable]) -> Tensor:
    """(N, K) → (G, K): the rows of each group added up, in the order the groups first come in"""
    number: dict[Hashable, int] = {}
    rows = torch.tensor([number.setdefault(group, len(number)) for group in groups])
    return torch.zeros(len(number), table.shape[1], dtype=torch.float64).index_add_(0, rows, table.double())


def interval(table: Tensor, measure: Measure, *, rounds: int = ROUNDS, seed: int = 0) -> tuple[float, float]:
    """95 % of what `measure` makes of the sums over G rows drawn from (G, K) with replacement. One row tells nothing of
    others, so its interval is without ends; so is that of a measure which most draws leave undefined."""
    table = table.double()
    if len(table) < 2:
        return -math.inf, math.inf
    chance = torch.Generator().manual_seed(seed)
    draws = (torch.randint(len(table), (len(table),), generator=chance) for _ in range(rounds))
    sums = torch.stack([draw.bincount(minlength=len(table)).double() @ table for draw in draws])  # (R, K)
    values = measure(sums)
    values = values[~values.isnan()].sort().values
    if len(values) < rounds / 2:
        return -math.inf, math.inf
    last = len(values) - 1
    return values[math.floor(TAIL * last)].item(), values[math.ceil((1 - TAIL) * last)].item()


def share_of(hits: int, of: int) -> Measure:
    """Column over column: 0 where there is nothing to divide by, as the benchmarks' scripts have it."""
    return lambda sums: torch.where(sums[..., of] > 0, sums[..., hits] / sums[..., of].clamp(min=1e-300), 0.0)
