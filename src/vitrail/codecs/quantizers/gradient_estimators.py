"""Gradient estimators: quantized values in the forward pass, gradients of another function in the backward pass.

Shapes: … any axes, D width.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GradientEstimator = Literal["straight", "rotation"]
MIN_NORM = 1e-6


def apply_straight_through(x: Tensor, codes: Tensor) -> Tensor:
    """Return `codes` exactly, with the gradient of x (straight-through estimator). Non-finite values of x stay
    non-finite.
    """
    return codes.detach() + (x - x.detach())


def apply_rotation_trick(x: Tensor, codes: Tensor) -> Tensor:
    """Return `codes` with the gradient of λRx (rotation trick, Fifty et al. 2024).

    R rotates the direction of x to that of the code, and λ = |code| / |x|; both are constants in the backward pass.
    Vectors with almost no length, for which λ is unbounded, use the straight-through estimator.
    """
    with torch.no_grad():
        length = x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        a, b = x / length, F.normalize(codes, dim=-1)
        middle = F.normalize(a + b, dim=-1)
        scale = codes.norm(dim=-1, keepdim=True) / length
        small = length < MIN_NORM

    def along(direction: Tensor) -> Tensor:
        return (x * direction).sum(-1, keepdim=True)

    rotated_x = scale * (x - 2 * along(middle) * middle + 2 * along(a) * b)  # R = 1 − 2 m mᵀ + 2 b aᵀ
    return apply_straight_through(torch.where(small, x, rotated_x), codes)


def pass_gradient(x: Tensor, codes: Tensor, estimator: GradientEstimator) -> Tensor:
    """Return `codes` with the gradient of the chosen estimator."""
    return apply_straight_through(x, codes) if estimator == "straight" else apply_rotation_trick(x, codes)
