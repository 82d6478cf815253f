"""The samples of the next step, made while this one runs."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from vitrail.nn.replay import URGENT
from vitrail.train.task import Batch


class Ready(NamedTuple):
    """The micro-batches of a step."""

    read: list[Batch]  # as they came
    made: list[Batch]  # as the model takes them, on its device
    waited: float  # seconds that reading took since the step before was given; not those of making


class _Begun(NamedTuple):
    read: list[Batch]
    made: list[Batch]
    done: torch.Event | None  # when they are whole


class Ahead(Iterator[Ready]):
    """Each step's micro-batches, and what `make` makes of them: on a GPU `early`, in a stream of its own, so that its
    many short kernels run beside the long ones of a pass."""

    def __init__(
        self,
        steps: Iterator[list[Batch]],
        make: Callable[[list[Batch]], list[Batch]],
        device: torch.device,
        *,
        early: bool | None = None,
    ):
        self._steps, self._make, self._device = steps, make, device
        self._side = torch.cuda.Stream(device, priority=URGENT) if device.type == "cuda" else None
        self._early = self._side is not None if early is None else early
        self._begun: _Begun | Exception | None = None
        self._waited = 0.0

    def begin(self) -> None:
        """Begin with the next step's, once the pass over this one's is launched: the host has time then. What fails
        does so when it is asked for."""
        if self._early and self._begun is None:
            try:
                self._begun = self._start()
            except Exception as error:  # the end is one too
                self._begun = error

    def __next__(self) -> Ready:
        begun, self._begun = self._begun, None
        if begun is None:
            begun = self._start()
        if isinstance(begun, Exception):
            raise begun
        if begun.done is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(begun.done)
            for batch in begun.made:
                for value in batch.values():
                    value.record_stream(here)  # it was allocated in the other
        waited, self._waited = self._waited, 0.0
        return Ready(begun.read, begun.made, waited)

    def _start(self) -> _Begun:
        start = time.perf_counter()
        try:
            read = next(self._steps)
        finally:
            self._waited += time.perf_counter() - start
        if self._side is None:
            return _Begun(read, self._make(read), None)
        with torch.cuda.stream(self._side):
            return _Begun(read, self._make(read), self._side.record_event())
