"""CLIP's and SigLIP's losses of a whole batch: exact, at any size, in memory that grows with N·D.

The logits exist a tile at a time, and the gradients are computed beside them in the forward pass, so the backward pass
only scales them. `plain_clip_loss` and `plain_siglip_loss` are the formulas with all logits at once.

N rows, M columns, D width; x logits, scale · u·vᵀ (+ bias)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.objectives.pairs import Labels, Pairs, read
from vitrail.objectives.tiles import logits, wide
from vitrail.objectives.whole import Alone, Batch, Gradients, run_clip, run_siglip


def clip_loss(u: Tensor, v: Tensor, scale: Tensor | float, labels: Labels = None, *, tile: int | None = None) -> Tensor:
    """½ (mean over rows + mean over columns) of the cross-entropy of x with the positives, which share the target.

    u (N, D) and v (M, D) are normalised by the caller; `scale` is the multiplier itself. Without labels row i belongs
    to column i. A row or column without a positive is a negative of the others and has no loss of its own. `tile` rows
    and columns meet at a time (unless given, as many as suit the device). I(U; V) ≥ ln N − loss.
    """
    u, v, scale, pairs = checked(u, v, scale, labels)
    return settled(lambda batch: run_clip(batch, pairs, Alone(), tile), u, v, scale)


def siglip_loss(
    u: Tensor, v: Tensor, scale: Tensor | float, bias: Tensor | float, labels: Labels = None, *, tile: int | None = None
) -> Tensor:
    """−Σ log σ(y·x) over all pairs, divided by the number of rows; y is 1 for positives and −1 for negatives.

    Arguments as in `clip_loss`, and the bias. Rows that are left out do not count.
    """
    u, v, scale, pairs = checked(u, v, scale, labels)
    return settled(lambda batch: run_siglip(batch, pairs, Alone(), tile), u, v, scale, scalar("bias", bias, u))


# ---- the formulas, all logits at once -------------------------------------------------------------------------------


def plain_clip_loss(u: Tensor, v: Tensor, scale: Tensor | float, labels: Labels = None) -> Tensor:
    u, v, scale, pairs = checked(u, v, scale, labels)
    signs = pairs.signs(len(u), len(v), u.device)
    x = logits(u, v, scale).masked_fill(signs == 0, -torch.inf)

    def one_way(x: Tensor, positive: Tensor) -> Tensor:
        counts = positive.any(1)
        x, positive = x[counts], positive[counts]
        each = -x.log_softmax(1).masked_fill(~positive, 0).sum(1) / positive.sum(1)
        return each.sum() / counts.sum().clamp_min(1)

    return (one_way(x, signs > 0) + one_way(x.T, signs.T > 0)) / 2


def plain_siglip_loss(
    u: Tensor, v: Tensor, scale: Tensor | float, bias: Tensor | float, labels: Labels = None
) -> Tensor:
    u, v, scale, pairs = checked(u, v, scale, labels)
    signs = pairs.signs(len(u), len(v), u.device)
    x = logits(u, v, scale) + scalar("bias", bias, u)
    return -F.logsigmoid(x * signs).masked_fill(signs == 0, 0).sum() / pairs.counted(len(u), u.device).clamp_min(1)


# ---- a loss with its gradients beside it ----------------------------------------------------------------------------


@torch.compiler.disable  # the compiler would unroll the tiles and hold several of them
def settled(
    run: Callable[[Batch], tuple[Tensor, Gradients]], u: Tensor, v: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The loss that `run` finds, differentiable by the gradients that it found too."""
    return _Settled.apply(run, torch.is_grad_enabled(), u, v, scale, bias)


class _Settled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, grad: bool, *inputs: Any) -> Tensor:
        wants = [grad and x is not None and x.requires_grad for x in inputs]
        with torch.autocast(inputs[0].device.type, enabled=False):  # a product in bf16 would round the logits
            value, gradients = run(Batch(*inputs, *wants))
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore
        if torch.is_grad_enabled():  # create_graph: ours would pass for constants
            raise RuntimeError("the tiled losses have no second derivative; use plain_clip_loss, plain_siglip_loss")
        # Rounded to the gradient's type once: upstream itself, in float32, is not rounded to it first.
        scaled = (
            None if g is None else torch.mul(g, upstream.view([1] * g.ndim), out=torch.empty_like(g))
            for g in ctx.saved_tensors
        )
        return None, None, *scaled


def checked(
    u: Tensor, v: Tensor, scale: Tensor | float, labels: Labels, columns: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Pairs]:
    """The arguments as they are computed with; the labels are of so many `columns`, where those of v are not all."""
    if u.ndim != 2 or v.ndim != 2 or u.shape[1:] != v.shape[1:] or u.dtype != v.dtype or not u.is_floating_point():
        kinds = " and ".join(f"{tuple(x.shape)} of {str(x.dtype).removeprefix('torch.')}" for x in (u, v))
        raise ConfigError(f"{kinds} cannot be compared", "give u (N, D) and v (M, D) of one floating type")
    if u.dtype == torch.float16:  # gradients too small for it are scaled up first, as a loss scaler means them to be
        u, v = u.float(), v.float()
    return u, v, scalar("scale", scale, u), read(labels, len(u), len(v) if columns is None else columns)


def scalar(name: str, x: Tensor | float, like: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        return torch.full((), x, dtype=wide(like), device=like.device)
    if x.numel() != 1:
        raise ConfigError(f"a {name} of shape {tuple(x.shape)} is not one number", "give a tensor of one element")
    return x.to(like.device)
