"""Int8 weights with one scale for each row: a quarter of the size, for bundled models.

A tensor with two or more axes is stored as int8 with a float32 tensor `NAME:scale`. Vectors are stored as float32.
Dequantized tensors are float32.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.hub.safetensors_files import SafetensorsWeights

SCALE_SUFFIX = ":scale"


def quantize_tensors(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as they are stored: int8 values and their scales."""
    for name, tensor in tensors:
        if tensor.ndim < 2 or not tensor.is_floating_point():
            yield name, tensor.float() if tensor.is_floating_point() else tensor
            continue
        rows = tensor.detach().float().flatten(1)
        if not bool(rows.isfinite().all()):
            raise CheckpointError(
                f"tensor {name!r} contains NaN or infinite values", "save it without int8 and check the training"
            )
        scale = rows.abs().amax(1, keepdim=True) / 127 if rows.shape[1] else rows.new_zeros(len(rows), 1)
        quantized = torch.where(scale > 0, rows / scale, 0).round().clamp(-127, 127).to(torch.int8)
        yield name, quantized.view(tensor.shape)
        yield name + SCALE_SUFFIX, scale[:, 0]


def dequantize_tensors(weights: SafetensorsWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a folder; int8 tensors become float32."""
    for name in weights:
        if name.endswith(SCALE_SUFFIX):
            if name.removesuffix(SCALE_SUFFIX) not in weights:
                raise CheckpointError(f"{weights.path} has {name!r} without its tensor", "download it again")
            continue
        tensor = weights[name]
        if name + SCALE_SUFFIX not in weights:
            if tensor.dtype == torch.int8:
                raise CheckpointError(
                    f"tensor {name!r} of {weights.path} is int8 and has no scale", "download it again"
                )
            yield name, tensor
            continue
        scale = weights[name + SCALE_SUFFIX].float()
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            raise CheckpointError(
                f"the scale of {name!r} in {weights.path} is negative, NaN or infinite", "download it again"
            )
        if tensor.dtype != torch.int8 or scale.shape != tensor.shape[:1]:
            raise CheckpointError(
                f"tensor {name!r} of {weights.path} has shape {tuple(tensor.shape)}, its scale {tuple(scale.shape)}",
                "download it again",
            )
        yield name, tensor.float() * scale.view(-1, *[1] * (tensor.ndim - 1))
