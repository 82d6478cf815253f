"""What the trainer asks of a task."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

Batch = dict[str, Tensor]


class Source(Protocol):
    """Samples that can be asked for by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> Any: ...


@runtime_checkable
class Varied(Protocol):
    """A source whose samples differ from one time to the next: `chance` says how, and is never the same twice."""

    def sample(self, item: int, chance: tuple[int, ...], /) -> Any: ...


class Task(Protocol):
    """A model plus its loss.

    A loss is a sum over so many things (tokens, pictures), and `counts` says how many of each a batch holds before any
    pass is run: the trainer divides by the count of the whole step, so that accumulated micro-batches and unequal ranks
    weigh every token alike. Both name all losses of the task, whatever the batch holds.

    Of many processes each holds a share of every weight, and no block runs on one before all the others run it too.
    So a pass over any batch must run the same parts of the model; where that cannot be, be a `PartedTask`.
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


@runtime_checkable
class PartedTask(Task, Protocol):
    """A task whose model has parts that some batches skip: a tower for pictures, in a batch of mere text.

    Before a pass the ranks tell each other which parts their batches run, and a batch that skips what another runs is
    filled up.
    """

    def parts(self, batch: Batch) -> dict[str, bool]:
        """Every part that can be skipped, in one order → whether a pass over this batch runs it."""
        ...

    def fill(self, batch: Batch, part: str) -> Batch:
        """The batch with something blank, a grey picture in a row without targets, so that a pass runs the part too.

        It must reach a loss, so that the backward pass runs through the part as well, and add nothing to any: losses,
        counts and gradients stay.
        """
        ...


@runtime_checkable
class MeteredTask(Task, Protocol):
    """A task that knows what a step takes where `flops` and `counts` do not say it: of parts that learn nothing some
    run forward alone, and of the tokens in a batch some are padding."""

    def step_flops(self, batch: Batch) -> float:
        """Operations of a step, forward and backward."""
        ...

    def useful(self, batch: Batch) -> int:
        """Tokens that a pass over a batch, as it takes it, reads, padding aside."""
        ...


@runtime_checkable
class MadeTask(Task, Protocol):
    """A task whose batches are numbers, of which it makes pictures and texts on the device. The trainer has those of
    the next step made while this one runs: of no weights, and whatever chance a step needs is drawn here, not in its
    pass."""

    def made(self, batch: Batch) -> Batch:
        """What a pass takes; a pass over a batch of numbers makes it first."""
        ...
