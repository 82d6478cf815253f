"""Base classes of fusion points.

Shapes: B batch, L tokens, W width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError, StreamError
from vitrail.nn import KVCache
from vitrail.nn.attention import LayerRouter, apply_shared_layer


class FusionPass:
    """One decoder pass of a fusion point; this base class has no images and changes nothing.

    Point i is before layer i; the last point is after all layers.
    """

    def apply_at(self, point: int, x: Tensor) -> Tensor:
        """Return the tokens x (B, L, W) after a point."""
        return x

    def route(self, layer: int) -> LayerRouter:
        """Return the function that applies the weights of a layer to tokens."""
        return apply_shared_layer


class FusionPoint(nn.Module):
    """Base class of the modules that a fusion adds to a decoder, as its part `fusion`."""

    def start_pass(self, x: Tensor, inputs: Any, cache: KVCache | None) -> FusionPass:
        """Prepare a pass of tokens x (B, L, W)."""
        raise NotImplementedError


def check_fusion_layers(kind: str, layer_indices: tuple[int, ...], num_layers: int) -> None:
    if (
        not layer_indices
        or len(set(layer_indices)) != len(layer_indices)
        or min(layer_indices) < 0
        or max(layer_indices) >= num_layers
    ):
        raise ConfigError(
            f"{kind} layer_indices {layer_indices} are not layers of the decoder",
            f"give at least one index from 0 to {num_layers - 1}, each once",
        )


def check_inputs_type(inputs: Any, expected: type) -> None:
    if not isinstance(inputs, expected):
        raise ConfigError(
            f"fusion_inputs are {type(inputs).__name__}, but this decoder needs {expected.__name__}",
            f"give {expected.__name__}",
        )


def flatten_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Flatten an image mask (B, L) of tokens x (B, L, W) to (B·L,); raise if it does not match."""
    if mask.shape != x.shape[:2] or mask.dtype != torch.bool:
        raise StreamError(
            f"the image mask is {mask.dtype} {tuple(mask.shape)}, but tokens are {tuple(x.shape[:2])}",
            "give a boolean mask (rows, tokens)",
        )
    return mask.flatten()
