"""How a gradient passes a choice: exact values forward, another function's slope backward.

… any axes, D width
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Through = Literal["straight", "rotation"]
SMALL = 1e-6


def straight_through(x: Tensor, hard: Tensor) -> Tensor:
    """The value of `hard`, bit for bit, with the gradient of x; what is not finite in x stays so."""
    return hard.detach() + (x - x.detach())


def rotated(x: Tensor, hard: Tensor) -> Tensor:
    """The value of `hard` with the gradient of λRx: the rotation R that takes x's direction to the code's, in their
    common plane, and λ = |code| / |x|, both held fixed (Fifty et al. 2024). A vector of no direction to speak of, for
    which λ has no bound, passes straight through."""
    with torch.no_grad():
        length = x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        a, b = x / length, F.normalize(hard, dim=-1)
        middle = F.normalize(a + b, dim=-1)
        scale = hard.norm(dim=-1, keepdim=True) / length
        small = length < SMALL

    def along(direction: Tensor) -> Tensor:
        return (x * direction).sum(-1, keepdim=True)

    turned = scale * (x - 2 * along(middle) * middle + 2 * along(a) * b)  # R = 1 − 2 m mᵀ + 2 b aᵀ
    return straight_through(torch.where(small, x, turned), hard)


def through(x: Tensor, hard: Tensor, kind: Through) -> Tensor:
    return straight_through(x, hard) if kind == "straight" else rotated(x, hard)
