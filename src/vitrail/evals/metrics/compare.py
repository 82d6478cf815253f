"""Pictures against their reconstructions: every measure in one pass, a batch at a time."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.metrics.estimate import ROUNDS, Estimate, estimate
from vitrail.evals.metrics.frechet import Network, features, frechet_distance
from vitrail.evals.metrics.similarity import lpips, psnr, ssim


class Perceptual(Protocol):
    @property
    def name(self) -> str: ...
    def __call__(self, x: Tensor, y: Tensor, /) -> Tensor: ...


def compare(
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    perceptual: Perceptual | None = None,
    network: Network | None = None,
    rounds: int = ROUNDS,
    frechet_rounds: int = 20,
    seed: int = 0,
) -> dict[str, Estimate]:
    """PSNR, SSIM, LPIPS with `perceptual`, and the Fréchet distance through `network`, by name, of batches (pictures,
    reconstructions). Of each picture only its few numbers and its two rows of features are kept."""
    values: dict[str, list[Tensor]] = {}
    seen: tuple[list[Tensor], list[Tensor]] = ([], [])
    device = torch.device("cpu")
    for x, y in batches:
        device = x.device
        found = {"PSNR": psnr(x, y), "SSIM": ssim(x, y)}
        if perceptual is not None:
            found[perceptual.name] = lpips(x, y, perceptual)
        for name, each in found.items():
            values.setdefault(name, []).append(each.cpu())
        if network is not None:
            for rows, some in zip(seen, (x, y), strict=True):
                rows.append(features(some, network))
    if not values:
        raise DataError("there are no pictures to compare", "give at least one batch")
    scores = {name: estimate(name, torch.cat(each), rounds=rounds, seed=seed) for name, each in values.items()}
    if network is not None:
        x, y = (torch.cat(rows).to(device) for rows in seen)  # many products of large matrices await them
        distance = frechet_distance(x, y, network.name, paired=True, rounds=frechet_rounds, seed=seed)
        scores[distance.name] = distance
    return scores
