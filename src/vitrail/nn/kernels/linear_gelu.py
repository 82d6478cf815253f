"""gelu(x·Wᵀ + b) in one matrix product: the activation is the product's epilogue.

Torch has this as a private function whose decomposition the compiler would undo, so it is wrapped as an operator that
the compiler leaves alone. Inference only: no gradient is defined.
"""

import torch
from torch import Tensor


@torch.library.custom_op("vitrail::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (…, K), weight (N, K), bias (N,) → (…, N), with the tanh form of gelu."""
    flat = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return flat.unflatten(0, x.shape[:-1])


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
