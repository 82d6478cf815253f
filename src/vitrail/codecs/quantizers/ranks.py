"""What quantizers know of a batch that many processes share: totals over all of it, each rank by its own count.

Only what trains is shared: outside training a rank's batch is its own. Nothing is sent in the backward pass. Weigh
every rank's losses by its number of vectors, as the trainer does, and the gradients are those of one process that has
the whole batch.

N vectors of this rank, D width
"""

import torch
import torch.distributed as dist
from torch import Tensor


def size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def total(x: Tensor) -> Tensor:
    """Summed over the ranks; no gradient."""
    x = x.detach()
    if size() > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


def mean(x: Tensor, count: int) -> Tensor:
    """A sum over this rank's `count` vectors → the mean over those of all ranks, with the gradient of this rank's own
    mean: its share of the whole, once it is weighed by its count."""
    own = x / max(count, 1)
    if size() == 1:
        return own
    both = total(torch.cat([x.flatten(), x.new_tensor([count])]))
    return (both[:-1] / both[-1].clamp_min(1)).view_as(x) + (own - own.detach())


def drawn(x: Tensor, wanted: Tensor) -> Tensor:
    """A vector of the whole batch (K, D) for each of `wanted` (K,) bool, spread evenly over x (N, D) of all ranks and
    the same on every one; zeros for the rest. An even spread takes from every picture alike, and takes none twice
    while there are enough."""
    own = dist.get_rank() if size() > 1 else 0
    counts = (torch.arange(size(), device=x.device) == own).double() * len(x)  # to set one would wait for the device
    chance = torch.rand(len(wanted), dtype=torch.float64, device=x.device)
    if size() > 1:
        dist.broadcast(chance, 0)
        counts = total(counts)
    ends = counts.cumsum(0)
    start = ends[own] - len(x)
    position = ((wanted.cumsum(0) - 1 + chance) / wanted.sum().clamp_min(1) * ends[-1]).floor() - start
    mine = wanted & (position >= 0) & (position < len(x))
    if not len(x):
        return total(x.new_zeros(len(wanted), x.shape[1]))
    rows = x.detach()[position.clamp(0, len(x) - 1).long()]
    return total(torch.where(mine[:, None], rows, 0))
