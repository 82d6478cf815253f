# pyrefly: ignore-errors
# (the checker takes a kernel's parameters for those of a Python function)
"""The nearest of K codes for N vectors, with the ids that float64 gives and no N × K matrix.

First pass: scores x·c − |c|²/2 by tensor cores, each number as two of bf16, high and low, of whose four products three
are summed: 14 bits at least are right. Each element of a tile keeps the best two scores that came by; the number of the
tile they came from lies in their lowest bits. A row whose best two are closer than the error of all this is noted in a
list.

Second pass, over the list: all its scores in float64.

N vectors, K codes, D width; m × n a tile, `TURN` tiles a turn
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret
WIDEST = 512  # beyond this width plain torch is as good


class Shape(NamedTuple):
    """How the first pass is cut: the tile, how much of the width is taken at a time, warps, loads in flight, registers.
    With 128 of them four programs share a processor: some multiply while others compare."""

    m: int = 64
    n: int = 64
    k: int = 64
    warps: int = 4
    stages: int = 3
    registers: int | None = 128


PLAIN, SMALL = Shape(), Shape(16, 16, 16)  # the second for the interpreter, where every element costs
WIDE = Shape(m=128, warps=8, registers=None)  # vectors that are read again for every tile
EXACT = (16, 128) if not INTERPRETED else (16, 32)  # rows and codes of a tile of the second pass

INDEX = 8  # lowest bits of a score that tell its tile
TURN = tl.constexpr(2**INDEX)
TILE = tl.constexpr(2**INDEX - 1)
LEAST = tl.constexpr(-3.0e38)  # below every score; an infinity with a tile's number in it would be no number
HALVES = tl.constexpr(tl.float32 if INTERPRETED else tl.bfloat16)  # the interpreter's products in bf16 are wrong


@triton.jit
def _two(x):
    """x ≈ high + low, in bf16, to 2^−16 of its size"""
    high = x.to(tl.bfloat16)
    low = (x - high.to(tl.float32)).to(tl.bfloat16)
    return high.to(HALVES), low.to(HALVES)


@triton.jit
def _part(x_ptr, rows, N, d, D: tl.constexpr, BK: tl.constexpr):
    at = d + tl.arange(0, BK)
    return tl.load(
        x_ptr + rows[:, None].to(tl.int64) * D + at[None, :], mask=(rows < N)[:, None] & (at < D)[None, :], other=0.0
    )


@triton.jit
def _product(high, low, codes_ptr, j, d, total, K, WIDTH: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """total + x·c for BN codes from j on, BK of their width from d on; codes (2, K, WIDTH): high, then low"""
    at = (j + tl.arange(0, BN))[None, :] * WIDTH + (d + tl.arange(0, BK))[:, None]
    code_high = tl.load(codes_ptr + at).to(HALVES)
    code_low = tl.load(codes_ptr + K * WIDTH + at).to(HALVES)
    total = tl.dot(low, code_high, total, input_precision="ieee")
    total = tl.dot(high, code_low, total, input_precision="ieee")
    return tl.dot(high, code_high, total, input_precision="ieee")


@triton.jit(do_not_specialize=["N"])
def _first(
    x_ptr, codes_ptr, bias_ptr, extent_ptr, ids_ptr, list_ptr, count_ptr, N, K, CODES,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    square = tl.zeros((BM,), tl.float32)
    if WIDTH == BK:  # read once
        x = _part(x_ptr, rows, N, 0, D, BK)
        square += tl.sum(x * x, 1)
        high, low = _two(x)
    else:
        for d in range(0, WIDTH, BK):
            x = _part(x_ptr, rows, N, d, D, BK)
            square += tl.sum(x * x, 1)
    best, second = tl.zeros((BM,), tl.float32) + LEAST, tl.zeros((BM,), tl.float32) + LEAST
    ids = tl.zeros((BM,), tl.int32)
    for start in range(0, K, TURN * BN):
        one = tl.zeros((BM, BN), tl.float32) + LEAST
        two = tl.zeros((BM, BN), tl.float32) + LEAST
        for tile in range(min(tl.cdiv(K - start, BN), TURN)):
            j = start + tile * BN
            bias = tl.load(bias_ptr + j + tl.arange(0, BN))
            total = tl.zeros((BM, BN), tl.float32)
            if WIDTH == BK:
                total = _product(high, low, codes_ptr, j, 0, total, K, WIDTH, BN, BK)
            else:
                for d in range(0, WIDTH, BK):
                    high, low = _two(_part(x_ptr, rows, N, d, D, BK))
                    total = _product(high, low, codes_ptr, j, d, total, K, WIDTH, BN, BK)
            total += bias[None, :]
            score = ((total.to(tl.int32, bitcast=True) & ~TILE) | tile).to(tl.float32, bitcast=True)
            two = tl.maximum(two, tl.minimum(one, score))
            one = tl.maximum(one, score)
        top, lane = tl.max(one, 1, return_indices=True)
        others = tl.where(tl.arange(0, BN)[None, :] == lane[:, None], two, one)  # no lane's second is above its first
        third = tl.max(others, 1)
        found = start + (top.to(tl.int32, bitcast=True) & TILE) * BN + lane
        second = tl.maximum(tl.minimum(best, top), tl.maximum(second, third))
        ids = tl.where(top > best, found, ids)
        best = tl.maximum(best, top)
    tl.store(ids_ptr + rows, tl.minimum(ids, CODES - 1).to(tl.int64), mask=rows < N)
    # What a score may be off by: of |x||c|, 3 · 2^−16 by the halves and 2^−22 for every sum; of itself, 2^−15 by the
    # tile's number.
    product, tallest = tl.sqrt(square) * tl.load(extent_ptr), tl.load(extent_ptr + 1)
    error = product * (3 * 2.0**-16 + WIDTH * 2.0**-22) + (product + tallest) * 2.0**-15
    unsure = ((rows < N) & (best - second <= 2 * error)).to(tl.int32)
    place = tl.atomic_add(count_ptr, tl.sum(unsure, 0)) + tl.cumsum(unsure, 0) - 1
    tl.store(list_ptr + place, rows, mask=unsure > 0)


@triton.jit
def _second(
    x_ptr, turned_ptr, ids_ptr, list_ptr, count_ptr, K,
    D: tl.constexpr, PRODUCT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Products of two float32 are exact in float64, so that the sums over the width, one term after the other, are
    those of any other code that adds in this order."""
    count = tl.load(count_ptr)
    for part in range(tl.program_id(0), tl.cdiv(count, BM), tl.num_programs(0)):
        at = part * BM + tl.arange(0, BM)
        rows = tl.load(list_ptr + at, mask=at < count, other=0).to(tl.int64)
        best = tl.full((BM,), float("-inf"), tl.float64)
        ids = tl.zeros((BM,), tl.int32)
        for j in range(0, K, BN):
            c = j + tl.arange(0, BN)
            total = tl.zeros((BM, BN), tl.float64)
            square = tl.zeros((BN,), tl.float64)
            for d in range(D):
                x = tl.load(x_ptr + rows * D + d).to(tl.float64)
                code = tl.load(turned_ptr + d * K + c, mask=c < K, other=0.0).to(tl.float64)
                total += x[:, None] * code[None, :]
                square += code * code
            if not PRODUCT:
                total -= (square / 2)[None, :]
            total = tl.where((c < K)[None, :], total, float("-inf"))
            top, lane = tl.max(total, 1, return_indices=True)
            ids = tl.where(top > best, j + lane, ids)  # of equals the first
            best = tl.maximum(best, top)
        tl.store(ids_ptr + rows, ids.to(tl.int64), mask=at < count)


