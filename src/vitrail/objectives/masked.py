"""Guessing what is hidden: which patches of a picture, and how far off a guess is.

B pictures, h × w patches, N = h·w, M of them masked, R rectangles, K numbers of a patch or a feature
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError

RECTANGLES = 16
"""Drawn for every picture. Three cover the usual 0.4 of it; what they leave of a larger share is scattered."""


def masked_count(patches: int, ratio: float) -> int:
    """How many of a picture's patches are masked: the same of every picture, so that shapes never change."""
    count = round(ratio * patches)
    if not 0 < count < patches:
        raise ConfigError(f"{ratio:g} of {patches} patches are {count}", "mask at least one, and leave one to see")
    return count


def random_places(batch: int, grid: tuple[int, int], count: int, device: torch.device | None = None) -> Tensor:
    """(B, M): patches anywhere, each as likely as any other (MAE)."""
    return _first(torch.rand(batch, grid[0] * grid[1], device=device), count)


def block_places(batch: int, grid: tuple[int, int], count: int, device: torch.device | None = None) -> Tensor:
    """(B, M): rectangles one after the other until there are enough (BEiT).

    A rectangle is 8 … 40% of the picture, three times as long as high at most. Its middle lies anywhere, so that it may
    reach over an edge: kept inside, rectangles would hardly ever hide a corner. Every one grows from its middle, and of
    the last, of which only a part is needed, a smaller one of the same shape is left.
    """
    h, w = grid
    area, ratio, *middle = torch.rand(4, batch, RECTANGLES, 1, device=device)
    area, ratio = (0.08 + 0.32 * area) * h * w, torch.exp((2 * ratio - 1) * math.log(3) / 2)
    size = (area.sqrt() / ratio).clamp(1, h), (area.sqrt() * ratio).clamp(1, w)  # in patches, each (B, R, 1)
    off = [
        (torch.arange(line, device=device) + 0.5 - place * line).abs() / (length / 2)  # (B, R, h or w)
        for line, length, place in zip(grid, size, middle, strict=True)
    ]
    growth = torch.maximum(off[0][..., :, None], off[1][..., None, :]).flatten(2)  # (B, R, N): 1 at the edge
    turn = torch.arange(RECTANGLES, device=device)[:, None]
    reached = torch.where(growth <= 1, turn + growth, torch.inf).amin(1)  # (B, N)
    loose = RECTANGLES + 2 + torch.rand(batch, h * w, device=device)  # what no rectangle reaches
    # The noise settles ties; it is smaller than any step between two rings of a rectangle.
    return _first(torch.minimum(reached + 1e-4 * torch.rand_like(loose), loose), count)


def _first(score: Tensor, count: int) -> Tensor:
    return score.topk(count, dim=1, largest=False).indices


def flags(places: Tensor, patches: int) -> Tensor:
    """(B, M) places → (B, N) whether a patch is masked"""
    none = torch.zeros(len(places), patches, dtype=torch.bool, device=places.device)
    return none.scatter(1, places, True)


def at(x: Tensor, places: Tensor) -> Tensor:
    """(B, N, K) → (B, M, K)"""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


def pixel_loss(said: Tensor, patches: Tensor) -> Tensor:
    """Sum over patches of the mean square to the patch's own pixels, normalised patch by patch (MAE), so that what is
    drawn counts and not how bright it is. Both (B, M, K)."""
    patches = patches.float()
    wanted = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
    return (said.float() - wanted).square().mean(-1).sum()


def feature_loss(said: Tensor, features: Tensor) -> Tensor:
    """Sum over patches of 1 − cosine to a teacher's features (EVA). Both (B, M, K)."""
    return (1 - F.cosine_similarity(said.float(), features.float(), dim=-1)).sum()


def hide_codes(
    shape: tuple[int, ...], rate: tuple[float, float], device: torch.device | None = None, *, whole: float = 0.0
) -> Tensor:
    """(B, T, h, w) booleans: codes of a video to be guessed. Of each video a share drawn from `rate` is hidden, code by
    code, and of the first frame nothing: it is what a world starts from (Genie: half of the codes to all). A share
    `whole` of the other frames, on average, is not hidden either: in a world that is played, all before are seen."""
    low, high = rate
    if not 0 <= low <= high <= 1 or not high:
        raise ConfigError(f"rates from {low:g} to {high:g} of the codes to be hidden", "give 0 ≤ low ≤ high ≤ 1")
    if not 0 <= whole < 1:
        raise ConfigError(f"{whole:g} of the frames not hidden at all", "give 0 or more, and less than 1")
    share = low + (high - low) * torch.rand(shape[0], 1, 1, 1, device=device)
    hidden = torch.rand(shape, device=device) < share
    shown = torch.arange(shape[1], device=device)[:, None, None] == 0
    if whole:
        shown = shown | (torch.rand(*shape[:2], 1, 1, device=device) < whole)
    return hidden & ~shown
