"""Masks for masked image and video modeling, and their losses.

B images, h × w patches, N = h·w, M masked patches, R rectangles, K values of a patch or a feature
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError

MAX_RECTANGLES = 16
"""Rectangles drawn per image. Three cover the usual ratio of 0.4; single random patches fill larger ratios."""


def count_masked_patches(num_patches: int, ratio: float) -> int:
    """Return the number of masked patches, which is the same for every image, so that shapes are static."""
    count = round(ratio * num_patches)
    if not 0 < count < num_patches:
        raise ConfigError(
            f"mask ratio {ratio:g} masks {count} of {num_patches} patches", "mask at least one, and not all"
        )
    return count


def sample_random_indices(
    batch_size: int, grid: tuple[int, int], count: int, device: torch.device | None = None
) -> Tensor:
    """Return the indices (B, M) of uniformly random patches (MAE)."""
    return _first(torch.rand(batch_size, grid[0] * grid[1], device=device), count)


def sample_block_indices(
    batch_size: int, grid: tuple[int, int], count: int, device: torch.device | None = None
) -> Tensor:
    """Return the indices (B, M) of patches in random rectangles (BEiT).

    A rectangle covers 8 … 40% of the image, with an aspect ratio up to 3. Its centre is uniform, so it may cross the
    border; otherwise corners would rarely be masked. Rectangles are added until M patches are masked. The last one is
    shrunk around its centre to give exactly M.
    """
    h, w = grid
    area, ratio, *centre = torch.rand(4, batch_size, MAX_RECTANGLES, 1, device=device)
    area, ratio = (0.08 + 0.32 * area) * h * w, torch.exp((2 * ratio - 1) * math.log(3) / 2)
    size = (area.sqrt() / ratio).clamp(1, h), (area.sqrt() * ratio).clamp(1, w)  # in patches, each (B, R, 1)
    distance = [
        (torch.arange(line, device=device) + 0.5 - place * line).abs() / (length / 2)  # (B, R, h or w)
        for line, length, place in zip(grid, size, centre, strict=True)
    ]
    growth = torch.maximum(distance[0][..., :, None], distance[1][..., None, :]).flatten(2)  # (B, R, N): 1 at the edge
    order = torch.arange(MAX_RECTANGLES, device=device)[:, None]
    covered = torch.where(growth <= 1, order + growth, torch.inf).amin(1)  # (B, N)
    # Score of patches outside all rectangles.
    uncovered = MAX_RECTANGLES + 2 + torch.rand(batch_size, h * w, device=device)
    # The noise breaks ties; it is smaller than the difference between two rings of a rectangle.
    return _first(torch.minimum(covered + 1e-4 * torch.rand_like(uncovered), uncovered), count)


def _first(score: Tensor, count: int) -> Tensor:
    return score.topk(count, dim=1, largest=False).indices


def indices_to_mask(indices: Tensor, num_patches: int) -> Tensor:
    """Convert patch indices (B, M) to a boolean mask (B, N)."""
    none = torch.zeros(len(indices), num_patches, dtype=torch.bool, device=indices.device)
    return none.scatter(1, indices, True)


def gather_patches(x: Tensor, indices: Tensor) -> Tensor:
    """Select patches by index: (B, N, K) → (B, M, K)."""
    return x.gather(1, indices[..., None].expand(-1, -1, x.shape[-1]))


def pixel_loss(predictions: Tensor, patches: Tensor) -> Tensor:
    """Return the mean squared error to the pixels of each patch, summed over patches (MAE). Both are (B, M, K).

    The pixels are normalized per patch, so brightness and contrast of a patch do not count.
    """
    patches = patches.float()
    normalized = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
    return (predictions.float() - normalized).square().mean(-1).sum()


def feature_loss(predictions: Tensor, features: Tensor) -> Tensor:
    """Return 1 − cosine similarity to a teacher's features, summed over patches (EVA). Both are (B, M, K)."""
    return (1 - F.cosine_similarity(predictions.float(), features.float(), dim=-1)).sum()


def sample_code_mask(
    shape: tuple[int, ...],
    rate_range: tuple[float, float],
    device: torch.device | None = None,
    *,
    unmasked_frame_rate: float = 0.0,
) -> Tensor:
    """Return a mask of the codes to predict, booleans (B, T, h, w), with T frames per video (Genie).

    Each video draws a mask rate from `rate_range` (Genie: 0.5 to 1) and masks codes independently. The first frame is
    never masked. A fraction `unmasked_frame_rate` of the other frames is not masked either, as in a rollout, where all
    past frames are known.
    """
    low, high = rate_range
    if not 0 <= low <= high <= 1 or not high:
        raise ConfigError(f"mask rates are {low:g} to {high:g}", "use 0 ≤ low ≤ high ≤ 1 and high > 0")
    if not 0 <= unmasked_frame_rate < 1:
        raise ConfigError(f"unmasked_frame_rate is {unmasked_frame_rate:g}", "use at least 0 and less than 1")
    rate_of_video = low + (high - low) * torch.rand(shape[0], 1, 1, 1, device=device)
    masked = torch.rand(shape, device=device) < rate_of_video
    visible = torch.arange(shape[1], device=device)[:, None, None] == 0
    if unmasked_frame_rate:
        visible = visible | (torch.rand(*shape[:2], 1, 1, device=device) < unmasked_frame_rate)
    return masked & ~visible
