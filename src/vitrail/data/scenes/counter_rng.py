"""Counter-based random numbers: a function of (seed, index, label), identical on every device and in any batch.

Shapes: B batch size, … any further axes.
"""

import hashlib
import math

import torch
from torch import Tensor

from vitrail.nn.kernels import HAS_TRITON

_GOLDEN = -0x61C8864680B583EB  # 2⁶⁴/φ as a signed integer; constants of splitmix64
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def random_bits(seed: int, index: Tensor, label: str, *shape: int) -> Tensor:
    """Return integers (B, …) with 32 random bits. Draws with different labels are independent."""
    if index.is_cuda and not torch.compiler.is_compiling() and HAS_TRITON:
        from vitrail.nn.kernels import random_bits

        return random_bits.random_bits(_hash_label(seed, label), index, math.prod(shape)).view(len(index), *shape)
    # −1, −2, …: prevents the compiler from folding constants beyond 2⁶⁴.
    cells = ~torch.arange(math.prod(shape), device=index.device)
    start = _mix64(index.to(torch.int64)[:, None] * _GOLDEN + _hash_label(seed, label))
    return (_mix64(start - cells * _GOLDEN) >> 16 & 0xFFFFFFFF).view(len(index), *shape)


def random_integers(seed: int, index: Tensor, label: str, *shape: int, high: int | Tensor) -> Tensor:
    """Return integers (B, …) in [0, high). `high` may be a tensor that broadcasts to the shape."""
    return random_bits(seed, index, label, *shape) * high >> 32


def random_uniform(seed: int, index: Tensor, label: str, *shape: int) -> Tensor:
    """Return float32 numbers (B, …) in [0, 1) with 24 random bits."""
    return (random_bits(seed, index, label, *shape) >> 8).to(torch.float32) / (1 << 24)


def random_distinct(seed: int, index: Tensor, label: str, count: int, *, high: int | Tensor) -> Tensor:
    """Return different integers (B, count) in [0, high), as far as there are enough. `high` may be (B,)."""
    drawn, sorted_values = [], ()  # in order of drawing, and in ascending order
    for k in range(count):
        left = max(high - k, 1) if isinstance(high, int) else (high - k).clamp(min=1)
        number = random_integers(seed, index, f"{label} {k}", high=left)
        for earlier in sorted_values:
            number = number + (number >= earlier)
        drawn.append(number)
        sorted_values = torch.stack(drawn, 1).sort(1).values.unbind(1)
    return torch.stack(drawn, 1)


@torch.compiler.assume_constant_result  # compiled functions contain the result, not the hashing
def _hash_label(seed: int, label: str) -> int:
    """Hash a seed and a label to 64 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed},{label}".encode(), digest_size=8).digest(), "little", signed=True)


def _mix64(x: Tensor) -> Tensor:
    """Apply splitmix64's finalizer, with wrapping integers and logical shifts."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _MIX[0]
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _MIX[1]
    return x ^ (x >> 31 & (1 << 33) - 1)
