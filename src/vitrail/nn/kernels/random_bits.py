# pyrefly: ignore-errors
# (the checker takes a kernel's parameters for those of a Python function)
"""Random bits of (number, index, cell) in one kernel launch, by splitmix64.

Scenes and texts about them need hundreds of draws per batch, each a dozen launches in torch. The torch implementation
is in the random numbers of `vitrail.data.scenes`.

B rows, C cells of each
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GOLDEN = tl.constexpr(-0x61C8864680B583EB)
FIRST, SECOND = tl.constexpr(-0x40A7B892E31B1A47), tl.constexpr(-0x6B2FB644ECCEEE15)
BLOCK = 256


@triton.jit
def _finalize(x):
    """Finalizer of splitmix64. Shifts are arithmetic, so the masks remove the sign bits."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["number", "count", "cells", "stride"])
def _bits(index_ptr, out_ptr, number, count, cells, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, cell = at // cells, at % cells
    index = tl.load(index_ptr + row * stride, mask=at < count, other=0).to(tl.int64)
    start = _finalize(index * GOLDEN + number)
    tl.store(out_ptr + at, (_finalize(start + (cell + 1) * GOLDEN) >> 16) & 0xFFFFFFFF, mask=at < count)


def random_bits(number: int, index: Tensor, cells: int) -> Tensor:
    """index (B,) → (B, C) integers with 32 random bits"""
    out = torch.empty(len(index), cells, dtype=torch.int64, device=index.device)
    if count := out.numel():
        _bits[(triton.cdiv(count, BLOCK),)](index, out, number, count, cells, index.stride(0), BLOCK=BLOCK)
    return out
