"""How much of a vocabulary is used."""

from typing import NamedTuple

import torch
from torch import Tensor


class Usage(NamedTuple):
    codes: int
    """different ids seen"""
    perplexity: float
    """how many equally frequent ids would be as hard to guess"""


def usage(ids: Tensor) -> Usage:
    """Of all ids given, whatever their shape; give one column at a time where a vector has several."""
    counts = torch.unique(ids, return_counts=True)[1].double()
    share = counts / counts.sum()
    return Usage(len(counts), float(torch.exp(-torch.xlogy(share, share).sum())))
