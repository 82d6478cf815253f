"""Mean values with bootstrap confidence intervals."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.errors import DataError

BOOTSTRAP_ROUNDS = 1000
TAIL_FRACTION = 0.025  # on each side of the interval


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` images with its 95 % confidence interval."""

    name: str
    value: float
    interval: tuple[float, float]
    count: int

    def __str__(self) -> str:
        low, high = self.interval
        interval = "[no interval]" if low == -math.inf else f"[{low:.4g}, {high:.4g}]"
        return f"{self.name} {self.value:.4g} {interval} of {self.count:,}"


def estimate_mean(name: str, values: Tensor, *, rounds: int = BOOTSTRAP_ROUNDS, seed: int = 0) -> Estimate:
    """Mean of one value per image (N,) with its bootstrap interval. The interval of a single image is infinite."""
    if values.ndim != 1 or not len(values) or values.isnan().any():
        wrong = "values that contain NaN" if values.isnan().any() else f"values of shape {tuple(values.shape)}"
        raise DataError(f"{name} cannot be averaged over {wrong}", "pass one number per image")
    values = values.detach().double().cpu()
    if len(values) == 1 or not rounds:
        return Estimate(name, values.mean().item(), (-math.inf, math.inf), len(values))
    generator = torch.Generator().manual_seed(seed)
    draws = (torch.randint(len(values), (len(values),), generator=generator) for _ in range(rounds))
    means = torch.stack([values[draw].mean() for draw in draws]).sort().values
    # Order statistics without interpolation: a perfect image has infinite PSNR.
    ranks = math.floor(TAIL_FRACTION * (rounds - 1)), math.ceil((1 - TAIL_FRACTION) * (rounds - 1))
    return Estimate(name, values.mean().item(), (means[ranks[0]].item(), means[ranks[1]].item()), len(values))
