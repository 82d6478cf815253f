"""Contrastive losses and their gradients, on one process or many.

CLIP visits all pairs twice: for log Σ exp of every row and column, and for the gradients. SigLIP visits them once. A
`ColumnExchange` brings the columns to the rows, from this process or from other ranks.

Without labels each row has one positive. Its gradient is computed here in float32, because p − 1 would cancel in bf16.

N rows and M columns of this process, D width
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from vitrail.objectives import tiled_contrastive
from vitrail.objectives.contrastive_labels import PairLabels
from vitrail.objectives.contrastive_tiles import ClipTerms, softplus, wide_dtype


class ContrastiveInputs(NamedTuple):
    """Arguments of a loss, and which of them need a gradient."""

    u: Tensor
    v: Tensor
    scale: Tensor
    bias: Tensor | None
    needs_grad_u: bool
    needs_grad_v: bool
    needs_grad_scale: bool
    needs_grad_bias: bool


class ContrastiveGradients(NamedTuple):
    """Gradients of the arguments; None where not needed."""

    u: Tensor | None = None
    v: Tensor | None = None
    scale: Tensor | None = None
    bias: Tensor | None = None


MergeOp = Literal["sum", "logaddexp"]
VisitFn = Callable[[int, list[Tensor], list[Tensor]], None]


class ColumnExchange(Protocol):
    """Access of the local rows to the columns of all processes."""

    gradient_scale: float
    """Factor on the gradients, which compensates their later reduction over ranks."""
    first_column: int
    """Index of this process's first column among the columns of all processes."""

    def count_columns(self, v: Tensor) -> int:
        """Return the number of columns of all processes; v are those of this process."""
        ...

    def visit_columns(
        self, visit: VisitFn, inputs: list[Tensor], accumulators: list[Tensor], merge_ops: list[MergeOp]
    ) -> list[Tensor]:
        """Call `visit(start, inputs, accumulators)` with blocks that together contain all columns.

        `start` is the index of the block's first column. `visit` reads the inputs of the columns and adds to their
        accumulators. Returns the accumulators of this process's columns, merged over all processes.
        """
        ...

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum over all processes."""
        ...


class LocalExchange:
    """Exchange of a single process, which owns all columns."""

    gradient_scale, first_column = 1.0, 0

    def count_columns(self, v: Tensor) -> int:
        return len(v)

    def visit_columns(
        self, visit: VisitFn, inputs: list[Tensor], accumulators: list[Tensor], merge_ops: list[MergeOp]
    ) -> list[Tensor]:
        visit(0, inputs, accumulators)
        return accumulators

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        return x


LOCAL_EXCHANGE = LocalExchange()


def compute_siglip_loss(
    inputs: ContrastiveInputs, pairs: PairLabels, exchange: ColumnExchange, tile_size: int | None
) -> tuple[Tensor, ContrastiveGradients]:
    """Compute the SigLIP loss and its gradients."""
    assert inputs.bias is not None
    u, v, scale = _aligned_inputs(inputs)
    bias = inputs.bias.to(scale).view(())
    total = torch.zeros(3, dtype=torch.float64, device=u.device)  # loss, gradient of the bias, gradient of the scale
    d_u, d_v = _zero_gradient_sums(inputs, u, v)

    def visit(start: int, block: list[Tensor], sums: list[Tensor]) -> None:
        columns, labels, _ = _split_inputs(pairs, start, block)
        total.add_(
            tiled_contrastive.sum_siglip_tiles(u, columns, scale, bias, labels, (d_u, _first_or_none(sums)), tile_size)
        )

    d_v = _first_or_none(exchange.visit_columns(visit, _columns(v, pairs), _as_list(d_v), ["sum"]))
    diagonal_gradients = None
    if not pairs.has_labels:
        x = scale * tiled_contrastive.choose_tile_backend(u).compute_row_dots(u, v) + bias
        diagonal_gradients = -torch.sigmoid(-x)
        total[:2] += torch.stack([softplus(-x).sum(dtype=torch.float64), diagonal_gradients.sum(dtype=torch.float64)])
    num_rows = exchange.sum_over_ranks(pairs.count_rows(len(u), u.device)).clamp_min(1).double()
    total /= num_rows
    gradients = _gradients(inputs, u, v, (d_u, d_v), diagonal_gradients, scale, exchange.gradient_scale / num_rows)
    if (
        inputs.needs_grad_scale and pairs.has_labels
    ):  # summed before rounding, because positives and negatives nearly cancel
        gradients = gradients._replace(
            scale=(total[2] * exchange.gradient_scale).to(inputs.scale.dtype).view(inputs.scale.shape)
        )
    if inputs.needs_grad_bias:
        gradients = gradients._replace(
            bias=(total[1] * exchange.gradient_scale).to(inputs.bias.dtype).view(inputs.bias.shape)
        )
    return exchange.sum_over_ranks(total[0]).to(wide_dtype(u)), gradients


def compute_clip_loss(
    inputs: ContrastiveInputs, pairs: PairLabels, exchange: ColumnExchange, tile_size: int | None
) -> tuple[Tensor, ContrastiveGradients]:
    """Compute the CLIP loss and its gradients."""
    u, v, scale = _aligned_inputs(inputs)
    rows, columns = _initial_stats(u, pairs), _initial_stats(v, pairs)

    def update_stats(start: int, block: list[Tensor], sums: list[Tensor]) -> None:
        columns, labels, _ = _split_inputs(pairs, start, block)
        tiled_contrastive.update_clip_stats(u, columns, scale, labels, rows, sums, tile_size)

    columns = exchange.visit_columns(
        update_stats, _columns(v, pairs), columns, ["logaddexp", "logaddexp", "sum", "sum"]
    )
    if not pairs.has_labels:
        diagonal_gradients = scale * tiled_contrastive.choose_tile_backend(u).compute_row_dots(u, v)
        rows, columns = (
            [x[0], diagonal_gradients, diagonal_gradients, torch.ones_like(diagonal_gradients)] for x in (rows, columns)
        )
    row_side, row_loss = _clip_terms(rows, exchange)
    column_side, column_loss = _clip_terms(columns, exchange)
    value = exchange.sum_over_ranks(row_loss + column_loss).to(wide_dtype(u))
    if not (inputs.needs_grad_u or inputs.needs_grad_v or inputs.needs_grad_scale):
        return value, ContrastiveGradients()
    d_u, d_v = _zero_gradient_sums(inputs, u, v)

    def add_gradients(start: int, block: list[Tensor], sums: list[Tensor]) -> None:
        columns, labels, fields = _split_inputs(pairs, start, block)
        terms = ClipTerms(column_side.weight, *fields)
        tiled_contrastive.add_clip_gradients(
            u, columns, scale, labels, row_side, terms, (d_u, _first_or_none(sums)), tile_size
        )

    d_v = _first_or_none(
        exchange.visit_columns(add_gradients, [*_columns(v, pairs), *column_side[1:]], _as_list(d_v), ["sum"])
    )
    diagonal_gradients = None if pairs.has_labels else -(row_side.negative_weight + column_side.negative_weight)
    share = torch.full_like(scale, exchange.gradient_scale, dtype=torch.float64)
    return value, _gradients(inputs, u, v, (d_u, d_v), diagonal_gradients, scale, share)


def _clip_terms(stats: tiled_contrastive.SoftmaxStats, exchange: ColumnExchange) -> tuple[ClipTerms, Tensor]:
    """Return the terms of rows or columns for the gradients, and this process's part of their loss."""
    negative, positive, total, number = stats
    counts = number > 0
    gap = torch.where(counts, negative - positive, -torch.inf)
    weight = 0.5 / exchange.sum_over_ranks(counts.sum()).clamp_min(1).to(gap.dtype)
    loss = softplus(gap)  # of all positives together; `each` adds the spread between several positives
    each = loss + torch.where(counts, positive - total / number, 0)
    exponent = torch.where(counts, positive + loss - weight.log(), torch.inf)
    side = ClipTerms(weight, exponent, positive, weight / number.clamp_min(1), weight * gap.sigmoid())
    return side, weight * each.sum(dtype=torch.float64)


