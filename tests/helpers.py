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


def compile_kernel(kernel, pointers, numbers, constants, target, source) -> None:
    """Compile a Triton kernel for a GPU that need not be there. The pointers have the names of its arguments."""
    import triton

    signature = {f"{name}_ptr": kind for name, kind in pointers.items()} | numbers
    signature |= dict.fromkeys(constants, "constexpr")
    ordered = {name: signature[name] for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    triton.compile(source(fn=kernel, signature=ordered, constexprs=fixed), target=target)
