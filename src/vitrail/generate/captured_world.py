"""Frames of a world on a GPU, each one launch: its passes, its memory and its pixels are one CUDA graph.

B rows, N codes of a frame
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError, DataError
from vitrail.generate.captured import Pinned, graph_of
from vitrail.generate.rollout import Rolling, Rollout
from vitrail.models.genie import Genie
from vitrail.nn import FrameRing, Frames


class Recorded(NamedTuple):
    """A graph, where it reads (what led to the frame, chance, the codes' table) and writes (pixels and ids)."""

    graph: torch.cuda.CUDAGraph
    reads: tuple[Tensor, Tensor, Tensor]
    writes: tuple[Tensor, Tensor]
    memory: tuple[Frames, Frames]
    weights: Pinned


class CapturedRollout(Rollout):
    """A rollout that is recorded when its memory is full, and replayed from then on, after another start too.

    Until then frames are drawn as ever. `compiled` fuses the small operations of a block first, which takes some
    seconds, once.
    """

    def __init__(self, model: Genie, rolling: Rolling | None = None, *, compiled: bool = False):
        super().__init__(model, rolling)
        if reason := unfit(model):
            raise ConfigError(f"no frame can be captured: {reason}", "use Rollout")
        self.compiled = compiled
        self._recorded: Recorded | None = None

    def start(self, frames: Tensor, actions: Tensor | None = None, seed: int | None = None) -> Tensor:
        size = self.model.codec.size
        if tuple(frames.shape[-2:]) != size:  # a graph is of one grid, and others may have as many codes
            raise DataError(f"frames of {tuple(frames.shape[-2:])} pixels", f"the model's are {size}, or use Rollout")
        return super().start(frames, actions, seed)

    def _next(self, led: Tensor, chance: Tensor) -> Tensor:
        given = led, chance, self.codes
        if not (isinstance(self.past, FrameRing) and isinstance(self.shown, FrameRing)):
            return super()._next(led, chance)
        if self._recorded is None or not self._fits(self._recorded, given):
            self._recorded = self._record(given)
        found = self._recorded
        for static, one in zip(found.reads, given, strict=True):
            static.copy_(one)
        found.graph.replay()
        frame, self._ids = (one.clone() for one in found.writes)
        return frame

    def _fits(self, found: Recorded, given: tuple[Tensor, ...]) -> bool:
        """A graph reads weights and memory where they lay when it was made."""
        same = all(a is b for a, b in zip(found.memory, (self.past, self.shown), strict=True))
        return (
            same and all(a.shape == b.shape for a, b in zip(found.reads, given, strict=True)) and found.weights.hold()
        )

    def _record(self, given: tuple[Tensor, Tensor, Tensor]) -> Recorded:
        reads = led, chance, codes = given[0].clone(), given[1].clone(), given[2].clone()
        H, W, C = self.shape
        frame = torch.empty(len(led), C, H, W, dtype=torch.uint8, device=led.device)
        ids, memory = self.ids[:, None].clone(), (self.past, self.shown)
        seen = [torch.as_tensor(one.seen).clone() for one in memory]
        plain, before = super()._next, (self.codes, self._ids, self._led)

        def draw() -> None:
            frame.copy_(plain(led, chance))
            self.settle()
            ids.copy_(self.ids[:, None])

        def go_back() -> None:
            for one, count in zip(memory, seen, strict=True):
                torch.as_tensor(one.seen).copy_(count)

        def rehearse() -> None:  # what it writes is written again, at the same place
            draw()
            go_back()

        blocks = [*self.model.dynamics.transformer.blocks, *self.model.codec.decoder.blocks] if self.compiled else []
        self.codes = codes
        try:
            with _compiled(blocks):
                graph = graph_of(draw, rehearse)
        finally:  # a world that could not be recorded goes on from where it was
            self.codes, self._ids, self._led = before
            go_back()
        return Recorded(graph, reads, (frame, ids), memory, Pinned(self.model))


@contextmanager
def _compiled(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Blocks that are compiled for a while: replaying needs no more of it than the kernels. All of a kind are alike, so
    that one is compiled for all."""
    for block in blocks:
        block.compile(dynamic=False)
    try:
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


def unfit(model: Genie) -> str | None:
    """Why no graph can be made of a model's frames."""
    if model.codec.device.type != "cuda":
        return f"a graph is CUDA's, and the model is on {model.codec.device}"
    return None
