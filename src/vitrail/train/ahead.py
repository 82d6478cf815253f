"""The samples of the next step, made while this one runs."""

from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import torch

from vitrail.train.task import Batch


class Ready(NamedTuple):
    """The micro-batches of a step."""

    read: list[Batch]  # as they came
    made: list[Batch]  # as the model takes them, on its device


def ahead(
    steps: Iterator[list[Batch]], make: Callable[[list[Batch]], list[Batch]], device: torch.device
) -> Generator[Ready, None, None]:
    """Each step's micro-batches, and what `make` makes of them: on a GPU one step early, in a stream of its own, so
    that its many short kernels run beside the long ones of the pass."""
    if device.type != "cuda":
        yield from (Ready(read, make(read)) for read in steps)
        return
    side = torch.cuda.Stream(device)

    def begun(read: list[Batch]) -> tuple[Ready, torch.Event]:
        side.wait_stream(torch.cuda.current_stream(device))  # a judge may have used what making uses
        with torch.cuda.stream(side):
            return Ready(read, make(read)), side.record_event()

    waiting = None
    for read in steps:
        waiting, due = begun(read), waiting
        if due is not None:
            yield _arrived(*due, device)
    if waiting is not None:
        yield _arrived(*waiting, device)


def _arrived(ready: Ready, event: torch.Event, device: torch.device) -> Ready:
    here = torch.cuda.current_stream(device)
    here.wait_event(event)
    for batch in ready.made:
        for value in batch.values():
            value.record_stream(here)  # it was allocated in the other
    return ready
