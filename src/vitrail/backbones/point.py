"""What every fusion point is to its decoder.

B batch, L tokens, W width
"""

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError, StreamError
from vitrail.nn import KVCache
from vitrail.nn.attention import Route, shared


class Sight:
    """One pass of a decoder and what its pictures do in it: here nothing, for there are none. Point i lies before layer
    i, the last one after all layers."""

    def at(self, point: int, x: Tensor) -> Tensor:
        """The tokens x (B, L, W) as they leave a point."""
        return x

    def route(self, layer: int) -> Route:
        """How tokens go through the weights of a layer."""
        return shared


class FusionPoint(nn.Module):
    """What a fusion adds to a decoder: all of it is here, and so has the name `fusion` there."""

    def start(self, x: Tensor, pictures: Any, cache: KVCache | None) -> Sight:
        """Make ready for a pass of tokens x (B, L, W)."""
        raise NotImplementedError


def check_layers(kind: str, named: tuple[int, ...], layers: int) -> None:
    if not named or len(set(named)) != len(named) or min(named) < 0 or max(named) >= layers:
        raise ConfigError(
            f"{kind} layers {named} are not layers of the decoder",
            f"name at least one, each once, of 0 to {layers - 1}",
        )


def refuse_other(pictures: Any, kind: type) -> None:
    if not isinstance(pictures, kind):
        raise ConfigError(
            f"this decoder takes its pictures as {kind.__name__}, not as {type(pictures).__name__}",
            "give what its kind of fusion needs",
        )


def flat_mask(mask: Tensor, x: Tensor) -> Tensor:
    """mask (B, L) → (B·L,), refused where it does not tell tokens x (B, L, W) apart"""
    if mask.shape != x.shape[:2] or mask.dtype != torch.bool:
        raise StreamError(
            f"a mask of {mask.dtype} {tuple(mask.shape)} does not tell pictures among {tuple(x.shape[:2])} tokens",
            "give booleans (rows, tokens)",
        )
    return mask.flatten()


def size(module: nn.Module) -> int:
    """Bytes of its weights."""
    return sum(p.numel() * p.element_size() for p in module.parameters())
