"""Cross-entropy over a vocabulary, plain and without ever holding all the logits.

N tokens, V vocabulary, D width, n tokens of a chunk
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError

Reduction = Literal["mean", "sum"]

LOGITS = 2**27
"""Logits that exist at a time: 1.3 GB in bf16 with the float32 copies they need; more of them are hardly faster."""


class Losses(NamedTuple):
    """value: the scalar to minimise · each: every token's −log p, in the targets' shape, 0 where ignored, to be logged
    by kind of token; it has no gradient and leaves the z term out"""

    value: Tensor
    each: Tensor


def cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore: int = -100, z: float = 0.0, reduction: Reduction = "mean"
) -> Tensor:
    """logits (…, V), targets (…) → mean or sum over the counted tokens of −log p + z · logsumexp².

    The z term keeps the logits from drifting (PaLM: 1e-4). Without any counted token the loss is 0 and so is its
    gradient. All in float32, or in float64 where the logits are.
    """
    counted, logits = targets != ignore, logits.to(_wide(logits))
    lse = logits.logsumexp(-1)
    picked = logits.gather(-1, targets.where(counted, 0)[..., None])[..., 0]
    return ((lse - picked + z * lse.square()) * _shares(counted, logits.dtype, reduction)).sum()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
    ignore: int = -100,
    z: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`cross_entropy(hidden @ weight.T, targets)`, of which only `chunk` tokens' logits exist at a time (unless given,
    as many as make about LOGITS of them).

    hidden (…, D), weight (V, D), targets (…). The gradients are computed chunk by chunk in the forward pass, beside the
    logits they need, so the backward pass only scales them; the weight's is summed in float32. What needs no gradient
    (a frozen head, evaluation) costs none. Ignored tokens go through the product like the others: where most are
    ignored, select the counted ones first.
    """
    return linear_losses(hidden, weight, targets, chunk=chunk, ignore=ignore, z=z, reduction=reduction).value


def linear_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
    ignore: int = -100,
    z: float = 0.0,
    reduction: Reduction = "mean",
) -> Losses:
    """`linear_cross_entropy` together with the loss of each token."""
    if chunk is None:
        chunk = max(LOGITS // len(weight) // 128, 1) * 128  # whole tiles of the product
    if chunk < 1:
        raise ConfigError(f"a chunk of {chunk} tokens holds nothing", "use at least 1")
    # Whether gradients are wanted is asked here: inside an operator grad mode is always off.
    grad = torch.is_grad_enabled()
    value, each, _, _ = _chunked(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        targets.reshape(-1),
        chunk,
        ignore,
        z,
        reduction == "mean",
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
    )
    return Losses(value, each.view(targets.shape))


# One operator, so that the compiler cannot undo the chunks: left to itself it computes several at once.
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
    """hidden (N, D), weight (V, D), targets (N,) → loss (), each (N,), gradients (N, D), (V, D) or empty if unwanted"""
    wide, counted = _wide(hidden), targets != ignore
    targets = targets.where(counted, 0)[:, None]  # (N, 1)
    shares = _shares(counted, wide, "mean" if mean else "sum")  # (N,)
    value, each = shares.new_zeros(()), torch.zeros_like(shares)
    d_hidden = torch.empty_like(hidden) if for_hidden else hidden.new_empty(0)
    d_weight = torch.zeros_like(weight, dtype=wide) if for_weight else weight.new_empty(0)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        x, target, share = hidden[rows], targets[rows], shares[rows]
        logits = F.linear(x, weight)  # (n, V)
        logp = F.log_softmax(logits, -1, dtype=wide)
        loss = -logp.gather(-1, target)[:, 0]
        lse = logits.gather(-1, target)[:, 0] + loss
        each[rows] = loss * counted[rows]
        value += ((loss + z * lse.square()) * share).sum()
        if for_hidden or for_weight:
            # d/dlogits = share · (p · (1 + 2 z lse) − onehot), in the logits' place; the target's own, where the two
            # terms cancel, before it is rounded to the logits' type.
            factor = share * (1 + 2 * z * lse)
            slope = torch.mul(logp.exp_(), factor[:, None], out=logits)
            slope.scatter_(-1, target, (torch.exp(-loss) * factor - share).to(slope.dtype)[:, None])
            if for_hidden:
                torch.mm(slope, weight, out=d_hidden[rows])
            if for_weight:
                add_product(d_weight, slope.T, x)
    # Rounded to the weight's type once, here, the sum weighs no more than it will as a gradient.
    return value, each, d_hidden, d_weight.to(weight.dtype)


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
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: ours would pass for constants
        raise RuntimeError("linear_cross_entropy has no second derivative; use cross_entropy")
    d_hidden, d_weight = (
        _scale(d, upstream) if w else None for d, w in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    )
    return d_hidden, d_weight, *[None] * 7


def _scale(x: Tensor, scale: Tensor) -> Tensor:
    """x · scale, in x's type; the scale is not rounded to it first, as that of a mere number would be."""
    return torch.mul(x, scale.view(1, 1), out=torch.empty_like(x))


_chunked.register_autograd(_backward, setup_context=_keep)

WIDE_PRODUCT = "dtype_out" in torch.ops.aten.addmm.overloads()
"""Whether this torch has a CUDA product of half-precision factors that is added to a float32 sum unrounded."""


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where the total may be wider than the factors."""
    if total.dtype != a.dtype and total.is_cuda and WIDE_PRODUCT:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _shares(counted: Tensor, dtype: torch.dtype, reduction: Reduction) -> Tensor:
    """What each token's loss weighs in the whole."""
    shares = counted.to(dtype)
    return shares / shares.sum().clamp_min(1) if reduction == "mean" else shares
