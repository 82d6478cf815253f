# pyrefly: ignore-errors
# (the checker takes a kernel's parameters for those of a Python function)
"""Triton kernels for decoding one token at batch size 1, with few launches.

At batch size 1 a step is bound by reading the weights, and the gaps between small kernels cost as much again. The
matrix-vector kernel therefore fuses the preceding norm (its scale is applied to the result) and the following
activation, gate and residual. A second kernel fuses rotation, q/k norm, cache update and attention.

N outputs, K inputs, H heads, G key/value heads, R = H / G, D head width, S keys per program
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_SHAPES = ((4, 1024, 4), (1, 2048, 4), (1, 4096, 4), (1, 4096, 8), (1, 8192, 8), (2, 1024, 4), (2, 2048, 4),
          (2, 2048, 8), (2, 4096, 8), (4, 512, 4), (4, 1024, 8), (4, 2048, 8), (8, 512, 4), (16, 256, 4))  # fmt: skip
AUTOTUNE_CONFIGS = [triton.Config({"BLOCK_N": n, "BLOCK_K": k}, num_warps=warps) for n, k, warps in TILE_SHAPES]
INTERPRETED = triton.knobs.runtime.interpret  # no autotuning in the interpreter


@triton.autotune(AUTOTUNE_CONFIGS[:1] if INTERPRETED else AUTOTUNE_CONFIGS, key=["N", "K", "GATED", "NORM"])
@triton.jit
def _matvec(
    x_ptr, w_ptr, g_ptr, b_ptr, r_ptr, y_ptr, N, K: tl.constexpr, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    # With GATED, the first N rows of w are the gate and the next N rows are the values it multiplies.
    first = rows + N if GATED else rows
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * tl.load(g_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        here = inside[:, None] & (k < K)[None, :]
        at = first[:, None].to(tl.int64) * K + k[None, :]
        total += tl.load(w_ptr + at, mask=here, other=0.0).to(tl.float32) * x[None, :]
        if GATED:
            at = rows[:, None].to(tl.int64) * K + k[None, :]
            gate += tl.load(w_ptr + at, mask=here, other=0.0).to(tl.float32) * x[None, :]
    scale = 1.0
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares) / K + eps)
    y = tl.sum(total, 1) * scale
    if BIAS:
        y += tl.load(b_ptr + first, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        z = tl.sum(gate, 1) * scale
        if BIAS:
            z += tl.load(b_ptr + rows, mask=inside, other=0.0).to(tl.float32)
        y = y * z / (1.0 + tl.exp(-z))
    if RESIDUAL:
        y += tl.load(r_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=inside)


def compute_matvec(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Compute out (N,) = weight · rms_norm(x) + bias, or silu(gate) · up of it, + residual.

    x is (K,), weight is (N, K), or (2N, K) if gated.
    """
    N, K = out.shape[0], x.shape[0]

    def grid(meta: dict) -> tuple[int]:
        return (triton.cdiv(N, meta["BLOCK_N"]),)

    _matvec[grid](
        x, weight, x if norm is None else norm, x if bias is None else bias, x if residual is None else residual, out,
        N, K, eps, NORM=norm is not None, BIAS=bias is not None, RESIDUAL=residual is not None, GATED=gated,
    )  # fmt: skip
    return out


@triton.jit
def _rms(a, b, ga, gb, D, eps):
    """RMS norm of heads that are stored as two halves (rows, D/2)."""
    scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)
    return a * scale[:, None] * ga[None, :], b * scale[:, None] * gb[None, :]


