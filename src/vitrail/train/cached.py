"""Gradient caching: the gradients of a contrastive loss over a whole batch, with the encoders run in chunks.

The embeddings of all chunks are computed without a graph; the loss over them gives the gradient of each; then every
chunk runs once more, with a graph, and carries its share into the weights. That is exact, dropout too, because a chunk
draws the same random numbers both times. It costs a second forward pass, and the memory of one chunk.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ConfigError

Encode = Callable[[Any], Tensor]


def cached_backward(
    loss: Callable[[Tensor, Tensor], Tensor],
    encode_u: Encode,
    chunks_u: Sequence[Any],
    encode_v: Encode,
    chunks_v: Sequence[Any],
) -> Tensor:
    """Add to all weights the gradients of `loss(u, v)`, of which u (N, D) and v (M, D) are the rows of all chunks.

    `loss` may have weights of its own, such as a scale and a bias. → the loss, detached. A layer that changes with each
    call, such as batch norm in training, sees every chunk twice.
    """
    if not chunks_u or not chunks_v:
        raise ConfigError("a batch without chunks has no embeddings", "give each encoder at least one chunk")
    towers = [[_Run(encode_u, chunk) for chunk in chunks_u], [_Run(encode_v, chunk) for chunk in chunks_v]]
    u, v = (torch.cat([run.out for run in runs]).requires_grad_() for runs in towers)
    value = loss(u, v)
    value.backward()
    for x, runs in zip((u, v), towers, strict=True):
        if x.grad is not None:
            for run, gradient in zip(runs, x.grad.split([len(run.out) for run in runs]), strict=True):
                run.again(gradient)
    return value.detach()


class _Run:
    """A chunk through its encoder, and where the random numbers stood before."""

    def __init__(self, encode: Encode, chunk: Any):
        self.encode, self.chunk = encode, chunk
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        with torch.no_grad():
            self.out = encode(chunk)

    def again(self, gradient: Tensor) -> None:
        with torch.random.fork_rng([] if self.cuda is None else [torch.cuda.current_device()]):
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda)
            out = self.encode(self.chunk)
            if out.requires_grad:  # what is frozen learns nothing
                out.backward(gradient)
