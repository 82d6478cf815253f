"""The Fréchet distance between two sets of pictures, seen through a network and named after it.

Each set's features are taken for a Gaussian: |μ₁ − μ₂|² + tr C₁ + tr C₂ − 2 tr (C₁ C₂)^½, in float64.

N pictures, D width of the features
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.metrics.estimate import Estimate
from vitrail.evals.metrics.similarity import unit

ROWS = 4096  # of features summed at a time
Z = 1.959964  # deviations on either side of 95 %


class Network(Protocol):
    """What features are seen through: pixels (B, 3, side, side) in −1…1 → (B, D)."""

    @property
    def name(self) -> str: ...
    @property
    def side(self) -> int: ...
    def __call__(self, pixels: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Moments:
    """Number, mean (D,) and scatter (D, D) of some features. Those of parts add up to those of the whole."""

    n: float
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, features: Tensor, counts: Tensor | None = None) -> "Moments":
        """Of rows (N, D), each as often as `counts` (N,) says."""
        counts = torch.ones(len(features), device=features.device) if counts is None else counts.to(features.device)
        if not counts.all():
            features, counts = features[counts > 0], counts[counts > 0]
        if features.ndim != 2 or not features.numel():
            raise DataError(f"features of shape {tuple(features.shape)} have no moments", "give (N, D)")
        parts = (cls._of(f, c) for f, c in zip(features.split(ROWS), counts.split(ROWS), strict=True))
        total = next(parts)
        for part in parts:
            total = total + part
        if not total.scatter.isfinite().all():
            raise DataError("features that are no finite numbers have no moments", "look at the pictures")
        return total

    @classmethod
    def _of(cls, features: Tensor, counts: Tensor) -> "Moments":
        rows, weight = features.double(), counts.double()[:, None]
        n = weight.sum()
        mean = (rows * weight).sum(0) / n
        away = rows - mean
        return cls(n.item(), mean, (away * weight).mT @ away)

    def __add__(self, other: "Moments") -> "Moments":
        n = self.n + other.n
        away = other.mean - self.mean
        share = other.n / n
        scatter = self.scatter + other.scatter + torch.outer(away, away) * (self.n * share)
        return Moments(n, self.mean + away * share, scatter)

    @property
    def covariance(self) -> Tensor:
        if self.n < 2:
            raise DataError(f"{self.n:.0f} picture has no covariance", "give at least two")
        return self.scatter / (self.n - 1)


def frechet(x: Moments, y: Moments) -> float:
    """The distance of two Gaussians. The root's trace is exact: with C₁ = R R, the eigenvalues of C₁ C₂ are those of
    R C₂ R, which is symmetric."""
    if x.mean.shape != y.mean.shape:
        raise DataError(f"features of width {len(x.mean)} and {len(y.mean)} cannot be compared", "use one network")
    first, second = x.covariance, y.covariance.to(x.mean.device)
    values, vectors = torch.linalg.eigh(first)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
    inner = root @ second @ root
    cross = torch.linalg.eigvalsh((inner + inner.mT) / 2).clamp_min(0).sqrt().sum()
    distance = (x.mean - y.mean.to(x.mean.device)).square().sum() + first.trace() + second.trace() - 2 * cross
    return max(0.0, distance.item())  # rounding may take that of equals below


def features(pictures: Tensor | Iterable[Tensor], network: Network, *, batch: int = 64) -> Tensor:
    """(N, D) in float32 on the CPU, of pictures (N, 3, H, W) or of batches of them: uint8, or floating in −1…1,
    resized to the network's side (bicubic, antialiased)."""
    rows = []
    with torch.no_grad():
        for some in [pictures] if isinstance(pictures, Tensor) else pictures:
            for few in some.split(batch):
                pixels = unit(few).float() * 2 - 1
                if pixels.shape[2:] != (network.side, network.side):
                    size = (network.side, network.side)
                    pixels = F.interpolate(pixels, size, mode="bicubic", antialias=True).clamp(-1, 1)
                rows.append(network(pixels).float().cpu())
    if not rows:
        raise DataError("there are no pictures to see", "give at least two")
    return torch.cat(rows)


def frechet_distance(
    x: Tensor, y: Tensor, network: str, *, paired: bool = False, rounds: int = 20, seed: int = 0
) -> Estimate:
    """FD between features x (N, D) and y (M, D), called FD-`network`.

    The interval is ± 1.96 deviations of the distances of sets drawn anew with replacement, `rounds` times; `paired`
    draws the same rows of both, as for pictures and their reconstructions. It holds chance and not bias: fewer
    pictures give larger distances, so only those of equal numbers can be compared.
    """
    few = min(len(x), len(y))
    if few < 2 or (paired and len(x) != len(y)):
        raise DataError(f"{len(x)} and {len(y)} pictures have no {'paired ' * paired}distance", "give at least two")
    if few < x.shape[1]:
        warnings.warn(
            f"FD-{network} of {few:,} pictures: fewer than the {x.shape[1]:,} features, so it is far too large",
            stacklevel=2,
        )
    value = frechet(Moments.of(x), Moments.of(y))
    chance = torch.Generator().manual_seed(seed)
    again = []
    for _ in range(rounds):
        counts = _drawn(len(x), chance)
        again.append(frechet(Moments.of(x, counts), Moments.of(y, counts if paired else _drawn(len(y), chance))))
    if rounds < 2:
        return Estimate(f"FD-{network}", value, (-math.inf, math.inf), few)
    half = Z * torch.tensor(again, dtype=torch.float64).std().item()
    return Estimate(f"FD-{network}", value, (max(0.0, value - half), value + half), few)


def _drawn(n: int, chance: torch.Generator) -> Tensor:
    """How often each of n comes in n draws."""
    return torch.randint(n, (n,), generator=chance).bincount(minlength=n)
