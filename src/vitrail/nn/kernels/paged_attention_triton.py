# pyrefly: ignore-errors
# (the checker takes a kernel's parameters for those of a Python function)
"""Triton kernel of attention over a paged KV cache, for prompt chunks and for decoding.

A program computes the heads of one key/value head for a tile of tokens of one sequence, over all its slots or over one
part of them. It reads each page through the table of the sequence. Parts are merged by a second kernel.

N tokens, H heads, G key/value heads, D head width, S slots per page, M pages of a table, R = H / G, T tiles
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_KEYS = 64  # keys that a program loads at a time
LOG2_E = tl.constexpr(1.4426950408889634)


# Sizes and alignments of a batch vary; each specialization would take seconds to compile.
@triton.jit(do_not_specialize=["M", "T"], do_not_specialize_on_alignment=["slots_ptr", "rows_ptr", "tiles_ptr"])
def _attend(
    q_ptr, k_ptr, v_ptr, tables_ptr, slots_ptr, rows_ptr, tiles_ptr, out_ptr, part_ptr, stat_ptr,
    M, T, scale, softcap,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    TILED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    tile, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if TILED:
        row = tl.load(tiles_ptr + tile).to(tl.int64)
        first = tl.load(tiles_ptr + T + tile).to(tl.int64)
        count = tl.load(tiles_ptr + 2 * T + tile)
    else:
        row = tl.load(rows_ptr + tile)
        first = tile.to(tl.int64)
        count = 1
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    token, head = m // RP, m % RP
    valid = (token < count) & (head < R)
    at = ((first + token) * H + g * R + head)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=valid[:, None], other=0.0)
    slot = tl.load(slots_ptr + first + token, mask=token < count, other=-1).to(tl.int32)  # (BLOCK_M,)
    last = tl.load(slots_ptr + first + count - 1).to(tl.int32) + 1
    low = 0
    if WINDOW > 0:
        low = tl.maximum(tl.load(slots_ptr + first).to(tl.int32) - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    start, end = low, last
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(last - low, BLOCK_N), SPLITS) * BLOCK_N
        start = low + split * share
        end = tl.minimum(start + share, last)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for begin in range(start, end, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        inside = n < last
        page = tl.load(tables_ptr + row * M + n // S, mask=inside, other=0).to(tl.int64)
        base = (page * G + g) * (S * D) + (n % S) * D
        k = tl.load(k_ptr + base[None, :] + d[:, None], mask=inside[None, :], other=0.0)  # (D, BLOCK_N)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if SOFTCAP:
            turned = 2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0  # tanh
            scores = softcap * turned
        visible = inside[None, :] & (n[None, :] <= slot[:, None])
        if WINDOW > 0:
            visible = visible & (n[None, :] > slot[:, None] - WINDOW)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        best = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(best == float("-inf"), 0.0, best)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        v = tl.load(v_ptr + base[:, None] + d[None, :], mask=inside[:, None], other=0.0)  # (BLOCK_N, D)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        mass = mass * shrink + tl.sum(weights, 1)
        top = best
    if SPLITS == 1:
        acc = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None])
    else:
        index = ((first + token) * H + g * R + head) * SPLITS + split
        tl.store(part_ptr + index[:, None] * D + d[None, :], acc, mask=valid[:, None])
        tl.store(stat_ptr + index * 2, top, mask=valid)
        tl.store(stat_ptr + index * 2 + 1, mass, mask=valid)


@triton.jit
def _merge(part_ptr, stat_ptr, out_ptr, D: tl.constexpr, SPLITS: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    s = tl.arange(0, SPLITS)
    top = tl.load(stat_ptr + (index * SPLITS + s) * 2)
    mass = tl.load(stat_ptr + (index * SPLITS + s) * 2 + 1)
    best = tl.max(top, 0)
    weight = tl.where(top == float("-inf"), 0.0, tl.exp2(top - best))
    total = tl.sum(mass * weight, 0)
    part = tl.load(part_ptr + ((index * SPLITS + s) * D)[:, None] + d[None, :])  # (SPLITS, D)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + index * D + d, out.to(out_ptr.dtype.element_ty))


def attend_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    slots: Tensor,
    *,
    token_rows: Tensor,
    tiles: Tensor | None = None,
    tile_tokens: int = 1,
    window: int | None = None,
    logit_softcap: float | None = None,
    splits: int = 1,
) -> Tensor:
    """Attend with queries (N, H, D) over pages k and v (P, G, S, D). Returns (N, H, D).

    tables       (R, M) int32 pages of the sequences
    slots        (N,) int64 slot of each query in its sequence; it attends to this slot and those before
    token_rows   (N,) int64 row of `tables` of each query
    tiles        (3, T) int32 row, first token and number of tokens of each tile; None: one tile for each token
    tile_tokens  tokens that a tile has at most, a power of two
    window       number of slots that a query attends to, including its own; None for all
    splits       parts of a sequence that are computed in parallel, a power of two; only without tiles
    """
    N, H, D = q.shape
    G, S = k.shape[1:3]
    R, RP = H // G, triton.next_power_of_2(H // G)
    out = torch.empty_like(q)
    tokens = 1 if tiles is None else tile_tokens
    count = N if tiles is None else tiles.shape[1]
    splits = splits if tiles is None else 1
    parts = q.new_empty((N, H, splits, D), dtype=torch.float32) if splits > 1 else q
    stats = q.new_empty((N, H, splits, 2), dtype=torch.float32) if splits > 1 else q
    _attend[(count, G, splits)](
        q, k, v, tables, slots, token_rows, slots if tiles is None else tiles, out, parts, stats,
        tables.shape[1], count, D**-0.5, logit_softcap or 1.0,
        H=H, G=G, R=R, RP=RP, D=D, S=S, BLOCK_M=max(16, tokens * RP), BLOCK_N=BLOCK_KEYS, WINDOW=window or 0,
        SOFTCAP=logit_softcap is not None, TILED=tiles is not None, SPLITS=splits,
        num_warps=4, num_stages=3 if D <= 128 else 2,
    )  # fmt: skip
    if splits > 1:
        _merge[(N * H,)](parts, stats, out, D=D, SPLITS=splits, num_warps=1)
    return out
