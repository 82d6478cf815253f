"""Weights in a quarter of their size: whole numbers of 8 bits, with one scale a row. For models that ship or travel.

A tensor of two axes or more is stored as int8, and beside it `NAME:scale`, float32; vectors are stored as float32, as
matrices come back.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.hub.files import Weights

SCALE = ":scale"


def packed(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if tensor.ndim < 2 or not tensor.is_floating_point():
            yield name, tensor.float() if tensor.is_floating_point() else tensor
            continue
        rows = tensor.detach().float().flatten(1)
        if not bool(rows.isfinite().all()):
            raise CheckpointError(f"tensor {name!r} holds what is no number", "save it whole, and see what went wrong")
        scale = rows.abs().amax(1, keepdim=True) / 127 if rows.shape[1] else rows.new_zeros(len(rows), 1)
        whole = torch.where(scale > 0, rows / scale, 0).round().clamp(-127, 127).to(torch.int8)
        yield name, whole.view(tensor.shape)
        yield name + SCALE, scale[:, 0]


def unpacked(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a folder, those that were packed as float32."""
    for name in weights:
        if name.endswith(SCALE):
            if name.removesuffix(SCALE) not in weights:
                raise CheckpointError(f"{weights.path} has {name!r} and not the tensor it belongs to", "fetch it again")
            continue
        tensor = weights[name]
        if name + SCALE not in weights:
            if tensor.dtype == torch.int8:
                raise CheckpointError(f"tensor {name!r} of {weights.path} is packed and has no scale", "fetch it again")
            yield name, tensor
            continue
        scale = weights[name + SCALE].float()
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            raise CheckpointError(f"the scale of {name!r} in {weights.path} is no number", "fetch it again")
        if tensor.dtype != torch.int8 or scale.shape != tensor.shape[:1]:
            raise CheckpointError(
                f"tensor {name!r} of {weights.path} is {tuple(tensor.shape)} and its scale {tuple(scale.shape)}",
                "fetch it again",
            )
        yield name, tensor.float() * scale.view(-1, *[1] * (tensor.ndim - 1))
