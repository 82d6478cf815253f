"""The loss of a whole batch and its gradients, whoever holds the batch.

CLIP sweeps over the pairs twice, for log Σ exp of every row and column and then for the slopes; SigLIP once. One
process with all columns and many with a share each do the same; how columns meet rows is the `Meeting`.

Without labels each row has one positive, whose slope is computed here in full precision: of p − 1, when p nears 1,
little more than rounding would be left.

N rows and M columns of this process, D width
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from vitrail.objectives import sweep
from vitrail.objectives.pairs import Pairs
from vitrail.objectives.tiles import Side, softplus, wide


class Batch(NamedTuple):
    """The arguments of a loss, and which of them need a gradient."""

    u: Tensor
    v: Tensor
    scale: Tensor
    bias: Tensor | None
    for_u: bool
    for_v: bool
    for_scale: bool
    for_bias: bool


class Gradients(NamedTuple):
    u: Tensor | None = None
    v: Tensor | None = None
    scale: Tensor | None = None
    bias: Tensor | None = None


Unite = Literal["sum", "logaddexp"]
See = Callable[[int, list[Tensor], list[Tensor]], None]


class Meeting(Protocol):
    weight: float
    """What gradients are multiplied by, for what will become of them."""

    def around(self, see: See, given: list[Tensor], kept: list[Tensor], unite: list[Unite]) -> list[Tensor]:
        """Call `see(first, given, kept)` with blocks that together are all columns, of which `first` is the number of
        the block's first. What is `given` of a column is read; what is `kept` is added to, and starts from nothing.
        → what all rows of all processes have added for the columns of this one"""
        ...

    def total(self, x: Tensor) -> Tensor:
        """Summed over the processes."""
        ...


class Alone:
    """One process: its columns are all."""

    weight = 1.0

    def around(self, see: See, given: list[Tensor], kept: list[Tensor], unite: list[Unite]) -> list[Tensor]:
        see(0, given, kept)
        return kept

    def total(self, x: Tensor) -> Tensor:
        return x


def run_siglip(batch: Batch, pairs: Pairs, meeting: Meeting, tile: int | None) -> tuple[Tensor, Gradients]:
    assert batch.bias is not None
    u, v, scale = _ready(batch)
    bias = batch.bias.to(scale).view(())
    total = torch.zeros(3, dtype=torch.float64, device=u.device)  # the loss, its slope in the bias, and in the scale
    d_u, d_v = _nothing(batch, u, v)

    def see(first: int, given: list[Tensor], kept: list[Tensor]) -> None:
        columns, here, _ = _met(pairs, first, given)
        total.add_(sweep.siglip(u, columns, scale, bias, here, (d_u, _only(kept)), tile))

    d_v = _only(meeting.around(see, _columns(v, pairs), _some(d_v), ["sum"]))
    own = None
    if not pairs.labelled:
        x = scale * sweep.maker(u).dots(u, v) + bias
        own = -torch.sigmoid(-x)
        total[:2] += torch.stack([softplus(-x).sum(dtype=torch.float64), own.sum(dtype=torch.float64)])
    counted = meeting.total(pairs.counted(len(u), u.device)).clamp_min(1).double()
    total /= counted
    gradients = _gradients(batch, u, v, (d_u, d_v), own, scale, meeting.weight / counted)
    if batch.for_scale and pairs.labelled:  # summed before slopes are rounded: positives and negatives nearly cancel
        gradients = gradients._replace(scale=(total[2] * meeting.weight).to(batch.scale.dtype).view(batch.scale.shape))
    if batch.for_bias:
        gradients = gradients._replace(bias=(total[1] * meeting.weight).to(batch.bias.dtype).view(batch.bias.shape))
    return meeting.total(total[0]).to(wide(u)), gradients


def run_clip(batch: Batch, pairs: Pairs, meeting: Meeting, tile: int | None) -> tuple[Tensor, Gradients]:
    u, v, scale = _ready(batch)
    rows, columns = _no_stats(u, pairs), _no_stats(v, pairs)

    def measure(first: int, given: list[Tensor], kept: list[Tensor]) -> None:
        columns, here, _ = _met(pairs, first, given)
        sweep.clip_stats(u, columns, scale, here, rows, kept, tile)

    columns = meeting.around(measure, _columns(v, pairs), columns, ["logaddexp", "logaddexp", "sum", "sum"])
    if not pairs.labelled:
        own = scale * sweep.maker(u).dots(u, v)
        rows, columns = ([x[0], own, own, torch.ones_like(own)] for x in (rows, columns))
    row_side, row_loss = _side(rows, meeting)
    column_side, column_loss = _side(columns, meeting)
    value = meeting.total(row_loss + column_loss).to(wide(u))
    if not (batch.for_u or batch.for_v or batch.for_scale):
        return value, Gradients()
    d_u, d_v = _nothing(batch, u, v)

    def incline(first: int, given: list[Tensor], kept: list[Tensor]) -> None:
        columns, here, fields = _met(pairs, first, given)
        side = Side(column_side.weight, *fields)
        sweep.clip_slopes(u, columns, scale, here, row_side, side, (d_u, _only(kept)), tile)

    d_v = _only(meeting.around(incline, [*_columns(v, pairs), *column_side[1:]], _some(d_v), ["sum"]))
    own = None if pairs.labelled else -(row_side.miss + column_side.miss)
    share = torch.full_like(scale, meeting.weight, dtype=torch.float64)
    return value, _gradients(batch, u, v, (d_u, d_v), own, scale, share)


def _side(stats: sweep.Stats, meeting: Meeting) -> tuple[Side, Tensor]:
    """What the slopes need of the rows or columns, and this process's share of their loss."""
    negative, positive, total, number = stats
    counts = number > 0
    gap = torch.where(counts, negative - positive, -torch.inf)
    weight = 0.5 / meeting.total(counts.sum()).clamp_min(1).to(gap.dtype)
    loss = softplus(gap)  # of the positives together; what they differ comes on top, and is 0 of a single one
    each = loss + torch.where(counts, positive - total / number, 0)
    exponent = torch.where(counts, positive + loss - weight.log(), torch.inf)
    side = Side(weight, exponent, positive, weight / number.clamp_min(1), weight * gap.sigmoid())
    return side, weight * each.sum(dtype=torch.float64)


