# pyrefly: ignore-errors
# (the checker takes a kernel's parameters for those of a Python function)
"""Triton kernels of a training step, each one pass over memory where torch makes several.

    compute_softmax_gradient    cross-entropy of logits, and its gradient in their place
    update_adamw                AdamW on float32 master weights, with half-precision gradients and weights
    swiglu                      silu(gate) · up, and its gradient

N tokens, V vocabulary size, F hidden width
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.nn.kernels.token_kernels import multiply_silu

VOCABULARY_BLOCK, UPDATE_BLOCK, GATE_BLOCK = 4096, 2048, 1024


@triton.jit
def _softmax_gradient(
    logits_ptr, target_ptr, share_ptr, loss_ptr, lse_ptr, V, z, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    i = tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    at_target = tl.load(logits_ptr + target).to(tl.float32)  # before any warp can overwrite it
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits_ptr + start + i, mask=start + i < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    lse = top + tl.log(total)
    loss = (top - at_target) + tl.log(total)
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)
    if GRADIENT:
        share = tl.load(share_ptr + row)
        factor = share * (1 + 2 * z * lse)
        # p · factor − share cancels for the target, so it is computed before rounding
        for_target = tl.exp(-loss) * factor - share
        for start in range(0, V, BLOCK):
            x = tl.load(logits_ptr + start + i, mask=start + i < V, other=float("-inf")).to(tl.float32)
            y = tl.where(start + i == target, for_target, tl.exp(x - lse) * factor)
            tl.store(logits_ptr + start + i, y.to(logits_ptr.dtype.element_ty), mask=start + i < V)


def compute_softmax_gradient(
    logits: Tensor, targets: Tensor, shares: Tensor, z_loss: float, needs_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return −log p of each target and the logsumexp, (N,) float32; overwrite the logits with their gradient if needed.

    logits (N, V) contiguous, targets (N,) in range, shares (N,) float32: the weight of each token in the loss.
    """
    N, V = logits.shape
    loss, lse = (torch.empty(N, dtype=torch.float32, device=logits.device) for _ in range(2))
    if N:
        _softmax_gradient[(N,)](
            logits, targets, shares, loss, lse, V, z_loss, GRADIENT=needs_gradient, BLOCK=VOCABULARY_BLOCK, num_warps=8
        )
    return loss, lse


@triton.jit
def _adamw(
    weight_ptr, master_ptr, grad_ptr, mean_ptr, square_ptr, count, lr, decay, beta2, mean_share, square_share, eps,
    mean_correction, square_correction, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    grad = tl.load(grad_ptr + i, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + i, mask=inside, other=0.0)
    square = tl.load(square_ptr + i, mask=inside, other=0.0)
    master = tl.load(master_ptr + i, mask=inside, other=0.0)
    master -= decay * master
    mean += mean_share * (grad - mean)
    square = beta2 * square + square_share * grad * grad
    master -= lr / mean_correction * mean / (tl.sqrt(square) / square_correction + eps)
    tl.store(mean_ptr + i, mean, mask=inside)
    tl.store(square_ptr + i, square, mask=inside)
    tl.store(master_ptr + i, master, mask=inside)
    tl.store(weight_ptr + i, master.to(weight_ptr.dtype.element_ty), mask=inside)


def update_adamw(
    weight: Tensor,
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Update the float32 master weight and moments in place, and round the master to the weight. All are contiguous.

    Differences from 1 are computed on the host, because 1 − 0.999 has few digits in float32.
    """
    (beta1, beta2), count = betas, master.numel()
    if count:
        _adamw[(triton.cdiv(count, UPDATE_BLOCK),)](
            weight, master, grad, exp_avg, exp_avg_sq, count, lr, lr * weight_decay, beta2, 1 - beta1, 1 - beta2, eps,
            1 - beta1**step, (1 - beta2**step) ** 0.5, BLOCK=UPDATE_BLOCK, num_warps=8,
        )  # fmt: skip


@triton.jit
def _swiglu_gradient(x_ptr, upstream_ptr, out_ptr, F, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * F + i, mask=i < F, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + i, mask=i < F, other=0.0).to(tl.float32)
    y = tl.load(upstream_ptr + row * F + i, mask=i < F, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    for_gate = y * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(out_ptr + row * 2 * F + i, for_gate.to(out_ptr.dtype.element_ty), mask=i < F)
    tl.store(out_ptr + row * 2 * F + F + i, (y * gate * sigmoid).to(out_ptr.dtype.element_ty), mask=i < F)


@torch.library.custom_op("vitrail::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) · up of x (…, 2F), the gates before the ups: (…, F)."""
    return multiply_silu(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], x.shape[-1] // 2)


@swiglu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@torch.library.custom_op("vitrail::swiglu_gradient", mutates_args=())
def _compute_swiglu_gradient(x: Tensor, upstream: Tensor) -> Tensor:
    x, upstream = x.contiguous(), upstream.contiguous()
    F = x.shape[-1] // 2
    out = torch.empty_like(x)
    if N := x.numel() // max(1, 2 * F):
        _swiglu_gradient[(N, triton.cdiv(F, GATE_BLOCK))](x, upstream, out, F, BLOCK=GATE_BLOCK)
    return out


@_compute_swiglu_gradient.register_fake
def _(x: Tensor, upstream: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _save_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, upstream: Tensor) -> Tensor:
    return _compute_swiglu_gradient(ctx.saved_tensors[0], upstream)


swiglu.register_autograd(_backward, setup_context=_save_input)
