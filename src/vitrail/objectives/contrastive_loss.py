"""Memory-efficient CLIP and SigLIP losses: exact for any batch size, with memory that grows with N·D.

Logits are computed one tile at a time, together with the gradients, in the forward pass. The backward pass only scales
the gradients. `reference_clip_loss` and `reference_siglip_loss` compute all logits at once.

N rows, M columns, D width; x logits, scale · u·vᵀ (+ bias)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.objectives.contrastive_gradients import (
    LOCAL_EXCHANGE,
    ColumnExchange,
    ContrastiveGradients,
    ContrastiveInputs,
    compute_clip_loss,
    compute_siglip_loss,
)
from vitrail.objectives.contrastive_labels import Labels, PairLabels, parse_labels
from vitrail.objectives.contrastive_tiles import compute_logits, wide_dtype


def clip_loss(
    u: Tensor,
    v: Tensor,
    scale: Tensor | float,
    labels: Labels = None,
    *,
    exchange: ColumnExchange = LOCAL_EXCHANGE,
    tile_size: int | None = None,
) -> Tensor:
    """CLIP loss: ½ (mean over rows + mean over columns) of the cross-entropy. Several positives share the target.

    u, v       embeddings (N, D) and (M, D), normalized by the caller
    scale      factor of the logits (not its logarithm)
    labels     see `Labels`; None if row i belongs to column i. A row or column without a positive serves as a negative
               only.
    exchange   columns of other ranks, for a batch that is spread over ranks (see `distributed_contrastive`)
    tile_size  rows and columns of a tile; None selects it for the device

    The loss gives a bound on mutual information: I(U; V) ≥ ln N − loss.
    """
    u, v, scale, pairs = check_inputs(u, v, scale, labels, exchange)
    return apply_precomputed_gradients(lambda batch: compute_clip_loss(batch, pairs, exchange, tile_size), u, v, scale)


def siglip_loss(
    u: Tensor,
    v: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    labels: Labels = None,
    *,
    exchange: ColumnExchange = LOCAL_EXCHANGE,
    tile_size: int | None = None,
) -> Tensor:
    """SigLIP loss: −Σ log σ(y·x) over all pairs, divided by the number of rows; y is 1 for positives, −1 for negatives.

    The arguments are those of `clip_loss`, and `bias` of the logits. Ignored rows do not count.
    """
    u, v, scale, pairs = check_inputs(u, v, scale, labels, exchange)
    return apply_precomputed_gradients(
        lambda batch: compute_siglip_loss(batch, pairs, exchange, tile_size),
        u,
        v,
        scale,
        to_scalar_tensor("bias", bias, u),
    )


# ---- reference implementations with all logits at once --------------------------------------------------------------


def reference_clip_loss(u: Tensor, v: Tensor, scale: Tensor | float, labels: Labels = None) -> Tensor:
    """Compute `clip_loss` with all logits at once."""
    u, v, scale, pairs = check_inputs(u, v, scale, labels)
    signs = pairs.sign_matrix(len(u), len(v), u.device)
    x = compute_logits(u, v, scale).masked_fill(signs == 0, -torch.inf)

    def one_direction(x: Tensor, positive: Tensor) -> Tensor:
        counts = positive.any(1)
        x, positive = x[counts], positive[counts]
        each = -x.log_softmax(1).masked_fill(~positive, 0).sum(1) / positive.sum(1)
        return each.sum() / counts.sum().clamp_min(1)

    return (one_direction(x, signs > 0) + one_direction(x.T, signs.T > 0)) / 2


def reference_siglip_loss(
    u: Tensor, v: Tensor, scale: Tensor | float, bias: Tensor | float, labels: Labels = None
) -> Tensor:
    """Compute `siglip_loss` with all logits at once."""
    u, v, scale, pairs = check_inputs(u, v, scale, labels)
    signs = pairs.sign_matrix(len(u), len(v), u.device)
    x = compute_logits(u, v, scale) + to_scalar_tensor("bias", bias, u)
    return -F.logsigmoid(x * signs).masked_fill(signs == 0, 0).sum() / pairs.count_rows(len(u), u.device).clamp_min(1)


# ---- loss with precomputed gradients --------------------------------------------------------------------------------


@torch.compiler.disable  # the compiler would unroll the loop over tiles and hold several of them in memory
def apply_precomputed_gradients(
    run: Callable[[ContrastiveInputs], tuple[Tensor, ContrastiveGradients]],
    u: Tensor,
    v: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the loss that `run` computes, with the gradients that it also computes."""
    return _PrecomputedGradients.apply(run, torch.is_grad_enabled(), u, v, scale, bias)


class _PrecomputedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, grad: bool, *inputs: Any) -> Tensor:
        needs_grad = [grad and x is not None and x.requires_grad for x in inputs]
        with torch.autocast(inputs[0].device.type, enabled=False):  # autocast would round the logits to bf16
            value, gradients = run(ContrastiveInputs(*inputs, *needs_grad))
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore
        if torch.is_grad_enabled():  # create_graph: the precomputed gradients are constants
            raise RuntimeError("no second derivative: use reference_clip_loss or reference_siglip_loss")
        # Multiply in float32 and round once to the dtype of the gradient.
        scaled = (
            None if g is None else torch.mul(g, upstream.view([1] * g.ndim), out=torch.empty_like(g))
            for g in ctx.saved_tensors
        )
        return None, None, *scaled


def check_inputs(
    u: Tensor, v: Tensor, scale: Tensor | float, labels: Labels, exchange: ColumnExchange = LOCAL_EXCHANGE
) -> tuple[Tensor, Tensor, Tensor, PairLabels]:
    """Check the arguments and convert them. A table of labels has the columns of all ranks."""
    if u.ndim != 2 or v.ndim != 2 or u.shape[1:] != v.shape[1:] or u.dtype != v.dtype or not u.is_floating_point():
        shapes = " and ".join(f"{tuple(x.shape)} of {str(x.dtype).removeprefix('torch.')}" for x in (u, v))
        raise ConfigError(f"u and v do not match: {shapes}", "pass u (N, D) and v (M, D) of one floating-point dtype")
    if u.dtype == torch.float16:  # a loss scaler scales the loss first, so that small gradients survive
        u, v = u.float(), v.float()
    pairs = parse_labels(labels, len(u), exchange.count_columns(v) if isinstance(labels, Tensor) else len(v))
    return u, v, to_scalar_tensor("scale", scale, u), pairs._replace(diagonal_offset=exchange.first_column)


def to_scalar_tensor(name: str, x: Tensor | float, like: Tensor) -> Tensor:
    """Convert a number or one-element tensor to a tensor on the device of `like`."""
    if not isinstance(x, Tensor):
        return torch.full((), x, dtype=wide_dtype(like), device=like.device)
    if x.numel() != 1:
        raise ConfigError(f"{name} has shape {tuple(x.shape)}", "pass a tensor with one element")
    return x.to(like.device)
