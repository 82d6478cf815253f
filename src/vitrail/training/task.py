"""Protocols between the trainer and its tasks and data sources."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

Batch = dict[str, Tensor]


class SampleSource(Protocol):
    """Indexable collection of samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int, /) -> Any: ...


@runtime_checkable
class RandomizedSource(Protocol):
    """Source with random augmentation. `seed` determines the random numbers; it differs between any two draws."""

    def sample(self, item: int, seed: tuple[int, ...], /) -> Any: ...


class Task(Protocol):
    """A model and its losses.

    Each loss is a sum over terms (tokens, images). `count_loss_terms` gives the number of terms of each loss before the
    forward pass. The trainer divides by the count of the whole step, so every token has the same weight in all
    micro-batches and on all ranks. Both methods return every loss of the task for every batch.

    With FSDP, each rank holds a shard of every weight, and all ranks must run each block together. The forward pass of
    any batch must therefore run the same parts of the model. If it cannot, implement `OptionalPartsTask`.
    """

    @property
    def model(self) -> nn.Module: ...

    @property
    def loss_weights(self) -> dict[str, float]:
        """Return the weight of each loss in the total."""
        ...

    def collate(self, samples: Sequence[Any]) -> Batch: ...

    def count_loss_terms(self, batch: Batch) -> dict[str, int]: ...

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Return each loss, summed over the batch."""
        ...

    def count_flops(self, batch: Batch) -> int:
        """Return the FLOPs of a forward pass. The trainer uses them to report MFU."""
        ...


@runtime_checkable
class OptionalPartsTask(Task, Protocol):
    """Task whose batches may skip parts of the model, such as the vision tower in a batch of text.

    Before each pass the ranks exchange which parts their batches use. A batch that skips a part another rank uses is
    filled with a blank sample.
    """

    def used_parts(self, batch: Batch) -> dict[str, bool]:
        """Return, for each optional part in a fixed order, whether the forward pass of this batch uses it."""
        ...

    def fill_part(self, batch: Batch, part: str) -> Batch:
        """Return the batch with a blank input, such as a grey image in a row without targets, that uses the part.

        The blank input must reach a loss, so that the backward pass runs through the part. It must not change any
        loss, count or gradient.
        """
        ...


@runtime_checkable
class MeteredTask(Task, Protocol):
    """Task that reports its own step cost, where `count_flops` is wrong: frozen parts may run forward only."""

    def count_step_flops(self, batch: Batch) -> float:
        """Return the FLOPs of a step, forward and backward."""
        ...


@runtime_checkable
class TokenTask(Task, Protocol):
    """Task that processes tokens. The trainer reports its tokens per second."""

    def count_tokens(self, batch: Batch) -> int:
        """Return the number of tokens of a prepared batch, without padding."""
        ...


@runtime_checkable
class PreparedBatchTask(Task, Protocol):
    """Task whose dataloader yields sample indices and that builds images and texts on the device.

    The trainer prepares the batches of the next step while the current step runs. Preparation uses no weights, and
    draws all random numbers of the step.
    """

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the inputs of the forward pass. A forward pass over a batch of indices prepares it first."""
        ...
