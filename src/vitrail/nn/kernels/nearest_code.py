# pyrefly: ignore-errors
# (the checker takes a kernel's parameters for those of a Python function)
"""Triton kernel for the nearest codebook entry: exact float64 results without an N × K matrix.

First pass: scores x·c − |c|²/2 on tensor cores. Each number is split into two bf16 numbers, high and low, and three of
their four products are summed, which gives at least 14 correct bits. Each element of a tile holds its best two scores;
their lowest bits store the tile index. Rows whose best two scores differ by less than the error bound are listed.

Second pass: the listed rows again, in float64.

N vectors, K codes, D width; m × n tile, `TILES_PER_TURN` tiles per turn
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret
MAX_WIDTH = 512  # for larger widths torch is as fast


class TileShape(NamedTuple):
    """Launch config of the first pass: tile size, slice of the width, warps, pipeline stages, registers.

    With 128 registers, four programs share a multiprocessor: some multiply while others compare.
    """

    m: int = 64
    n: int = 64
    k: int = 64
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = 128


PLAIN, SMALL = TileShape(), TileShape(16, 16, 16)  # the second is for the slow interpreter
# For larger widths: vectors are loaded again for every tile.
WIDE_SHAPE = TileShape(m=128, num_warps=8, max_registers=None)
EXACT_TILE = (16, 128) if not INTERPRETED else (16, 32)  # rows and codes of a tile of the second pass

TILE_INDEX_BITS = 8  # lowest bits of a score that store its tile index
TILES_PER_TURN = tl.constexpr(2**TILE_INDEX_BITS)
TILE_INDEX_MASK = tl.constexpr(2**TILE_INDEX_BITS - 1)
MIN_SCORE = tl.constexpr(-3.0e38)  # below every score; an infinity with a tile index in its bits would be NaN
HALF_DTYPE = tl.constexpr(tl.float32 if INTERPRETED else tl.bfloat16)  # the interpreter computes bf16 products wrongly


@triton.jit
def _split_bf16(x):
    """Split x ≈ high + low in bf16, with relative error 2^−16."""
    high = x.to(tl.bfloat16)
    low = (x - high.to(tl.float32)).to(tl.bfloat16)
    return high.to(HALF_DTYPE), low.to(HALF_DTYPE)


@triton.jit
def _load_slice(x_ptr, rows, N, d, D: tl.constexpr, BK: tl.constexpr):
    at = d + tl.arange(0, BK)
    return tl.load(
        x_ptr + rows[:, None].to(tl.int64) * D + at[None, :], mask=(rows < N)[:, None] & (at < D)[None, :], other=0.0
    )


@triton.jit
def _add_products(high, low, codes_ptr, j, d, total, K, WIDTH: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Add x·c for BN codes from j on and BK channels from d on. codes (2, K, WIDTH): high, then low."""
    at = (j + tl.arange(0, BN))[None, :] * WIDTH + (d + tl.arange(0, BK))[:, None]
    code_high = tl.load(codes_ptr + at).to(HALF_DTYPE)
    code_low = tl.load(codes_ptr + K * WIDTH + at).to(HALF_DTYPE)
    total = tl.dot(low, code_high, total, input_precision="ieee")
    total = tl.dot(high, code_low, total, input_precision="ieee")
    return tl.dot(high, code_high, total, input_precision="ieee")


