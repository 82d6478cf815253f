"""Thousands of small operations as one launch.

What draws and tells samples is whole-number arithmetic in thousands of short kernels. On a GPU the host takes longer to
launch them than the device to run them; recorded once as a CUDA graph they cost one launch. That is for those who ask
for it, inside `recording()`, as the trainer does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from vitrail.errors import ConfigError

STEP = 64  # numbers are recorded for batches of a multiple of this, and what is too much is cut off
URGENT = -1  # short kernels go before long ones that run beside them, or each would wait for its turn
MOST = 8  # sizes of batches that are recorded; of others every kernel is launched

T = TypeVar("T")

_ASKED: ContextVar[bool] = ContextVar("recording", default=False)


@contextmanager
def recording() -> Iterator[None]:
    """What is `Replayed` is recorded here, on a GPU."""
    token = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(token)


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    index: Tensor  # (N,) what it reads
    made: Any  # what it writes


class Replayed(Generic[T]):
    """A function of sample numbers (B,) whose tensors have B rows each, and none of which depends on another.

    On a GPU it must ask the device for nothing. Its random numbers are torch's own, so that a seed decides them. It
    returns copies. That every tensor has its rows is seen to on a CPU as well, where nothing is cut and nobody would
    notice.
    """

    def __init__(self, make: Callable[[Tensor], T]):
        self.make = make
        self._recorded: dict[tuple[torch.device, int], _Recorded] = {}

    @torch.compiler.disable  # tracing thousands of operations takes minutes
    def __call__(self, index: Tensor) -> T:
        if not _ASKED.get() or not index.is_cuda or torch.cuda.is_current_stream_capturing():
            made = self.make(index)
            _cut(made, len(index))
            return made
        B, key = len(index), (index.device, -(-len(index) // STEP) * STEP)
        if key not in self._recorded:
            if not B or len(self._recorded) == MOST:
                return self.make(index)
            with torch.cuda.device(index.device):
                self._recorded[key] = self._record(index, key[1])
        held = self._recorded[key]
        with torch.cuda.device(index.device):
            held.index[:B].copy_(index)  # numbers beyond are those of an earlier call: samples like any other
            held.graph.replay()
            return _cut(held.made, B, Tensor.clone)

    def _record(self, index: Tensor, count: int) -> _Recorded:
        static = index[-1:].repeat(count)
        chance = torch.cuda.get_rng_state(index.device)  # as if nothing had been tried
        stream = torch.cuda.Stream(index.device, priority=URGENT)  # a graph keeps it
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # tables are made, and kernels loaded, outside the graph
                self.make(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            made = self.make(static)
        _cut(made, count)
        torch.cuda.set_rng_state(chance, index.device)
        return _Recorded(graph, static, made)


def _cut(made: Any, rows: int, then: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    """The same with so many rows of every tensor, which must be there."""
    if isinstance(made, Tensor):
        if not made.ndim or len(made) < rows:
            raise ConfigError(f"a tensor {tuple(made.shape)} made of {rows} numbers", "give it a row for each of them")
        return then(made[:rows])
    if is_dataclass(made):
        return type(made)(*(_cut(getattr(made, field.name), rows, then) for field in fields(made)))  # type: ignore[arg-type]
    if isinstance(made, tuple):
        parts = [_cut(part, rows, then) for part in made]
        return type(made)(*parts) if hasattr(made, "_fields") else tuple(parts)
    return made
