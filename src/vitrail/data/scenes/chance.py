"""Random numbers as a function of (seed, index): the same on every device and for any way of cutting a batch.

B batch, … any further axes.
"""

import hashlib
import math
from importlib.util import find_spec

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 2⁶⁴/φ as a signed integer; the constants are those of splitmix64
_FUSED = find_spec("triton") is not None
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def bits(seed: int, index: Tensor, what: str, *shape: int) -> Tensor:
    """(B, …) integers of 32 random bits; `what` names the draw, so that two draws of one sample are independent."""
    if index.is_cuda and not torch.compiler.is_compiling() and _FUSED:
        from vitrail.nn.kernels import mix

        return mix.bits(_number(seed, what), index, math.prod(shape)).view(len(index), *shape)
    cells = ~torch.arange(
        math.prod(shape), device=index.device
    )  # −1, −2, …: a compiler cannot fold ~, and so not pass 2⁶⁴
    start = _mixed(index.to(torch.int64)[:, None] * _GOLDEN + _number(seed, what))
    return (_mixed(start - cells * _GOLDEN) >> 16 & 0xFFFFFFFF).view(len(index), *shape)


def pick(seed: int, index: Tensor, what: str, *shape: int, of: int | Tensor) -> Tensor:
    """(B, …) integers in [0, of); `of` may be a tensor that spreads over them."""
    return bits(seed, index, what, *shape) * of >> 32


def uniform(seed: int, index: Tensor, what: str, *shape: int) -> Tensor:
    """(B, …) numbers in [0, 1), float32 with 24 random bits."""
    return (bits(seed, index, what, *shape) >> 8).to(torch.float32) / (1 << 24)


def distinct(seed: int, index: Tensor, what: str, count: int, *, of: int | Tensor) -> Tensor:
    """(B, count) integers in [0, of), all different as far as there are so many; `of` may be (B,)."""
    drawn, taken = [], ()  # as they come, and in ascending order
    for k in range(count):
        left = max(of - k, 1) if isinstance(of, int) else (of - k).clamp(min=1)
        number = pick(seed, index, f"{what} {k}", of=left)
        for earlier in taken:
            number = number + (number >= earlier)
        drawn.append(number)
        taken = torch.stack(drawn, 1).sort(1).values.unbind(1)
    return torch.stack(drawn, 1)


@torch.compiler.assume_constant_result  # a compiled function keeps the numbers and not the hashing
def _number(seed: int, what: str) -> int:
    """64 bits of a seed and a name."""
    return int.from_bytes(hashlib.blake2b(f"{seed},{what}".encode(), digest_size=8).digest(), "little", signed=True)


def _mixed(x: Tensor) -> Tensor:
    """splitmix64's finisher; integers wrap around alike on every device, and shifts are made logical."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _MIX[0]
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _MIX[1]
    return x ^ (x >> 31 & (1 << 33) - 1)
