"""Exchanges of columns between ranks, for CLIP and SigLIP losses that equal one process with the global batch.

Each rank passes its own u, v, labels and exchange to the loss, and gets the loss of the global batch. Labels are ids of
the local rows and columns, or a table of the local rows and the columns of all ranks. Local batches may differ in size.

- GatherExchange: each rank holds its rows and all columns. One collective in each direction; memory grows with the
  global batch.
- RingExchange: columns and their gradient sums pass from rank to rank. Each rank holds at most two local batches of
  columns.

All communication happens in the forward pass, so all ranks must need the same gradients.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vitrail.objectives.contrastive_gradients import MergeOp, VisitFn

GradientReduction = Literal["mean", "sum"]

# Newer torch versions deprecate the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_with_gradient(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather x (N, …) of all ranks in order, with gradients: each rank gets the sum of all ranks' gradients.

    For other losses over the global batch. Ranks may have different numbers of rows.
    """
    return _GatherFunction.apply(x, GatherExchange(x, "sum", group))


class _GatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, column_exchange: "GatherExchange") -> Tensor:
        ctx.column_exchange = column_exchange
        return column_exchange.all_gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore
        return ctx.column_exchange.reduce_to_owner(gradient.contiguous(), "sum"), None


class DistributedExchange:
    """Base class of exchanges between ranks. Rank r owns `sizes[r]` columns, from column `starts[r]` on.

    columns             the columns of this rank
    gradient_reduction  how gradients are later reduced over ranks: "mean" (DDP, FSDP) multiplies them by the number of
                        ranks, "sum" does not
    """

    def __init__(
        self, columns: Tensor, gradient_reduction: GradientReduction = "mean", group: dist.ProcessGroup | None = None
    ):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.gradient_scale = float(self.ranks) if gradient_reduction == "mean" else 1.0
        sizes = torch.zeros(self.ranks, dtype=torch.long, device=columns.device)
        sizes[self.rank] = len(columns)
        dist.all_reduce(sizes, group=group)
        self.sizes: list[int] = sizes.tolist()
        self.starts = [sum(self.sizes[:r]) for r in range(self.ranks)]
        self.first_column = self.starts[self.rank]

    def count_columns(self, v: Tensor) -> int:
        return sum(self.sizes)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x


class GatherExchange(DistributedExchange):
    """Exchange that gathers all columns on every rank."""

    def visit_columns(
        self, visit: VisitFn, inputs: list[Tensor], accumulators: list[Tensor], merge_ops: list[MergeOp]
    ) -> list[Tensor]:
        starts = {"sum": 0.0, "logaddexp": -torch.inf}
        merge_ops = merge_ops[: len(accumulators)]
        sums = [
            x.new_full((sum(self.sizes), *x.shape[1:]), starts[merge_op])
            for x, merge_op in zip(accumulators, merge_ops, strict=True)
        ]
        visit(0, [self.all_gather(x) for x in inputs], sums)
        return [self.reduce_to_owner(x, merge_op) for x, merge_op in zip(sums, merge_ops, strict=True)]

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate x of all ranks in order."""
        longest = max(self.sizes)
        out = x.new_empty(self.ranks * longest, *x.shape[1:])
        _all_gather(out, _pad_rows(x, longest), group=self.group)
        if min(self.sizes) == longest:
            return out
        return torch.cat([part[:size] for part, size in zip(out.split(longest), self.sizes, strict=True)])

    def reduce_to_owner(self, x: Tensor, merge_op: MergeOp) -> Tensor:
        """Merge the results of all ranks for this rank's columns."""
        longest = max(self.sizes)
        x = x if min(self.sizes) == longest else torch.cat([_pad_rows(part, longest) for part in x.split(self.sizes)])
        if merge_op == "sum":
            out = x.new_empty(longest, *x.shape[1:])
            _reduce_scatter(out, x, group=self.group)
        else:
            parts = torch.empty_like(x)
            dist.all_to_all_single(parts, x, group=self.group)
            out = parts.view(self.ranks, longest).logsumexp(0)
        return out[: self.sizes[self.rank]]


def _pad_rows(x: Tensor, length: int) -> Tensor:
    """Pad with zero rows, so that all ranks send equal sizes."""
    return F.pad(x, [0, 0] * (x.ndim - 1) + [0, length - len(x)]) if len(x) < length else x.contiguous()


class RingExchange(DistributedExchange):
    """Exchange that passes columns from rank to rank."""

    def visit_columns(
        self, visit: VisitFn, inputs: list[Tensor], accumulators: list[Tensor], merge_ops: list[MergeOp]
    ) -> list[Tensor]:
        for step in range(self.ranks):
            owner, next_owner = (self.rank - step) % self.ranks, (self.rank - step - 1) % self.ranks
            # Inputs are sent while they are processed; after the last step nobody needs them.
            incoming = self._send_to_next(inputs if step < self.ranks - 1 else [], self.sizes[next_owner])
            visit(self.starts[owner], inputs, accumulators)
            inputs = _wait_for(incoming)
            accumulators = _wait_for(self._send_to_next(accumulators, self.sizes[next_owner]))
        return accumulators

    def _send_to_next(self, tensors: list[Tensor], count: int) -> tuple[list[Tensor], list[dist.Work]]:
        """Send tensors to the next rank and receive those of the previous rank, which has `count` columns."""
        if self.ranks == 1:
            return tensors, []
        to, source = ((self.rank + d) % self.ranks for d in (1, -1))
        incoming = [x.new_empty(count, *x.shape[1:]) for x in tensors]
        operations = []
        for x, new in zip(tensors, incoming, strict=True):
            operations.append(dist.P2POp(dist.isend, x.contiguous(), group=self.group, group_peer=to))
            operations.append(dist.P2POp(dist.irecv, new, group=self.group, group_peer=source))
        return incoming, dist.batch_isend_irecv(operations) if operations else []


def _wait_for(transfer: tuple[list[Tensor], list[dist.Work]]) -> list[Tensor]:
    """Wait for the transfers and return the tensors."""
    for work in transfer[1]:
        work.wait()
    return transfer[0]