@triton.jit(do_not_specialize=["N"])
def _first_pass(
    x_ptr, codes_ptr, bias_ptr, extent_ptr, ids_ptr, list_ptr, count_ptr, N, K, CODES,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    square = tl.zeros((BM,), tl.float32)
    if WIDTH == BK:  # load once
        x = _load_slice(x_ptr, rows, N, 0, D, BK)
        square += tl.sum(x * x, 1)
        high, low = _split_bf16(x)
    else:
        for d in range(0, WIDTH, BK):
            x = _load_slice(x_ptr, rows, N, d, D, BK)
            square += tl.sum(x * x, 1)
    best, second = tl.zeros((BM,), tl.float32) + MIN_SCORE, tl.zeros((BM,), tl.float32) + MIN_SCORE
    ids = tl.zeros((BM,), tl.int32)
    for start in range(0, K, TILES_PER_TURN * BN):
        one = tl.zeros((BM, BN), tl.float32) + MIN_SCORE
        two = tl.zeros((BM, BN), tl.float32) + MIN_SCORE
        for tile in range(min(tl.cdiv(K - start, BN), TILES_PER_TURN)):
            j = start + tile * BN
            bias = tl.load(bias_ptr + j + tl.arange(0, BN))
            total = tl.zeros((BM, BN), tl.float32)
            if WIDTH == BK:
                total = _add_products(high, low, codes_ptr, j, 0, total, K, WIDTH, BN, BK)
            else:
                for d in range(0, WIDTH, BK):
                    high, low = _split_bf16(_load_slice(x_ptr, rows, N, d, D, BK))
                    total = _add_products(high, low, codes_ptr, j, d, total, K, WIDTH, BN, BK)
            total += bias[None, :]
            score = ((total.to(tl.int32, bitcast=True) & ~TILE_INDEX_MASK) | tile).to(tl.float32, bitcast=True)
            two = tl.maximum(two, tl.minimum(one, score))
            one = tl.maximum(one, score)
        top, lane = tl.max(one, 1, return_indices=True)
        others = tl.where(tl.arange(0, BN)[None, :] == lane[:, None], two, one)  # no lane's second exceeds its first
        third = tl.max(others, 1)
        found = start + (top.to(tl.int32, bitcast=True) & TILE_INDEX_MASK) * BN + lane
        second = tl.maximum(tl.minimum(best, top), tl.maximum(second, third))
        ids = tl.where(top > best, found, ids)
        best = tl.maximum(best, top)
    tl.store(ids_ptr + rows, tl.minimum(ids, CODES - 1).to(tl.int64), mask=rows < N)
    # Error bound of a score: relative to |x||c|, 3 · 2^−16 from the split and 2^−22 per sum; relative to itself, 2^−15
    # from the tile index.
    product, tallest = tl.sqrt(square) * tl.load(extent_ptr), tl.load(extent_ptr + 1)
    error = product * (3 * 2.0**-16 + WIDTH * 2.0**-22) + (product + tallest) * 2.0**-15
    unsure = ((rows < N) & (best - second <= 2 * error)).to(tl.int32)
    place = tl.atomic_add(count_ptr, tl.sum(unsure, 0)) + tl.cumsum(unsure, 0) - 1
    tl.store(list_ptr + place, rows, mask=unsure > 0)


@triton.jit
def _second_pass(
    x_ptr, turned_ptr, ids_ptr, list_ptr, count_ptr, K,
    D: tl.constexpr, PRODUCT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Search the listed rows in float64.

    Products of float32 numbers are exact in float64, so sums in this order equal those of any other implementation.
    """
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
            ids = tl.where(top > best, j + lane, ids)  # the first of equal scores
            best = tl.maximum(best, top)
        tl.store(ids_ptr + rows, ids.to(tl.int64), mask=at < count)


def is_supported(x: Tensor, table: Tensor) -> bool:
    """Return whether the kernel supports these inputs: float32, a GPU with bf16, 32-bit addresses."""
    if x.dtype != torch.float32 or table.dtype != torch.float32 or x.shape[1] > MAX_WIDTH or not len(x):
        return False
    if 2 * (len(table) + PLAIN.n) * _padded_width(x.shape[1]) >= 2**31:
        return False
    if INTERPRETED:
        return True
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] >= 8


def _padded_width(D: int) -> int:
    return max(16, triton.next_power_of_2(D))


def find_nearest(x: Tensor, table: Tensor, product: bool = False, shape: TileShape | None = None) -> Tensor:
    """Return the ids (N,) of the rows of table (K, D) that are nearest to x (N, D).

    With `product`, return the rows with the largest inner product.
    """
    return search_nearest(x, table, product, shape)[0]


def search_nearest(x: Tensor, table: Tensor, product: bool, shape: TileShape | None = None) -> tuple[Tensor, Tensor]:
    """Return the ids, and the number of rows that the second pass computed, (1,)."""
    (N, D), K = x.shape, len(table)
    width = _padded_width(D)
    shape = shape or (SMALL if INTERPRETED else PLAIN if width <= PLAIN.k else WIDE_SHAPE)
    k = min(shape.k, width)
    x, table = x.contiguous(), table.contiguous()
    half = x.new_zeros(K) if product else (table.double().square().sum(1) / 2).float()
    extent = torch.stack([table.norm(dim=1).max(), half.max()])
    spare = -K % shape.n
    filled = F.pad(table, (0, width - D, 0, spare))
    high = filled.bfloat16()
    codes = torch.stack([high, (filled - high.float()).bfloat16()])
    bias = F.pad(-half, (0, spare), value=MIN_SCORE.value)
    ids = torch.empty(N, dtype=torch.int64, device=x.device)
    unsure = torch.empty(N, dtype=torch.int32, device=x.device)
    count = torch.zeros(1, dtype=torch.int32, device=x.device)
    _first_pass[(triton.cdiv(N, shape.m),)](
        x, codes, bias, extent, ids, unsure, count, N, K + spare, K,
        D=D, WIDTH=width, BM=shape.m, BN=shape.n, BK=k, num_warps=shape.num_warps, num_stages=shape.num_stages,
        maxnreg=shape.max_registers,
    )  # fmt: skip
    m, n = EXACT_TILE
    programs = triton.cdiv(N, m)
    if x.is_cuda:
        programs = min(programs, 4 * torch.cuda.get_device_properties(x.device).multi_processor_count)
    _second_pass[(programs,)](
        x, table.T.contiguous(), ids, unsure, count, K, D=D, PRODUCT=product, BM=m, BN=n, num_warps=4
    )  # fmt: skip
    return ids, count
