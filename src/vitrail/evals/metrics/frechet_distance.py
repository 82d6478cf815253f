"""Fréchet distance between the features of two image sets, named after the feature network (FD-inception, …).

Features are modelled as Gaussians: |μ₁ − μ₂|² + tr C₁ + tr C₂ − 2 tr (C₁ C₂)^½, in float64.

N images, D feature width
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
from vitrail.evals.metrics.image_similarity import to_unit_range

FEATURE_BLOCK_ROWS = 4096  # feature rows per summation block
Z_95 = 1.959964  # standard deviations of a 95 % interval


class FeatureNetwork(Protocol):
    """A feature network: pixels (B, 3, image_size, image_size) in −1…1 → features (B, D)."""

    @property
    def name(self) -> str: ...
    @property
    def image_size(self) -> int: ...
    def __call__(self, pixels: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class FeatureMoments:
    """Count, mean (D,) and scatter matrix (D, D) of features. Moments of disjoint parts can be added."""

    count: float
    mean: Tensor
    scatter: Tensor

    @classmethod
    def from_features(cls, features: Tensor, counts: Tensor | None = None) -> "FeatureMoments":
        """Moments of features (N, D), each row repeated `counts` (N,) times."""
        counts = torch.ones(len(features), device=features.device) if counts is None else counts.to(features.device)
        if not counts.all():
            features, counts = features[counts > 0], counts[counts > 0]
        if features.ndim != 2 or not features.numel():
            raise DataError(f"features have shape {tuple(features.shape)}", "pass (N, D)")
        parts = (
            cls._from_block(f, c)
            for f, c in zip(features.split(FEATURE_BLOCK_ROWS), counts.split(FEATURE_BLOCK_ROWS), strict=True)
        )
        moments = next(parts)
        for part in parts:
            moments = moments + part
        if not moments.scatter.isfinite().all():
            raise DataError("features are not finite", "check the images")
        return moments

    @classmethod
    def _from_block(cls, features: Tensor, counts: Tensor) -> "FeatureMoments":
        rows, weight = features.double(), counts.double()[:, None]
        n = weight.sum()
        mean = (rows * weight).sum(0) / n
        centered = rows - mean
        return cls(n.item(), mean, (centered * weight).mT @ centered)

    def __add__(self, other: "FeatureMoments") -> "FeatureMoments":
        n = self.count + other.count
        mean_difference = other.mean - self.mean
        fraction = other.count / n
        scatter = self.scatter + other.scatter + torch.outer(mean_difference, mean_difference) * (self.count * fraction)
        return FeatureMoments(n, self.mean + mean_difference * fraction, scatter)

    @property
    def covariance(self) -> Tensor:
        if self.count < 2:
            raise DataError(f"the covariance of {self.count:.0f} image is undefined", "pass at least two")
        return self.scatter / (self.count - 1)


def gaussian_frechet_distance(x: FeatureMoments, y: FeatureMoments) -> float:
    """Fréchet distance of two Gaussians.

    The trace of the root is exact: with C₁ = R R, C₁ C₂ has the eigenvalues of the symmetric matrix R C₂ R.
    """
    if x.mean.shape != y.mean.shape:
        raise DataError(f"feature widths {len(x.mean)} and {len(y.mean)} differ", "use one network")
    first, second = x.covariance, y.covariance.to(x.mean.device)
    values, vectors = torch.linalg.eigh(first)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.mT
    inner = root @ second @ root
    cross = torch.linalg.eigvalsh((inner + inner.mT) / 2).clamp_min(0).sqrt().sum()
    distance = (x.mean - y.mean.to(x.mean.device)).square().sum() + first.trace() + second.trace() - 2 * cross
    return max(0.0, distance.item())  # rounding can make it negative for equal sets


def extract_features(images: Tensor | Iterable[Tensor], network: FeatureNetwork, *, batch_size: int = 64) -> Tensor:
    """Features (N, D) in float32 on the CPU, of images (N, 3, H, W) or of batches of images.

    Images are uint8, or floats in −1…1. They are resized to the network's image size (bicubic, antialiased).
    """
    rows = []
    with torch.no_grad():
        for batch_images in [images] if isinstance(images, Tensor) else images:
            for chunk in batch_images.split(batch_size):
                pixels = to_unit_range(chunk).float() * 2 - 1
                if pixels.shape[2:] != (network.image_size, network.image_size):
                    size = (network.image_size, network.image_size)
                    pixels = F.interpolate(pixels, size, mode="bicubic", antialias=True).clamp(-1, 1)
                rows.append(network(pixels).float().cpu())
    if not rows:
        raise DataError("there are no images", "pass at least two")
    return torch.cat(rows)


def frechet_distance(
    x: Tensor, y: Tensor, network: str, *, paired: bool = False, rounds: int = 20, seed: int = 0
) -> Estimate:
    """Fréchet distance between features x (N, D) and y (M, D), named FD-`network`.

    The interval is ± 1.96 standard deviations over `rounds` bootstrap samples. `paired` draws the same rows of both
    sets, as for images and their reconstructions. The interval does not include bias: fewer images give larger
    distances, so compare only distances of equal numbers of images.
    """
    count = min(len(x), len(y))
    if count < 2 or (paired and len(x) != len(y)):
        raise DataError(f"no {'paired ' * paired}distance between {len(x)} and {len(y)} images", "pass at least two")
    if count < x.shape[1]:
        warnings.warn(
            f"FD-{network} of {count:,} images: fewer than {x.shape[1]:,} features, so the distance is far too large",
            stacklevel=2,
        )
    value = gaussian_frechet_distance(FeatureMoments.from_features(x), FeatureMoments.from_features(y))
    generator = torch.Generator().manual_seed(seed)
    resampled = []
    for _ in range(rounds):
        counts = _draw_counts(len(x), generator)
        resampled.append(
            gaussian_frechet_distance(
                FeatureMoments.from_features(x, counts),
                FeatureMoments.from_features(y, counts if paired else _draw_counts(len(y), generator)),
            )
        )
    if rounds < 2:
        return Estimate(f"FD-{network}", value, (-math.inf, math.inf), count)
    half_width = Z_95 * torch.tensor(resampled, dtype=torch.float64).std().item()
    return Estimate(f"FD-{network}", value, (max(0.0, value - half_width), value + half_width), count)


def _draw_counts(n: int, generator: torch.Generator) -> Tensor:
    """Draw n of n items with replacement and count each."""
    return torch.randint(n, (n,), generator=generator).bincount(minlength=n)
