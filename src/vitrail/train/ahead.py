"""The samples of the next step, made while this one runs."""

import time
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, TypeVar

import torch

from vitrail.train.task import Batch

T = TypeVar("T")


class Ready(NamedTuple):
    """The micro-batches of a step."""

    read: list[Batch]  # as they came
    made: list[Batch]  # as the model takes them, on its device
    waited: float  # seconds that reading took since the step before was given; not those of making


def ahead(
    steps: Iterator[list[Batch]], make: Callable[[list[Batch]], list[Batch]], device: torch.device
) -> Generator[Ready, None, None]:
    """Each step's micro-batches, and what `make` makes of them: on a GPU one step early, in a stream of its own, so
    that its many short kernels run beside the long ones of the pass."""
    waited = 0.0

    def timed() -> Iterator[list[Batch]]:
        nonlocal waited
        while True:
            start = time.perf_counter()
            read = next(steps, None)
            waited += time.perf_counter() - start
            if read is None:
                return
            yield read

    begun = _beside(timed(), make, device) if device.type == "cuda" else ((read, make(read)) for read in timed())
    for read, made in begun:
        ready, waited = Ready(read, made, waited), 0.0
        yield ready


def _beside(
    steps: Iterator[list[Batch]], make: Callable[[list[Batch]], list[Batch]], device: torch.device
) -> Iterator[tuple[list[Batch], list[Batch]]]:
    side = torch.cuda.Stream(device)

    def begin(read: list[Batch]) -> tuple[list[Batch], list[Batch], torch.Event]:
        side.wait_stream(torch.cuda.current_stream(device))  # a judge may have used what making uses
        with torch.cuda.stream(side):
            return read, make(read), side.record_event()

    for read, made, event in one_early(begin(read) for read in steps):
        here = torch.cuda.current_stream(device)
        here.wait_event(event)
        for batch in made:
            for value in batch.values():
                value.record_stream(here)  # it was allocated in the other
        yield read, made


def one_early(items: Iterator[T]) -> Iterator[T]:
    """Each, once the one behind it has been asked for. One that fails does so in its own turn, not in the turn of the
    one before it."""
    due, failed = next(items, None), None
    while due is not None:
        try:
            following = next(items, None)
        except Exception as error:
            following, failed = None, error
        yield due
        due = following
    if failed is not None:
        raise failed