# ---- helpers --------------------------------------------------------------------------------------------------------


def _aligned_inputs(batch: ContrastiveInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return u and v, padded as the tiles need, and the scale."""
    backend = tiled_contrastive.choose_tile_backend(batch.u)
    return backend.align_rows(batch.u), backend.align_rows(batch.v), batch.scale.to(wide_dtype(batch.u)).view(())


def _columns(v: Tensor, pairs: PairLabels) -> list[Tensor]:
    return [v] if pairs.column_ids is None else [v, pairs.column_ids]


def _split_inputs(pairs: PairLabels, start: int, block: list[Tensor]) -> tuple[Tensor, PairLabels, list[Tensor]]:
    """Split the inputs of a block into columns, their labels, and the remaining inputs."""
    v, *more = block
    ids = None if pairs.column_ids is None else more.pop(0)
    return v, pairs.select_columns(start, len(v), ids), more


def _zero_gradient_sums(batch: ContrastiveInputs, u: Tensor, v: Tensor) -> tiled_contrastive.GradientSums:
    """Allocate the gradient sums of u and v. The gradient of the scale needs one of them."""
    d_v = torch.zeros_like(v, dtype=wide_dtype(v)) if batch.needs_grad_v else None
    for_u = batch.needs_grad_u or (batch.needs_grad_scale and d_v is None)
    return torch.zeros_like(u, dtype=wide_dtype(u)) if for_u else None, d_v


def _initial_stats(x: Tensor, pairs: PairLabels) -> tiled_contrastive.SoftmaxStats:
    start = [-torch.inf, -torch.inf, 0.0, 0.0] if pairs.has_labels else [-torch.inf]
    return [torch.full((len(x),), value, dtype=wide_dtype(x), device=x.device) for value in start]


def _as_list(x: Tensor | None) -> list[Tensor]:
    return [] if x is None else [x]


def _first_or_none(xs: list[Tensor]) -> Tensor | None:
    return xs[0] if xs else None


def _gradients(
    batch: ContrastiveInputs,
    u: Tensor,
    v: Tensor,
    sums: tiled_contrastive.GradientSums,
    diagonal_gradients: Tensor | None,
    scale: Tensor,
    share: Tensor,
) -> ContrastiveGradients:
    """Convert gradients of u·vᵀ, times `share`, to those of the arguments.

    `diagonal_gradients` are those of the diagonal logits.
    """
    out, factor, D = ContrastiveGradients(), (scale * share).to(scale.dtype), batch.u.shape[1]
    for name, is_needed, d, x, other in (
        ("v", batch.needs_grad_v, sums[1], v, u),
        ("u", batch.needs_grad_u, sums[0], u, v),
    ):
        if d is not None:
            gradient, products = tiled_contrastive.choose_tile_backend(u).finish_gradient(
                d, x, other, diagonal_gradients, factor
            )
            if is_needed:
                out = out._replace(**{name: gradient[:, :D].contiguous()})
            if batch.needs_grad_scale:  # Σ G·(u·vᵀ) over all pairs, by rows or by columns
                total = (products.sum(dtype=torch.float64) * share).to(batch.scale.dtype)
                out = out._replace(scale=total.view(batch.scale.shape))
    return out
