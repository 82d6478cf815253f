"""Masked-parallel decoding (MaskGIT): how many codes are still hidden after each pass, and which.

B rows, N codes of a row
"""

import math

import torch
from torch import Tensor


def still_hidden(total: Tensor, step: int, steps: int) -> Tensor:
    """(B,) of `total` codes (B,), how many are hidden after pass `step` of so many, counted from 0: after the last,
    none. The cosine opens few at first, when little is known."""
    if step + 1 == steps:
        return torch.zeros_like(total)
    return torch.ceil(torch.cos(torch.tensor(math.pi / 2 * (step + 1) / steps)) * total).long()


def settles(total: Tensor, steps: int) -> list[bool]:
    """Of each pass, whether it settles a code of any row (B,): those that settle none need not be made. With as many
    passes as a picture has codes, and where few codes are open, the cosine has many of them."""
    left = torch.stack([total, *(still_hidden(total, step, steps) for step in range(steps))])  # (steps + 1, B)
    return (left[1:] < left[:-1]).any(1).tolist()


def gumbel(chance: Tensor) -> Tensor:
    """Chance in [0, 1) as noise to add to log-probabilities."""
    return -(-(chance.clamp(1e-12, 1 - 1e-12)).log()).log()


def hide_least(sure: Tensor, hidden: Tensor, left: Tensor) -> Tensor:
    """(B, N) booleans: of the hidden codes, the `left` (B,) that are least sure (B, N); what is settled stays."""
    rank = sure.masked_fill(~hidden, torch.inf).argsort(1).argsort(1)  # 0: the least sure
    return (rank < left[:, None].to(rank)) & hidden
