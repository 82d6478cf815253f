"""Gradient cache: gradients of a contrastive loss over a large batch, with encoders that run in chunks.

A first pass computes the embeddings of all chunks without a graph. The loss gives the gradient of each embedding. Each
chunk then runs again with a graph and backpropagates its gradients. The result is exact, also with dropout, because a
chunk draws the same random numbers both times. The cost is a second forward pass and the memory of one chunk.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ConfigError

EncodeFn = Callable[[Any], Tensor]


def run_cached_backward(
    loss: Callable[[Tensor, Tensor], Tensor],
    encode_u: EncodeFn,
    chunks_u: Sequence[Any],
    encode_v: EncodeFn,
    chunks_v: Sequence[Any],
) -> Tensor:
    """Backpropagate `loss(u, v)` into all weights, where u (N, D) and v (M, D) are the embeddings of all chunks.

    `loss` may have parameters, such as a scale and a bias. Returns the detached loss. A layer with state, such as batch
    norm in training mode, processes every chunk twice.
    """
    if not chunks_u or not chunks_v:
        raise ConfigError("an encoder has no chunks", "give each encoder at least one chunk")
    towers = [[_ChunkRun(encode_u, chunk) for chunk in chunks_u], [_ChunkRun(encode_v, chunk) for chunk in chunks_v]]
    u, v = (torch.cat([run.output for run in runs]).requires_grad_() for runs in towers)
    value = loss(u, v)
    value.backward()
    for x, runs in zip((u, v), towers, strict=True):
        if x.grad is not None:
            for run, gradient in zip(runs, x.grad.split([len(run.output) for run in runs]), strict=True):
                run.backward(gradient)
    return value.detach()


class _ChunkRun:
    """One chunk, its embeddings, and the random state before its forward pass."""

    def __init__(self, encode: EncodeFn, chunk: Any):
        self.encode, self.chunk = encode, chunk
        self.cpu_rng_state = torch.get_rng_state()
        self.cuda_rng_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        with torch.no_grad():
            self.output = encode(chunk)

    def backward(self, gradient: Tensor) -> None:
        with torch.random.fork_rng([] if self.cuda_rng_state is None else [torch.cuda.current_device()]):
            torch.set_rng_state(self.cpu_rng_state)
            if self.cuda_rng_state is not None:
                torch.cuda.set_rng_state(self.cuda_rng_state)
            out = self.encode(self.chunk)
            if out.requires_grad:  # a frozen encoder has no graph
                out.backward(gradient)
