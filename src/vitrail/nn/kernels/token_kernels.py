# pyrefly: ignore-errors
# (the checker takes a kernel's parameters for those of a Python function)
"""Triton kernels of what a decoder computes between its matrix products, token by token.

    add_rms_norm        residual sum and RMS norm
    rotate_and_write    q/k norm, rotary positions, and writing of keys and values to a paged cache
    multiply_silu       SwiGLU

N tokens, W width, H heads, G key/value heads, D head width, F hidden width
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_rms_norm(x_ptr, r_ptr, w_ptr, out_ptr, W, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < W
    x = tl.load(x_ptr + row * W + i, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(r_ptr + row * W + i, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(r_ptr + row * W + i, x, mask=inside)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / W + eps)
    y = x * scale * tl.load(w_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * W + i, y.to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Return the RMS norm of x (N, W), or of x + residual, which replaces the residual in place."""
    N, W = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(W)
    _add_rms_norm[(N,)](
        x, x if residual is None else residual, weight, out, W, eps, ADD=residual is not None, BLOCK=block,
        num_warps=4 if block <= 4096 else 8,
    )  # fmt: skip
    return out


@triton.jit
def _normalize(a, b, w_ptr, at_a, at_b, D, eps):
    """RMS norm of heads that are stored as two halves (heads, D/2)."""
    scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)
    wa, wb = tl.load(w_ptr + at_a).to(tl.float32), tl.load(w_ptr + at_b).to(tl.float32)
    return a * scale[:, None] * wa[None, :], b * scale[:, None] * wb[None, :]


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["slots_ptr", "rows_ptr"])
def _rotate_and_write(
    qkv_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, slots_ptr, rows_ptr, cos_ptr, sin_ptr, qw_ptr, kw_ptr, M, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, HP: tl.constexpr, GP: tl.constexpr,
    ADJACENT: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D // 2
    i = tl.arange(0, half)
    a = 2 * i if ADJACENT else i
    b = 2 * i + 1 if ADJACENT else i + half
    cos, sin = tl.load(cos_ptr + n * half + i)[None, :], tl.load(sin_ptr + n * half + i)[None, :]
    token = qkv_ptr + n * (H + 2 * G) * D

    h = tl.arange(0, HP)
    real = (h < H)[:, None]
    qa = tl.load(token + h[:, None] * D + a[None, :], mask=real, other=0.0).to(tl.float32)
    qb = tl.load(token + h[:, None] * D + b[None, :], mask=real, other=0.0).to(tl.float32)
    kind = q_ptr.dtype.element_ty
    if QK_NORM:
        qa, qb = _normalize(qa, qb, qw_ptr, a, b, D, eps)
        qa, qb = qa.to(kind).to(tl.float32), qb.to(kind).to(tl.float32)
    out = q_ptr + (n * H + h)[:, None] * D
    tl.store(out + a[None, :], (qa * cos - qb * sin).to(kind), mask=real)
    tl.store(out + b[None, :], (qb * cos + qa * sin).to(kind), mask=real)

    g = tl.arange(0, GP)
    real = (g < G)[:, None]
    old = token + (H + g)[:, None] * D
    ka = tl.load(old + a[None, :], mask=real, other=0.0).to(tl.float32)
    kb = tl.load(old + b[None, :], mask=real, other=0.0).to(tl.float32)
    if QK_NORM:
        ka, kb = _normalize(ka, kb, kw_ptr, a, b, D, eps)
        ka, kb = ka.to(kind).to(tl.float32), kb.to(kind).to(tl.float32)
    slot, row = tl.load(slots_ptr + n), tl.load(rows_ptr + n)
    page = tl.load(tables_ptr + row * M + slot // S).to(tl.int64)
    new = ((page * G + g) * S + slot % S)[:, None] * D
    tl.store(k_ptr + new + a[None, :], (ka * cos - kb * sin).to(kind), mask=real)
    tl.store(k_ptr + new + b[None, :], (kb * cos + ka * sin).to(kind), mask=real)
    d = tl.arange(0, D)
    v = tl.load(token + (H + G + g)[:, None] * D + d[None, :], mask=real, other=0.0)
    tl.store(v_ptr + new + d[None, :], v.to(kind), mask=real)


def rotate_and_write(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    *,
    tables: Tensor,
    slots: Tensor,
    token_rows: Tensor,
    cos: Tensor,
    sin: Tensor,
    adjacent: bool = False,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate the queries and keys of qkv (N, (H + 2G)·D), write keys and values to pages, and return q (N, H, D).

    k and v are pages (P, G, S, D), cos and sin (N, D/2) float32. `norms` are the weights of the q and k norms.
    """
    N, (G, S, D) = len(qkv), k.shape[1:]
    q = qkv.new_empty(N, heads, D)
    q_norm, k_norm = norms or (qkv, qkv)
    _rotate_and_write[(N,)](
        qkv, q, k, v, tables, slots, token_rows, cos, sin, q_norm, k_norm, tables.shape[1], eps,
        H=heads, G=G, D=D, S=S, HP=triton.next_power_of_2(heads), GP=triton.next_power_of_2(G),
        ADJACENT=adjacent, QK_NORM=norms is not None, num_warps=4,
    )  # fmt: skip
    return q


@triton.jit
def _multiply_silu(x_ptr, out_ptr, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < F
    gate = tl.load(x_ptr + row * 2 * F + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + i, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * F + i, y.to(out_ptr.dtype.element_ty), mask=inside)


def multiply_silu(x: Tensor) -> Tensor:
    """Return silu(gate) · up of x (N, 2F), gates first."""
    N, F = x.shape[0], x.shape[1] // 2
    out = x.new_empty(N, F)
    _multiply_silu[(N, triton.cdiv(F, 1024))](x, out, F, BLOCK=1024, num_warps=4)
    return out