def fits(x: Tensor, table: Tensor) -> bool:
    """Float32 on a GPU with bf16 (or in Triton's interpreter), with a table that 32 bits can address."""
    if x.dtype != torch.float32 or table.dtype != torch.float32 or x.shape[1] > WIDEST or not len(x):
        return False
    if 2 * (len(table) + PLAIN.n) * _width(x.shape[1]) >= 2**31:
        return False
    if INTERPRETED:
        return True
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] >= 8


def _width(D: int) -> int:
    return max(16, triton.next_power_of_2(D))


def nearest(x: Tensor, table: Tensor, product: bool = False, shape: Shape | None = None) -> Tensor:
    """x (N, D), table (K, D) → ids (N,) of the nearest rows, or of those with the highest `product` with x."""
    return searched(x, table, product, shape)[0]


def searched(x: Tensor, table: Tensor, product: bool, shape: Shape | None = None) -> tuple[Tensor, Tensor]:
    """The ids, and how many rows the second pass had to settle (1,)."""
    (N, D), K = x.shape, len(table)
    width = _width(D)
    shape = shape or (SMALL if INTERPRETED else PLAIN if width <= PLAIN.k else WIDE)
    k = min(shape.k, width)
    x, table = x.contiguous(), table.contiguous()
    half = x.new_zeros(K) if product else (table.double().square().sum(1) / 2).float()
    extent = torch.stack([table.norm(dim=1).max(), half.max()])
    spare = -K % shape.n
    filled = F.pad(table, (0, width - D, 0, spare))
    high = filled.bfloat16()
    codes = torch.stack([high, (filled - high.float()).bfloat16()])
    bias = F.pad(-half, (0, spare), value=LEAST.value)
    ids = torch.empty(N, dtype=torch.int64, device=x.device)
    unsure = torch.empty(N, dtype=torch.int32, device=x.device)
    count = torch.zeros(1, dtype=torch.int32, device=x.device)
    _first[(triton.cdiv(N, shape.m),)](
        x, codes, bias, extent, ids, unsure, count, N, K + spare, K,
        D=D, WIDTH=width, BM=shape.m, BN=shape.n, BK=k, num_warps=shape.warps, num_stages=shape.stages,
        maxnreg=shape.registers,
    )  # fmt: skip
    m, n = EXACT
    programs = triton.cdiv(N, m)
    if x.is_cuda:
        programs = min(programs, 4 * torch.cuda.get_device_properties(x.device).multi_processor_count)
    _second[(programs,)](
        x, table.T.contiguous(), ids, unsure, count, K, D=D, PRODUCT=product, BM=m, BN=n, num_warps=4
    )  # fmt: skip
    return ids, count
