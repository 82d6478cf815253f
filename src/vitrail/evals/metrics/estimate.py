"""A value with the interval that pictures drawn anew would leave it in."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.errors import DataError

ROUNDS = 1000
TAIL = 0.025  # on either side


@dataclass(frozen=True)
class Estimate:
    """A measure over `of` pictures and its interval of 95 %."""

    name: str
    value: float
    interval: tuple[float, float]
    of: int

    def __str__(self) -> str:
        low, high = self.interval
        told = "[no interval]" if low == -math.inf else f"[{low:.4g}, {high:.4g}]"
        return f"{self.name} {self.value:.4g} {told} of {self.of:,}"


def estimate(name: str, values: Tensor, *, rounds: int = ROUNDS, seed: int = 0) -> Estimate:
    """The mean of one value a picture (N,), and the percentiles of the means of N pictures drawn from them with
    replacement. One picture tells nothing of others, so its interval is without ends."""
    if values.ndim != 1 or not len(values) or values.isnan().any():
        wrong = "values that are no numbers" if values.isnan().any() else f"values of shape {tuple(values.shape)}"
        raise DataError(f"{name} cannot be averaged over {wrong}", "give one number a picture")
    values = values.detach().double().cpu()
    if len(values) == 1 or not rounds:
        return Estimate(name, values.mean().item(), (-math.inf, math.inf), len(values))
    chance = torch.Generator().manual_seed(seed)
    draws = (torch.randint(len(values), (len(values),), generator=chance) for _ in range(rounds))
    means = torch.stack([values[draw].mean() for draw in draws]).sort().values
    # Ranks and no mixtures of two: a picture without error has an infinite PSNR.
    ends = math.floor(TAIL * (rounds - 1)), math.ceil((1 - TAIL) * (rounds - 1))
    return Estimate(name, values.mean().item(), (means[ends[0]].item(), means[ends[1]].item()), len(values))
