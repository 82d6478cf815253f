"""Where the piece of a tensor that a rank holds lies in the whole of it.

A box is a range of indices along every axis; the box of a scalar has none.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

Box = tuple[range, ...]


class Piece(NamedTuple):
    """What this rank holds of a tensor. Of ranks that hold the same, one `keeps` it for them all."""

    shape: tuple[int, ...]
    box: Box
    numbers: Tensor
    keeps: bool


def piece(tensor: Tensor, rank: int) -> Piece:
    """The live numbers that `rank`, the one that asks, holds; an ordinary tensor is whole on every rank."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Piece(shape, whole(shape), tensor.detach(), rank == 0)
    mesh, placements = tensor.device_mesh, tensor.placements
    where = mesh.get_coordinate()
    assert where is not None, "a rank outside a tensor's mesh holds nothing of it"
    cuts = [(p.dim, mesh.size(i), where[i]) for i, p in enumerate(placements) if isinstance(p, Shard)]
    box, numbers = cut(shape, cuts), tensor.to_local().detach()
    assert sizes(box) == tuple(numbers.shape), f"{placements} shares {shape} out in another way than by chunks"
    return Piece(
        shape, box, numbers, all(isinstance(p, Shard) or w == 0 for p, w in zip(placements, where, strict=True))
    )


def whole(shape: Sequence[int]) -> Box:
    return tuple(range(n) for n in shape)


def cut(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Box:
    """The box left by cuts of (axis, parts, which part), as `torch.chunk` cuts: the last may be small or empty."""
    box = list(whole(shape))
    for axis, parts, which in cuts:
        rows = box[axis]
        chunk = -(-len(rows) // parts)
        box[axis] = range(rows.start + min(which * chunk, len(rows)), rows.start + min((which + 1) * chunk, len(rows)))
    return tuple(box)


def sizes(box: Box) -> tuple[int, ...]:
    return tuple(len(rows) for rows in box)


def volume(box: Box) -> int:
    return prod(sizes(box))


def shared(a: Box, b: Box) -> Box:
    """What lies in both."""
    starts = [max(x.start, y.start) for x, y in zip(a, b, strict=True)]
    return tuple(range(start, max(start, min(x.stop, y.stop))) for start, x, y in zip(starts, a, b, strict=True))


def inside(part: Box, box: Box) -> tuple[slice, ...]:
    """Where a part of a box lies, counted from the box's own corner."""
    return tuple(slice(p.start - b.start, p.stop - b.start) for p, b in zip(part, box, strict=True))
