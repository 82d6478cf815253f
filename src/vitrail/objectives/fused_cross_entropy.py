"""Cross-entropy over a vocabulary, and a fused version that never holds all logits.

N tokens, V vocabulary size, D width, n tokens of a chunk
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.nn.kernels import HAS_TRITON

Reduction = Literal["mean", "sum"]

MAX_LOGITS = 2**27
"""Logits in memory at a time: 1.3 GB in bf16 with float32 copies. A larger number is hardly faster."""


class TokenLosses(NamedTuple):
    """Reduced loss, and the loss of each token.

    loss       scalar to minimize
    per_token  −log p of each token in the shape of the targets, 0 where ignored; without gradient and z-loss
    """

    loss: Tensor
    per_token: Tensor


def cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, z_loss: float = 0.0, reduction: Reduction = "mean"
) -> Tensor:
    """Return the mean or sum of −log p + z_loss · logsumexp² over the targets that are not ignored.

    logits (…, V), targets (…). The z-loss keeps the logits from drifting (PaLM: 1e-4). If all targets are ignored, the
    loss and its gradient are 0. Computed in float32, or in float64 for float64 logits.
    """
    is_target, logits = targets != ignore_index, logits.to(_wide(logits))
    lse = logits.logsumexp(-1)
    target_logits = logits.gather(-1, targets.where(is_target, 0)[..., None])[..., 0]
    return ((lse - target_logits + z_loss * lse.square()) * _shares(is_target, logits.dtype, reduction)).sum()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute `cross_entropy(hidden @ weight.T, targets)` in chunks of tokens.

    hidden (…, D), weight (V, D), targets (…). Only the logits of `chunk_size` tokens are in memory (default: about
    `MAX_LOGITS` logits). Gradients are computed per chunk in the forward pass, so the backward pass only scales them;
    the weight gradient is summed in float32. Inputs without gradient (a frozen head, evaluation) cost nothing extra.
    Ignored tokens cost as much as others; if most are ignored, select the other tokens first.
    """
    return linear_token_losses(
        hidden, weight, targets, chunk_size=chunk_size, ignore_index=ignore_index, z_loss=z_loss, reduction=reduction
    ).loss


def linear_token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> TokenLosses:
    """Compute `linear_cross_entropy` and the loss of each token."""
    if chunk_size is None:
        chunk_size = max(MAX_LOGITS // len(weight) // 128, 1) * 128  # multiple of the matrix product's tile
    if chunk_size < 1:
        raise ConfigError(f"chunk_size is {chunk_size}", "use at least 1")
    # Read grad mode here: inside a custom operator it is always off.
    grad = torch.is_grad_enabled()
    value, each, _, _ = _chunked(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        targets.reshape(-1),
        chunk_size,
        ignore_index,
        z_loss,
        reduction == "mean",
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
    )
    return TokenLosses(value, each.view(targets.shape))


# A custom operator, so that the compiler cannot merge chunks and hold several at once.
@torch.library.custom_op("vitrail::linear_cross_entropy", mutates_args=())
def _chunked(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    ignore: int,
    z: float,
    mean: bool,
    for_hidden: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden (N, D), weight (V, D), targets (N,) → loss (), losses (N,), gradients (N, D) and (V, D), or empty."""
    wide, is_target = _wide(hidden), targets != ignore
    targets = targets.where(is_target, 0)[:, None]  # (N, 1)
    shares = _shares(is_target, wide, "mean" if mean else "sum")  # (N,)
    value, each = shares.new_zeros(()), torch.zeros_like(shares)
    d_hidden = torch.empty_like(hidden) if for_hidden else hidden.new_empty(0)
    d_weight = torch.zeros_like(weight, dtype=wide) if for_weight else weight.new_empty(0)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        x, target, share = hidden[rows], targets[rows], shares[rows]
        logits = F.linear(x, weight)  # (n, V)
        if logits.is_cuda and wide == torch.float32 and HAS_TRITON:
            from vitrail.nn.kernels.training_kernels import compute_softmax_gradient

            loss, lse = compute_softmax_gradient(logits, target[:, 0], share, z, for_hidden or for_weight)
        else:
            loss, lse = _compute_softmax_gradient(logits, target, share, z, for_hidden or for_weight)
        each[rows] = loss * is_target[rows]
        value += ((loss + z * lse.square()) * share).sum()
        if for_hidden or for_weight:
            gradient = logits
            if for_hidden:
                torch.mm(gradient, weight, out=d_hidden[rows])
            if for_weight:
                add_matmul(d_weight, gradient.T, x)
    # Round the float32 sum once, here, to save memory.
    return value, each, d_hidden, d_weight.to(weight.dtype)


def _compute_softmax_gradient(
    logits: Tensor, target: Tensor, share: Tensor, z: float, needs_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return −log p of each target and the logsumexp; overwrite the logits with their gradient if needed.

    The Triton kernel of the same name does it in one pass.
    """
    logp = F.log_softmax(logits, -1, dtype=_wide(logits))
    loss = -logp.gather(-1, target)[:, 0]
    lse = logits.gather(-1, target)[:, 0] + loss
    if needs_gradient:
        # d/dlogits = share · (p · (1 + 2 z lse) − onehot). For the target, where the two terms cancel, it is computed
        # before rounding to the dtype of the logits.
        factor = share * (1 + 2 * z * lse)
        torch.mul(logp.exp_(), factor[:, None], out=logits)
        logits.scatter_(-1, target, (torch.exp(-loss) * factor - share).to(logits.dtype)[:, None])
    return loss, lse


@_chunked.register_fake
def _(hidden, weight, targets, chunk, ignore, z, mean, for_hidden, for_weight):
    each = torch.empty_like(targets, dtype=_wide(hidden))
    d_hidden = torch.empty_like(hidden) if for_hidden else hidden.new_empty(0)
    d_weight = torch.empty_like(weight) if for_weight else weight.new_empty(0)
    return each.new_empty(()), each, d_hidden, d_weight


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, each, d_hidden, d_weight = output
    ctx.wanted = inputs[-2:]
    ctx.mark_non_differentiable(each, d_hidden, d_weight)
    ctx.save_for_backward(d_hidden, d_weight)


def _backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
        raise RuntimeError("linear_cross_entropy has no second derivative; use cross_entropy")
    d_hidden, d_weight = (
        _scale(d, upstream) if w else None for d, w in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    )
    return d_hidden, d_weight, *[None] * 7


def _scale(x: Tensor, scale: Tensor) -> Tensor:
    """Return x · scale in the dtype of x, without rounding the scale to that dtype first."""
    return torch.mul(x, scale.view(1, 1), out=torch.empty_like(x))


_chunked.register_autograd(_backward, setup_context=_keep)

HAS_MIXED_PRECISION_ADDMM = "dtype_out" in torch.ops.aten.addmm.overloads()
"""Whether torch can add a half-precision CUDA matrix product to a float32 sum without rounding."""


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a @ b, where the total may have a wider dtype than a and b."""
    if total.dtype != a.dtype and total.is_cuda and HAS_MIXED_PRECISION_ADDMM:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _shares(is_target: Tensor, dtype: torch.dtype, reduction: Reduction) -> Tensor:
    """Return the weight of each token in the loss."""
    shares = is_target.to(dtype)
    return shares / shares.sum().clamp_min(1) if reduction == "mean" else shares
