"""Schedule of masked-parallel decoding (MaskGIT): how many codes stay hidden after each pass, and which.

Shapes: B rows, N codes per row.
"""

import math

import torch
from torch import Tensor


def count_hidden(total: Tensor, step: int, num_steps: int) -> Tensor:
    """Return how many of `total` codes (B,) are hidden after pass `step` (from 0) of `num_steps`.

    The cosine schedule reveals few codes in early passes. After the last pass, no code is hidden.
    """
    if step + 1 == num_steps:
        return torch.zeros_like(total)
    return torch.ceil(torch.cos(torch.tensor(math.pi / 2 * (step + 1) / num_steps)) * total).long()


def find_active_passes(total: Tensor, num_steps: int) -> list[bool]:
    """Return for each pass whether it fixes a code in any row. The other passes can be skipped.

    The cosine schedule has many inactive passes if there are as many passes as codes, or few hidden codes.
    """
    left = torch.stack([total, *(count_hidden(total, step, num_steps) for step in range(num_steps))])  # (steps + 1, B)
    return (left[1:] < left[:-1]).any(1).tolist()


def gumbel_noise(uniforms: Tensor) -> Tensor:
    """Convert uniforms in [0, 1) to Gumbel noise for log-probabilities."""
    return -(-(uniforms.clamp(1e-12, 1 - 1e-12)).log()).log()


def hide_least_confident(confidence: Tensor, hidden: Tensor, count: Tensor) -> Tensor:
    """Return a mask (B, N) of the `count` (B,) hidden codes with the least confidence (B, N)."""
    rank = confidence.masked_fill(~hidden, torch.inf).argsort(1).argsort(1)  # 0: least confident
    return (rank < count[:, None].to(rank)) & hidden