# ---- small parts ----------------------------------------------------------------------------------------------------


def _ready(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """u and v as the tiles read them, perhaps a little wider, and the scale."""
    by = sweep.maker(batch.u)
    return by.aligned(batch.u), by.aligned(batch.v), batch.scale.to(wide(batch.u)).view(())


def _columns(v: Tensor, pairs: Pairs) -> list[Tensor]:
    return [v] if pairs.columns is None else [v, pairs.columns]


def _met(pairs: Pairs, first: int, given: list[Tensor]) -> tuple[Tensor, Pairs, list[Tensor]]:
    """The columns at hand, how the rows pair with them, and what else came along."""
    v, *more = given
    ids = None if pairs.columns is None else more.pop(0)
    return v, pairs.beside(first, len(v), ids), more


def _nothing(batch: Batch, u: Tensor, v: Tensor) -> sweep.Sums:
    """Where the gradients of u and v are summed; the scale's comes from either."""
    d_v = torch.zeros_like(v, dtype=wide(v)) if batch.for_v else None
    for_u = batch.for_u or (batch.for_scale and d_v is None)
    return torch.zeros_like(u, dtype=wide(u)) if for_u else None, d_v


def _no_stats(x: Tensor, pairs: Pairs) -> sweep.Stats:
    start = [-torch.inf, -torch.inf, 0.0, 0.0] if pairs.labelled else [-torch.inf]
    return [torch.full((len(x),), value, dtype=wide(x), device=x.device) for value in start]


def _some(x: Tensor | None) -> list[Tensor]:
    return [] if x is None else [x]


def _only(xs: list[Tensor]) -> Tensor | None:
    return xs[0] if xs else None


def _gradients(
    batch: Batch, u: Tensor, v: Tensor, sums: sweep.Sums, own: Tensor | None, scale: Tensor, share: Tensor
) -> Gradients:
    """From the gradients of u·vᵀ, a `share` of which counts; `own` are slopes of row i with column i that they lack."""
    out, factor, D = Gradients(), (scale * share).to(scale.dtype), batch.u.shape[1]
    for name, wanted, d, x, other in (("v", batch.for_v, sums[1], v, u), ("u", batch.for_u, sums[0], u, v)):
        if d is not None:
            gradient, products = sweep.maker(u).finished(d, x, other, own, factor)
            if wanted:
                out = out._replace(**{name: gradient[:, :D].contiguous()})
            if batch.for_scale:  # Σ G·(u·vᵀ) over all pairs, by rows or by columns
                total = (products.sum(dtype=torch.float64) * share).to(batch.scale.dtype)
                out = out._replace(scale=total.view(batch.scale.shape))
    return out
