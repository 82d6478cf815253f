"""Checkpoint maps: lists of reversible moves, so that export is import read backwards.

A map pairs our tensor names with theirs. Reading runs `pull` over every move, writing runs `push`; a name that no move
mentions is an error on either side, never a silent leftover.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import CheckpointError


class Move(NamedTuple):
    """One step between their tensors and ours."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    pull: Callable[[list[Tensor]], list[Tensor]]  # theirs → ours
    push: Callable[[list[Tensor]], list[Tensor]]  # ours → theirs


def rename(ours: str, theirs: str) -> Move:
    return Move((ours,), (theirs,), list, list)


def layer(ours: str, theirs: str, bias: bool = True) -> list[Move]:
    """The weight, and perhaps the bias, of a linear layer or a norm."""
    return [rename(f"{ours}.{part}", f"{theirs}.{part}") for part in (("weight", "bias") if bias else ("weight",))]


def fuse(ours: str, theirs: Sequence[str], sizes: Sequence[int]) -> Move:
    """One of ours is several of theirs, rows below rows."""

    def pull(tensors: list[Tensor]) -> list[Tensor]:
        for name, tensor, size in zip(theirs, tensors, sizes, strict=True):
            if tensor.shape[0] != size:
                raise CheckpointError(f"tensor {name!r} has {tensor.shape[0]} rows, the config says {size}")
        return [torch.cat(tensors)]

    return Move((ours,), tuple(theirs), pull, lambda tensors: list(tensors[0].split(list(sizes))))


def fuse_layer(ours: str, theirs: Sequence[str], sizes: Sequence[int], bias: bool = True) -> list[Move]:
    """`fuse` for the weight, and perhaps the bias, of linear layers."""
    parts = ("weight", "bias") if bias else ("weight",)
    return [fuse(f"{ours}.{part}", [f"{name}.{part}" for name in theirs], sizes) for part in parts]


def split(ours: Sequence[str], theirs: str, sizes: Sequence[int]) -> Move:
    """Several of ours are one of theirs, rows below rows."""
    whole = fuse(theirs, ours, sizes)
    return Move(tuple(ours), (theirs,), whole.push, whole.pull)


def reshape(ours: str, theirs: str, shape: Sequence[int]) -> Move:
    """Theirs has `shape`; ours is theirs flattened after the first axis: a convolution as a matrix."""
    shape = tuple(shape)

    def pull(tensors: list[Tensor]) -> list[Tensor]:
        if tuple(tensors[0].shape) != shape:
            raise CheckpointError(f"tensor {theirs!r} has shape {tuple(tensors[0].shape)}, the config says {shape}")
        return [tensors[0].flatten(1)]

    def push(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].reshape(shape)]

    return Move((ours,), (theirs,), pull, push)


def view(ours: str, theirs: str, ours_shape: Sequence[int], theirs_shape: Sequence[int]) -> Move:
    """The same numbers in another shape."""

    def to(shape: Sequence[int], name: str) -> Callable[[list[Tensor]], list[Tensor]]:
        def run(tensors: list[Tensor]) -> list[Tensor]:
            if tensors[0].numel() != torch.Size(shape).numel():
                raise CheckpointError(f"tensor {name!r} has shape {tuple(tensors[0].shape)}, not {tuple(shape)}")
            return [tensors[0].reshape(tuple(shape))]

        return run

    return Move((ours,), (theirs,), to(ours_shape, theirs), to(theirs_shape, ours))


def experts(ours: str, theirs: Sequence[Sequence[str]], sizes: Sequence[int]) -> Move:
    """One of ours stacks, over experts, the fused matrices of each: theirs[expert][part]."""
    flat = tuple(name for parts in theirs for name in parts)
    each = len(theirs[0])

    def pull(tensors: list[Tensor]) -> list[Tensor]:
        fused = [fuse(ours, parts, sizes).pull(tensors[i * each : (i + 1) * each]) for i, parts in enumerate(theirs)]
        return [torch.stack([one for (one,) in fused])]

    def push(tensors: list[Tensor]) -> list[Tensor]:
        return [piece for one in tensors[0] for piece in one.split(list(sizes))]

    return Move((ours,), flat, pull, push)


def stack(ours: str, theirs: Sequence[str]) -> Move:
    """One of ours is several of theirs under a new first axis."""
    return Move((ours,), tuple(theirs), lambda tensors: [torch.stack(tensors)], lambda tensors: list(tensors[0]))


def under(ours: str, theirs: str, moves: Iterable[Move]) -> list[Move]:
    """The same moves below a prefix on either side."""
    return [
        move._replace(
            ours=tuple(ours + name for name in move.ours), theirs=tuple(theirs + name for name in move.theirs)
        )
        for move in moves
    ]
