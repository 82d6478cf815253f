"""Fused linear layer and GELU: gelu(x·Wᵀ + b), with the activation in the epilogue of the matrix product.

Torch has it as a private function that the compiler would decompose, so a custom operator wraps it. Inference only: no
gradient is defined.
"""

import torch
from torch import Tensor


@torch.library.custom_op("vitrail::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (…, K), weight (N, K), bias (N,) → (…, N), with the tanh form of GELU."""
    flat = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return flat.unflatten(0, x.shape[:-1])


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
