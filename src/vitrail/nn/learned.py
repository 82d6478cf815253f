"""Learned vectors that are no layer."""

import torch
from torch import nn


def small(*shape: int) -> nn.Parameter:
    """A vector or a table, started small."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(*shape), std=0.02))


def weigh(*parts: nn.Module | nn.Parameter | None) -> int:
    """Bytes of some parts of a model."""
    weights = (part.parameters() if isinstance(part, nn.Module) else [part] for part in parts if part is not None)
    return sum(p.numel() * p.element_size() for some in weights for p in some)
