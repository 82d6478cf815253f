"""What several test files use."""

import torch
from torch import Tensor, nn


def relative(ours: Tensor, reference: Tensor) -> float:
    """max |Δ| / max |reference|"""
    return ((ours - reference).abs().max() / reference.abs().max().clamp_min(1e-30)).item()


def randomize(module: nn.Module, seed: int = 0, spread: float = 0.2) -> nn.Module:
    """Every parameter drawn anew, so that none is hidden by a zero or one it started with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * spread + (1.0 if p.ndim == 1 else 0.0) * spread)
    return module


def put(linear: nn.Module, *sources: nn.Module) -> None:
    """Fuse the rows of the sources into one linear layer."""
    with torch.no_grad():
        linear.weight.copy_(torch.cat([s.weight for s in sources]))
        if linear.bias is not None:
            linear.bias.copy_(torch.cat([s.bias for s in sources]))
