"""A tensor as it lies in memory.

A compiler computes anew what it takes for cheap wherever it is used: sines of angles in every layer, for every head,
forwards and backwards. It leaves alone what goes through an operator that it cannot see into.
"""

import torch
from torch import Tensor


def settled(x: Tensor) -> Tensor:
    """x, of which no gradient is asked, made once: where a compiler writes for a GPU. Elsewhere it is made already."""
    return _settled(x) if x.is_cuda and torch.compiler.is_compiling() else x


@torch.library.custom_op("vitrail::settled", mutates_args=())
def _settled(x: Tensor) -> Tensor:
    return x.clone()


@_settled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
