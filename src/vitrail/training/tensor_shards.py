"""Location of a rank's shard inside a tensor.

A box is a range of indices along every axis; the box of a scalar is empty.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

Box = tuple[range, ...]


class TensorShard(NamedTuple):
    """Local part of a tensor. If several ranks hold the same part, `is_writer` is True on one of them."""

    shape: tuple[int, ...]
    box: Box
    values: Tensor
    is_writer: bool


def get_local_shard(tensor: Tensor, rank: int) -> TensorShard:
    """Return the shard of the calling rank, without a copy. A tensor that is no DTensor is whole on every rank."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return TensorShard(shape, full_box(shape), tensor.detach(), rank == 0)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the tensor's device mesh"
    cuts = [(p.dim, mesh.size(i), coordinate[i]) for i, p in enumerate(placements) if isinstance(p, Shard)]
    box, numbers = shard_box(shape, cuts), tensor.to_local().detach()
    assert box_shape(box) == tuple(numbers.shape), f"placements {placements} of {shape} are not shards by torch.chunk"
    return TensorShard(
        shape, box, numbers, all(isinstance(p, Shard) or w == 0 for p, w in zip(placements, coordinate, strict=True))
    )


def replace_parameters(module: nn.Module, replace: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter of a module, in place. Modules that share one must get the same new one."""
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = replace(parameter)


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple(range(n) for n in shape)


def shard_box(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Box:
    """Return the box after cuts (axis, parts, index) as `torch.chunk` makes them: the last may be small or empty."""
    box = list(full_box(shape))
    for axis, parts, index in cuts:
        rows = box[axis]
        chunk = -(-len(rows) // parts)
        box[axis] = range(rows.start + min(index * chunk, len(rows)), rows.start + min((index + 1) * chunk, len(rows)))
    return tuple(box)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(len(rows) for rows in box)


def box_numel(box: Box) -> int:
    """Return the number of elements of a box."""
    return prod(box_shape(box))


def intersect_boxes(a: Box, b: Box) -> Box:
    """Return the intersection of two boxes."""
    starts = [max(x.start, y.start) for x, y in zip(a, b, strict=True)]
    return tuple(range(start, max(start, min(x.stop, y.stop))) for start, x, y in zip(starts, a, b, strict=True))


def relative_slices(part: Box, box: Box) -> tuple[slice, ...]:
    """Return the slices of a part relative to the start of its box."""
    return tuple(slice(p.start - b.start, p.stop - b.start) for p, b in zip(part, box, strict=True))
