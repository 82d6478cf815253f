"""Prefetching: load and prepare the batches of the next step while the current step runs."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from vitrail.nn.cuda_graphs import HIGH_PRIORITY
from vitrail.training.task import Batch


class PreparedStep(NamedTuple):
    """The micro-batches of a step."""

    raw_batches: list[Batch]  # from the dataloader
    batches: list[Batch]  # prepared inputs on the device
    wait_seconds: float  # seconds spent loading since the last step, without preparation


class _PendingStep(NamedTuple):
    raw_batches: list[Batch]
    batches: list[Batch]
    ready_event: torch.Event | None  # recorded after the preparation


class PrefetchIterator(Iterator[PreparedStep]):
    """Iterate over the micro-batches of each step and their prepared inputs.

    On a GPU, `prefetch` prepares the next step on a separate CUDA stream, so that its short kernels overlap with the
    long kernels of the forward and backward pass. `early` overrides whether it does.
    """

    def __init__(
        self,
        steps: Iterator[list[Batch]],
        prepare: Callable[[list[Batch]], list[Batch]],
        device: torch.device,
        *,
        early: bool | None = None,
    ):
        self._steps, self._prepare, self._device = steps, prepare, device
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY) if device.type == "cuda" else None
        self._early = self._stream is not None if early is None else early
        self._pending: _PendingStep | Exception | None = None
        self._wait_seconds = 0.0

    def prefetch(self) -> None:
        """Start to prepare the next step. Call it after launching the pass of the current step.

        An error is raised by the next call of `__next__`.
        """
        if self._early and self._pending is None:
            try:
                self._pending = self._load_step()
            except Exception as error:  # StopIteration too
                self._pending = error

    def __next__(self) -> PreparedStep:
        pending, self._pending = self._pending, None
        if pending is None:
            pending = self._load_step()
        if isinstance(pending, Exception):
            raise pending
        if pending.ready_event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(pending.ready_event)
            for batch in pending.batches:
                for value in batch.values():
                    value.record_stream(current)  # it was allocated on the other stream
        waited, self._wait_seconds = self._wait_seconds, 0.0
        return PreparedStep(pending.raw_batches, pending.batches, waited)

    def _load_step(self) -> _PendingStep:
        start = time.perf_counter()
        try:
            read = next(self._steps)
        finally:
            self._wait_seconds += time.perf_counter() - start
        if self._stream is None:
            return _PendingStep(read, self._prepare(read), None)
        with torch.cuda.stream(self._stream):
            return _PendingStep(read, self._prepare(read), self._stream.record_event())
