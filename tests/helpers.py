"""What several test files use."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn


def relative(ours: Tensor, reference: Tensor) -> float:
    """max |Δ| / max |reference|"""
    return ((ours - reference).abs().max() / reference.abs().max().clamp_min(1e-30)).item()


def randomize(module: nn.Module, seed: int = 0, spread: float = 0.2) -> nn.Module:
    """Draw every parameter at random, so that no initial zero or one hides an error."""
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


def interpreted(script: str, *arguments: str) -> None:
    """Run a script that ends with printing "agreed", Triton's kernels by its interpreter, in a process of its own."""
    source = str(Path(__file__).parents[1] / "src")
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *arguments]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "agreed" in out.stdout, out.stderr[-2000:]
