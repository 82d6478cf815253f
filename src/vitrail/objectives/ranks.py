"""CLIP's and SigLIP's losses of a batch that many processes share: equal to one process with the whole batch.

Every rank gives its own u, v and labels and gets the loss of the whole; batches may be of unequal size. Columns meet
rows in one of two forms:

- gathered: every rank holds all columns, and its own rows. One exchange each way; memory grows with the whole batch.
- ring: the columns go around, from rank to rank, with what was summed for them. Nobody holds more than two shares.

All communication is in the forward pass, so all ranks must need the same gradients.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.objectives.contrastive import checked, scalar, settled
from vitrail.objectives.pairs import Labels, Pairs
from vitrail.objectives.whole import Meeting, See, Unite, run_clip, run_siglip

Form = Literal["gathered", "ring"]
Reduce = Literal["mean", "sum"]

# Where torch has the newer names, the older ones warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def clip_loss(
    u: Tensor,
    v: Tensor,
    scale: Tensor | float,
    labels: Labels = None,
    *,
    form: Form = "gathered",
    reduce: Reduce = "mean",
    group: dist.ProcessGroup | None = None,
    tile: int | None = None,
) -> Tensor:
    """`objectives.clip_loss` of the whole batch, on every rank.

    `reduce` says what will become of the gradients of the weights: DDP and FSDP take their mean over the ranks, so each
    rank's are those of its part of the batch times the number of ranks; with "sum" they are not multiplied. Ids are
    those of the rank's rows and columns; a table has its rows, and the columns of all ranks in order.
    """
    meeting, u, v, scale, pairs = _met(u, v, scale, labels, form, reduce, group)
    return settled(lambda batch: run_clip(batch, pairs, meeting, tile), u, v, scale)


def siglip_loss(
    u: Tensor,
    v: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    labels: Labels = None,
    *,
    form: Form = "ring",
    reduce: Reduce = "mean",
    group: dist.ProcessGroup | None = None,
    tile: int | None = None,
) -> Tensor:
    """`objectives.siglip_loss` of the whole batch, on every rank; the rest as in `clip_loss`."""
    meeting, u, v, scale, pairs = _met(u, v, scale, labels, form, reduce, group)
    return settled(lambda batch: run_siglip(batch, pairs, meeting, tile), u, v, scale, scalar("bias", bias, u))


def gather(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """x (N, …) of every rank, in order, with its gradient: each rank's are summed over what all ranks make of it. For
    losses that compare in a way of their own; they may be of unequal numbers of rows."""
    return _Gather.apply(x, Gathered(len(x), "sum", group, x.device))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, meeting: "Gathered") -> Tensor:
        ctx.meeting = meeting
        return meeting.all(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore
        return ctx.meeting.own(gradient.contiguous(), "sum"), None


def _met(
    u: Tensor,
    v: Tensor,
    scale: Tensor | float,
    labels: Labels,
    form: Form,
    reduce: Reduce,
    group: dist.ProcessGroup | None,
) -> tuple[Meeting, Tensor, Tensor, Tensor, Pairs]:
    if form not in FORMS:
        raise ConfigError(f"columns cannot meet rows in the form {form!r}", f"known: {', '.join(FORMS)}")
    meeting = FORMS[form](len(v), reduce, group, v.device)
    columns = sum(meeting.sizes) if isinstance(labels, Tensor) else None
    u, v, scale, pairs = checked(u, v, scale, labels, columns)
    return meeting, u, v, scale, pairs._replace(shift=meeting.starts[meeting.rank])


class Across:
    """Many processes, each with some columns: rank r has `sizes[r]` of them, from number `starts[r]` on."""

    def __init__(self, count: int, reduce: Reduce, group: dist.ProcessGroup | None, device: torch.device):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.weight = float(self.ranks) if reduce == "mean" else 1.0
        sizes = torch.zeros(self.ranks, dtype=torch.long, device=device)
        sizes[self.rank] = count
        dist.all_reduce(sizes, group=group)
        self.sizes: list[int] = sizes.tolist()
        self.starts = [sum(self.sizes[:r]) for r in range(self.ranks)]

    def total(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x


class Gathered(Across):
    def around(self, see: See, given: list[Tensor], kept: list[Tensor], unite: list[Unite]) -> list[Tensor]:
        starts = {"sum": 0.0, "logaddexp": -torch.inf}
        unite = unite[: len(kept)]
        sums = [x.new_full((sum(self.sizes), *x.shape[1:]), starts[how]) for x, how in zip(kept, unite, strict=True)]
        see(0, [self.all(x) for x in given], sums)
        return [self.own(x, how) for x, how in zip(sums, unite, strict=True)]

    def all(self, x: Tensor) -> Tensor:
        """What the ranks have, in order."""
        longest = max(self.sizes)
        out = x.new_empty(self.ranks * longest, *x.shape[1:])
        _all_gather(out, _filled(x, longest), group=self.group)
        if min(self.sizes) == longest:
            return out
        return torch.cat([part[:size] for part, size in zip(out.split(longest), self.sizes, strict=True)])

    def own(self, x: Tensor, how: Unite) -> Tensor:
        """The ranks' shares of this rank's columns, united."""
        longest = max(self.sizes)
        x = x if min(self.sizes) == longest else torch.cat([_filled(part, longest) for part in x.split(self.sizes)])
        if how == "sum":
            out = x.new_empty(longest, *x.shape[1:])
            _reduce_scatter(out, x, group=self.group)
        else:
            shares = torch.empty_like(x)
            dist.all_to_all_single(shares, x, group=self.group)
            out = shares.view(self.ranks, longest).logsumexp(0)
        return out[: self.sizes[self.rank]]


def _filled(x: Tensor, length: int) -> Tensor:
    """With zeros at the end, so that all ranks send alike."""
    return F.pad(x, [0, 0] * (x.ndim - 1) + [0, length - len(x)]) if len(x) < length else x.contiguous()


class Ring(Across):
    def around(self, see: See, given: list[Tensor], kept: list[Tensor], unite: list[Unite]) -> list[Tensor]:
        for step in range(self.ranks):
            owner, next_owner = (self.rank - step) % self.ranks, (self.rank - step - 1) % self.ranks
            # What is only read travels on while it is read; after the last look nobody needs it.
            coming = self._pass(given if step < self.ranks - 1 else [], self.sizes[next_owner])
            see(self.starts[owner], given, kept)
            given = _arrived(coming)
            kept = _arrived(self._pass(kept, self.sizes[next_owner]))
        return kept

    def _pass(self, tensors: list[Tensor], count: int) -> tuple[list[Tensor], list[dist.Work]]:
        """To the next rank, and from the one before, which has `count` columns."""
        if self.ranks == 1:
            return tensors, []
        to, source = ((self.rank + d) % self.ranks for d in (1, -1))
        coming = [x.new_empty(count, *x.shape[1:]) for x in tensors]
        operations = []
        for x, new in zip(tensors, coming, strict=True):
            operations.append(dist.P2POp(dist.isend, x.contiguous(), group=self.group, group_peer=to))
            operations.append(dist.P2POp(dist.irecv, new, group=self.group, group_peer=source))
        return coming, dist.batch_isend_irecv(operations) if operations else []


def _arrived(coming: tuple[list[Tensor], list[dist.Work]]) -> list[Tensor]:
    for work in coming[1]:
        work.wait()
    return coming[0]


FORMS = {"gathered": Gathered, "ring": Ring}