@triton.jit
def _attention(
    qkv_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, length_ptr, position_ptr, q_norm_ptr, k_norm_ptr,
    out_ptr, part_ptr, stat_ptr, count_ptr, splits, eps,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    ADJACENT: tl.constexpr, QK_NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    g, s = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_ptr)  # tokens before this one, which is its slot
    active = length // S + 1
    if s >= active:
        return
    half: tl.constexpr = D // 2
    i = tl.arange(0, half)
    # The two channels of a rotary pair are in two tiles, so rotation needs no shuffle.
    a = 2 * i if ADJACENT else i
    b = 2 * i + 1 if ADJACENT else i + half
    position = tl.load(position_ptr)
    cos, sin = tl.load(cos_ptr + position * half + i), tl.load(sin_ptr + position * half + i)

    r = tl.arange(0, ROWS)
    real = r < R
    row = (g * R + r)[:, None] * D
    qa = tl.load(qkv_ptr + row + a[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    qb = tl.load(qkv_ptr + row + b[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    if QK_NORM:
        qa, qb = _rms(qa, qb, tl.load(q_norm_ptr + a).to(tl.float32), tl.load(q_norm_ptr + b).to(tl.float32), D, eps)
    scale: tl.constexpr = D**-0.5
    turned_a = (qa * cos[None, :] - qb * sin[None, :]) * scale
    turned_b = (qb * cos[None, :] + qa * sin[None, :]) * scale

    slot = s * S + tl.arange(0, S)
    visible = slot <= length
    at = slot[:, None].to(tl.int64) * (G * D) + g * D
    old = (slot < length)[:, None]
    ka = tl.load(k_ptr + at + a[None, :], mask=old, other=0.0)
    kb = tl.load(k_ptr + at + b[None, :], mask=old, other=0.0)
    va = tl.load(v_ptr + at + a[None, :], mask=old, other=0.0)
    vb = tl.load(v_ptr + at + b[None, :], mask=old, other=0.0)
    if s == active - 1:  # this program owns the new token: insert it, also into the cache
        new = qkv_ptr + (H + g) * D
        na, nb = tl.load(new + a).to(tl.float32)[None, :], tl.load(new + b).to(tl.float32)[None, :]
        if QK_NORM:
            na, nb = _rms(
                na, nb, tl.load(k_norm_ptr + a).to(tl.float32), tl.load(k_norm_ptr + b).to(tl.float32), D, eps
            )
        ta = (na * cos[None, :] - nb * sin[None, :]).to(ka.dtype)
        tb = (nb * cos[None, :] + na * sin[None, :]).to(ka.dtype)
        newest = (slot == length)[:, None]
        fresh = qkv_ptr + (H + G + g) * D
        wa, wb = tl.load(fresh + a)[None, :].to(va.dtype), tl.load(fresh + b)[None, :].to(va.dtype)
        ka, kb = tl.where(newest, ta, ka), tl.where(newest, tb, kb)
        va, vb = tl.where(newest, wa, va), tl.where(newest, wb, vb)
        tl.store(k_ptr + at + a[None, :], ka, mask=newest)
        tl.store(k_ptr + at + b[None, :], kb, mask=newest)
        tl.store(v_ptr + at + a[None, :], va, mask=newest)
        tl.store(v_ptr + at + b[None, :], vb, mask=newest)

    kind = ka.dtype
    scores = tl.dot(turned_a.to(kind), tl.trans(ka), input_precision="ieee")
    scores += tl.dot(turned_b.to(kind), tl.trans(kb), input_precision="ieee")  # (ROWS, S)
    scores = tl.where(visible[None, :], scores, float("-inf"))
    top = tl.max(scores, 1)
    weights = tl.exp(scores - top[:, None])
    mass = tl.sum(weights, 1)
    oa = tl.dot(weights.to(kind), va, input_precision="ieee")  # (ROWS, D/2)
    ob = tl.dot(weights.to(kind), vb, input_precision="ieee")

    # Each program stores its partial result; the last one for these heads merges them.
    share = part_ptr + ((g * splits + s) * ROWS + r)[:, None] * D
    tl.store(share + a[None, :], oa)
    tl.store(share + b[None, :], ob)
    stat = stat_ptr + (g * splits + s) * 2 * ROWS + r
    tl.store(stat, top)
    tl.store(stat + ROWS, mass)
    tl.debug_barrier()
    arrived = tl.atomic_add(count_ptr + g, 1)
    if arrived == active - 1:
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        mass = tl.zeros((ROWS,), tl.float32)
        oa = tl.zeros((ROWS, half), tl.float32)
        ob = tl.zeros((ROWS, half), tl.float32)
        for other in range(active):
            stat = stat_ptr + (g * splits + other) * 2 * ROWS + r
            other_top = tl.load(stat, cache_modifier=".cg")
            other_mass = tl.load(stat + ROWS, cache_modifier=".cg")
            share = part_ptr + ((g * splits + other) * ROWS + r)[:, None] * D
            best = tl.maximum(top, other_top)
            scale_own, scale_other = tl.exp(top - best), tl.exp(other_top - best)
            oa = oa * scale_own[:, None] + tl.load(share + a[None, :], cache_modifier=".cg") * scale_other[:, None]
            ob = ob * scale_own[:, None] + tl.load(share + b[None, :], cache_modifier=".cg") * scale_other[:, None]
            mass = mass * scale_own + other_mass * scale_other
            top = best
        kind = out_ptr.dtype.element_ty
        tl.store(out_ptr + row + a[None, :], (oa / mass[:, None]).to(kind), mask=real[:, None])
        tl.store(out_ptr + row + b[None, :], (ob / mass[:, None]).to(kind), mask=real[:, None])
        tl.store(count_ptr + g, 0)


class DecodeAttention:
    """Attention of one new token over a cache of fixed capacity, with preallocated work buffers."""

    KEYS_PER_PROGRAM = 64  # keys per program
    PADDED_QUERY_HEADS = 16  # query heads of a group, padded for the tensor cores

    def __init__(self, heads: int, kv_heads: int, head_dim: int, capacity: int, device: torch.device | str):
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.splits = triton.cdiv(capacity, self.KEYS_PER_PROGRAM)
        shape = (kv_heads, self.splits, self.PADDED_QUERY_HEADS)
        self.parts = torch.empty(*shape, head_dim, device=device)
        self.stats = torch.empty(*shape, 2, device=device)
        self.counts = torch.zeros(kv_heads, dtype=torch.int32, device=device)

    def __call__(
        self,
        qkv: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *,
        cos: Tensor,
        sin: Tensor,
        length: Tensor,
        position: Tensor,
        adjacent: bool = False,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Attend with the new token and write its key and value to slot `length`. Returns out (H·D,).

        Shapes: qkv ((H + 2G)·D,), k and v (capacity, G, D), cos and sin (positions, D/2), length and position (1,).
        """
        q_norm, k_norm = norms or (qkv, qkv)
        _attention[(self.kv_heads, self.splits)](
            qkv, k, v, cos, sin, length, position, q_norm, k_norm, out, self.parts, self.stats, self.counts,
            self.splits, eps, H=self.heads, G=self.kv_heads, R=self.heads // self.kv_heads, D=self.head_dim,
            S=self.KEYS_PER_PROGRAM, ADJACENT=adjacent, QK_NORM=norms is not None, ROWS=self.PADDED_QUERY_HEADS,
            num_warps=4,
        )  # fmt: skip
        return out
