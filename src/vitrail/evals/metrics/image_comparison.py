"""Compares images with their reconstructions: all metrics in one pass over batches."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.metrics.estimate import BOOTSTRAP_ROUNDS, Estimate, estimate_mean
from vitrail.evals.metrics.frechet_distance import FeatureNetwork, extract_features, frechet_distance
from vitrail.evals.metrics.image_similarity import lpips, psnr, ssim


class PerceptualMetric(Protocol):
    """A perceptual distance between two batches of images, such as LPIPS."""

    @property
    def name(self) -> str: ...
    def __call__(self, x: Tensor, y: Tensor, /) -> Tensor: ...


def compare_images(
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    perceptual: PerceptualMetric | None = None,
    network: FeatureNetwork | None = None,
    rounds: int = BOOTSTRAP_ROUNDS,
    frechet_rounds: int = 20,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Compute metrics by name from batches (images, reconstructions).

    PSNR and SSIM, LPIPS with `perceptual`, and the Fréchet distance with `network`. Only metric values and features
    are kept in memory.
    """
    values: dict[str, list[Tensor]] = {}
    feature_rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    device = torch.device("cpu")
    for x, y in batches:
        device = x.device
        batch_values = {"PSNR": psnr(x, y), "SSIM": ssim(x, y)}
        if perceptual is not None:
            batch_values[perceptual.name] = lpips(x, y, perceptual)
        for name, parts in batch_values.items():
            values.setdefault(name, []).append(parts.cpu())
        if network is not None:
            for rows, images in zip(feature_rows, (x, y), strict=True):
                rows.append(extract_features(images, network))
    if not values:
        raise DataError("there are no images to compare", "pass at least one batch")
    scores = {name: estimate_mean(name, torch.cat(parts), rounds=rounds, seed=seed) for name, parts in values.items()}
    if network is not None:
        x, y = (torch.cat(rows).to(device) for rows in feature_rows)  # the distance needs large matrix products
        distance = frechet_distance(x, y, network.name, paired=True, rounds=frechet_rounds, seed=seed)
        scores[distance.name] = distance
    return scores
