"""Chains of short kernels one beside the other."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from vitrail.nn.replay import URGENT

T = TypeVar("T", bound=dict[str, Tensor])


class Beside:
    """Functions whose tensors come by name. On a GPU each has a stream of its own: kernels of a few microseconds, each
    waiting for the one before, leave most of a device to others, and all chains take little longer than the longest.

    Random numbers are those that a seed decides as long as none is drawn inside a recording: all graphs read the same
    place of their generator, wherever the last of them that began set it."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, list[torch.cuda.Stream]] = {}

    def __call__(self, device: torch.device, makes: Sequence[Callable[[], T]]) -> list[T]:
        if device.type != "cuda":
            return [make() for make in makes]
        streams = self._streams.setdefault(device, [])
        streams += [torch.cuda.Stream(device, priority=URGENT) for _ in makes[len(streams) :]]
        here, found = torch.cuda.current_stream(device), []
        for make, stream in zip(makes, streams, strict=False):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                found.append(make())
        for made, stream in zip(found, streams, strict=False):
            here.wait_stream(stream)
            for value in made.values():
                value.record_stream(here)  # it was allocated in the other
        return found
