"""What the trainer asks of a task."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

Batch = dict[str, Tensor]


class Source(Protocol):
    """Samples that can be asked for by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> Any: ...


class Task(Protocol):
    """A model plus its loss.

    A loss is a sum over so many things (tokens, pictures), and `counts` says how many of each a batch holds before any
    pass is run: the trainer divides by the count of the whole step, so that accumulated micro-batches and unequal ranks
    weigh every token alike.
    """

    @property
    def model(self) -> nn.Module: ...

    @property
    def weights(self) -> dict[str, float]:
        """loss → its weight in the total"""
        ...

    def collate(self, samples: Sequence[Any]) -> Batch: ...

    def counts(self, batch: Batch) -> dict[str, int]: ...

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """loss → its sum over the batch"""
        ...

    def flops(self, batch: Batch) -> int:
        """Operations of a forward pass, for the share of the device's rate that is used."""
        ...
