"""Batch statistics over all ranks of distributed training.

Only training shares statistics. Nothing is communicated in the backward pass. If the losses of each rank are weighted
by its number of vectors, as the trainer does, gradients equal those of one process with the whole batch.

Shapes: N vectors of this rank, D width.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def get_world_size() -> int:
    """World size, 1 without distributed training."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(x: Tensor) -> Tensor:
    """Sum over all ranks, without gradient."""
    x = x.detach()
    if get_world_size() > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


def mean_over_ranks(x: Tensor, count: int) -> Tensor:
    """Mean over the vectors of all ranks, from this rank's sum over `count` vectors.

    Its gradient is that of this rank's mean, which is its part of the total once losses are weighted by count.
    """
    local = x / max(count, 1)
    if get_world_size() == 1:
        return local
    both = sum_over_ranks(torch.cat([x.flatten(), x.new_tensor([count])]))
    return (both[:-1] / both[-1].clamp_min(1)).view_as(x) + (local - local.detach())


def sample_over_ranks(x: Tensor, is_requested: Tensor) -> Tensor:
    """Draw a vector for each code with `is_requested` (K,), evenly spread over x (N, D) of all ranks. Return (K, D),
    the same on every rank.

    Rows of other codes are zero. An even spread draws from all images and draws no vector twice while there are
    enough.
    """
    rank = dist.get_rank() if get_world_size() > 1 else 0
    # Indexed assignment would synchronize.
    counts = (torch.arange(get_world_size(), device=x.device) == rank).double() * len(x)
    offsets = torch.rand(len(is_requested), dtype=torch.float64, device=x.device)
    if get_world_size() > 1:
        dist.broadcast(offsets, 0)
        counts = sum_over_ranks(counts)
    ends = counts.cumsum(0)
    start = ends[rank] - len(x)
    position = ((is_requested.cumsum(0) - 1 + offsets) / is_requested.sum().clamp_min(1) * ends[-1]).floor() - start
    is_local = is_requested & (position >= 0) & (position < len(x))
    if not len(x):
        return sum_over_ranks(x.new_zeros(len(is_requested), x.shape[1]))
    rows = x.detach()[position.clamp(0, len(x) - 1).long()]
    return sum_over_ranks(torch.where(is_local[:, None], rows, 0))
