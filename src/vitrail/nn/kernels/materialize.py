"""Operator that makes the compiler materialize a tensor.

The compiler recomputes cheap values wherever they are used, such as sines of angles in every layer, head, forward and
backward pass. It does not recompute the output of an opaque operator.
"""

import torch
from torch import Tensor


def materialize(x: Tensor) -> Tensor:
    """Return x, computed once. It has an effect only in code compiled for a GPU, and passes no gradient."""
    return _materialize(x) if x.is_cuda and torch.compiler.is_compiling() else x


@torch.library.custom_op("vitrail::materialize", mutates_args=())
def _materialize(x: Tensor) -> Tensor:
    return x.clone()


@_materialize.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
