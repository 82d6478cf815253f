"""Run several functions on parallel CUDA streams."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from vitrail.nn.cuda_graphs import HIGH_PRIORITY

T = TypeVar("T", bound=dict[str, Tensor])


class ParallelStreams:
    """Call functions that return named tensors, each on its own CUDA stream.

    Chains of kernels that take a few microseconds each use little of a GPU. In parallel, all chains take about as long
    as the longest. On other devices the functions run one after the other.

    A seed determines the random numbers, unless a function draws them inside a CUDA graph: all graphs share one
    generator offset, and the graph that started last sets it.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, list[torch.cuda.Stream]] = {}

    def __call__(self, device: torch.device, functions: Sequence[Callable[[], T]]) -> list[T]:
        if device.type != "cuda":
            return [function() for function in functions]
        streams = self._streams.setdefault(device, [])
        streams += [torch.cuda.Stream(device, priority=HIGH_PRIORITY) for _ in functions[len(streams) :]]
        current, outputs = torch.cuda.current_stream(device), []
        for function, stream in zip(functions, streams, strict=False):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                outputs.append(function())
        for output, stream in zip(outputs, streams, strict=False):
            current.wait_stream(stream)
            for value in output.values():
                value.record_stream(current)  # it was allocated on the other stream
        return outputs
