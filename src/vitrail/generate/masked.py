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


def gumbel(chance: Tensor) -> Tensor:
    """Chance in [0, 1) as noise to add to log-probabilities."""
    return -(-(chance.clamp(1e-12, 1 - 1e-12)).log()).log()


def hide_least(sure: Tensor, hidden: Tensor, left: Tensor) -> Tensor:
    """(B, N) booleans: of the hidden codes, the `left` (B,) that are least sure (B, N); what is settled stays."""
    rank = sure.masked_fill(~hidden, torch.inf).argsort(1).argsort(1)  # 0: the least sure
    return (rank < left[:, None].to(rank)) & hidden
