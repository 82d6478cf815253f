"""CUDA graphs for functions of sample indices.

Rendering scenes and their texts takes thousands of short integer kernels. On a GPU the host needs longer to launch them
than the device to run them; as a CUDA graph they are one launch. Graphs are used only inside `enable_cuda_graphs()`,
which the trainer enters.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from vitrail.errors import ConfigError

BATCH_MULTIPLE = 64  # graphs are recorded for multiples of this batch size; surplus rows are dropped
HIGH_PRIORITY = -1  # stream priority: short kernels run before long ones of other streams
MAX_GRAPHS = 8  # number of batch sizes with a graph; other sizes launch every kernel

T = TypeVar("T")

_GRAPHS_ENABLED: ContextVar[bool] = ContextVar("recording", default=False)


@contextmanager
def enable_cuda_graphs() -> Iterator[None]:
    """Record and replay every `CUDAGraphFunction` on a GPU inside the context."""
    token = _GRAPHS_ENABLED.set(True)
    try:
        yield
    finally:
        _GRAPHS_ENABLED.reset(token)


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Collect no garbage inside the context. Freeing an older CUDA graph would invalidate a capture."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _RecordedGraph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    index: Tensor  # (N,) static input
    output: Any  # static output


class CUDAGraphFunction(Generic[T]):
    """Function of sample indices (B,) that is replayed as a CUDA graph on a GPU.

    Every tensor it returns must have B independent rows, which is checked on a CPU too. It must not synchronize with
    the device. Its random numbers come from torch's generator, so a seed determines them. A replay returns copies.
    """

    def __init__(self, function: Callable[[Tensor], T]):
        self.function = function
        self._recorded: dict[tuple[torch.device, int], _RecordedGraph] = {}

    @torch.compiler.disable  # tracing thousands of operations would take minutes
    def __call__(self, index: Tensor) -> T:
        if not _GRAPHS_ENABLED.get() or not index.is_cuda or torch.cuda.is_current_stream_capturing():
            output = self.function(index)
            _trim_rows(output, len(index))
            return output
        B, key = len(index), (index.device, -(-len(index) // BATCH_MULTIPLE) * BATCH_MULTIPLE)
        if key not in self._recorded:
            if not B or len(self._recorded) == MAX_GRAPHS:
                return self.function(index)
            with torch.cuda.device(index.device):
                self._recorded[key] = self._record(index, key[1])
        recorded = self._recorded[key]
        with torch.cuda.device(index.device):
            recorded.index[:B].copy_(index)  # the remaining indices are valid ones of an earlier call
            recorded.graph.replay()
            return _trim_rows(recorded.output, B, Tensor.clone)

    def _record(self, index: Tensor, count: int) -> _RecordedGraph:
        static = index[-1:].repeat(count)
        rng_state = torch.cuda.get_rng_state(index.device)  # restored after the warmup
        stream = torch.cuda.Stream(index.device, priority=HIGH_PRIORITY)  # the graph keeps it alive
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # warmup: build tables and load kernels outside the graph
                self.function(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with pause_garbage_collection(), torch.cuda.graph(graph, stream=stream):
            output = self.function(static)
        _trim_rows(output, count)
        torch.cuda.set_rng_state(rng_state, index.device)
        return _RecordedGraph(graph, static, output)


def _trim_rows(output: Any, rows: int, then: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    """Keep the first `rows` rows of every tensor. Raise if a tensor has fewer."""
    if isinstance(output, Tensor):
        if not output.ndim or len(output) < rows:
            raise ConfigError(
                f"a function of {rows} sample indices returned a tensor {tuple(output.shape)}",
                "return one row for each index",
            )
        return then(output[:rows])
    if is_dataclass(output):
        values = (_trim_rows(getattr(output, field.name), rows, then) for field in fields(output))
        return type(output)(*values)  # type: ignore[arg-type]
    if isinstance(output, tuple):
        parts = [_trim_rows(part, rows, then) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else tuple(parts)
    return output
