"""Norms by name."""

from typing import Literal

from torch import nn

Norm = Literal["layer", "rms"]


def make_norm(kind: Norm, width: int, eps: float) -> nn.Module:
    return nn.LayerNorm(width, eps=eps) if kind == "layer" else nn.RMSNorm(width, eps=eps)
