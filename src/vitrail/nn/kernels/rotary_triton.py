# pyrefly: ignore-errors
# (the checker takes a kernel's parameters for those of a Python function)
"""Triton kernel of rotary embeddings in training: one pass over queries or keys, forward and backward.

The plain version, `vitrail.nn.rotary_embedding.apply_rotation`, reads and writes float32 copies about ten times.

B batch, L tokens, H heads, D head width, S angles
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, L, STRIDE_B, STRIDE_L, STRIDE_H, TABLE_B, SIGN,
    H: tl.constexpr, D: tl.constexpr, S: tl.constexpr, HP: tl.constexpr, SP: tl.constexpr, TP: tl.constexpr,
    ADJACENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, at = token // L, token % L
    head, angle = tl.arange(0, HP)[:, None], tl.arange(0, SP)[None, :]
    table = row * TABLE_B + at * S + angle
    cos, sin = tl.load(cos_ptr + table, angle < S, 0.0), tl.load(sin_ptr + table, angle < S, 0.0) * SIGN
    first = 2 * angle if ADJACENT else angle
    second = first + (1 if ADJACENT else S)
    inside = (head < H) & (angle < S)
    x = x_ptr + row * STRIDE_B + at * STRIDE_L + head * STRIDE_H
    out = out_ptr + (token * H + head) * D
    a, b = tl.load(x + first, inside, 0.0).to(tl.float32), tl.load(x + second, inside, 0.0).to(tl.float32)
    tl.store(out + first, (a * cos - b * sin).to(out_ptr.dtype.element_ty), inside)
    tl.store(out + second, (b * cos + a * sin).to(out_ptr.dtype.element_ty), inside)
    if TP > 0:  # channels that are not rotated
        rest = 2 * S + tl.arange(0, TP)[None, :]
        inside = (head < H) & (rest < D)
        tl.store(out + rest, tl.load(x + rest, inside, 0.0), inside)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, is_adjacent: bool, sign: float) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    (B, L, H, D), S = x.shape, cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        tail = D - 2 * S
        _rotate[(B * L,)](
            x, cos, sin, out, L, *x.stride()[:3], L * S if len(cos) > 1 else 0, sign,
            H, D, S, triton.next_power_of_2(H), triton.next_power_of_2(S), triton.next_power_of_2(tail) if tail else 0,
            is_adjacent,
        )  # fmt: skip
    return out


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, is_adjacent: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.is_adjacent = is_adjacent
        return _launch(x, cos, sin, is_adjacent, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _launch(grads[0], *ctx.saved_tensors, ctx.is_adjacent, -1.0), None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, is_adjacent: bool) -> Tensor:
    """Rotate the channel pairs of x (B, L, H, D) by cos and sin, (B or 1, L, S) float32. Only x gets a gradient."""
    return _Rotated.apply(x, cos, sin, is_adjacent)
