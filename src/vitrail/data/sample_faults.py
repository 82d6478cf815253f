"""Unreadable samples of a source: replaced by other samples, counted, and limited.

An unreadable sample is replaced by another one, always the same, so the order stays a function of seed and index. The
state of each sample is one byte of memory shared by all data workers.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from vitrail.data.sampler import permute_index
from vitrail.errors import DataError

READABLE, UNREADABLE = 1, 2
MAX_REPLACEMENTS = 100  # more unreadable samples in a row are not a coincidence
MAX_FAULTS_SHOWN = 5  # faults listed in an error message


class SampleFault(NamedTuple):
    """A sample, or a part of one, that could not be read."""

    file: str
    member: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.member} {self.reason}"


class SampleReport(NamedTuple):
    """How many samples were read so far, by all data workers, the faults, and how many texts were cut."""

    num_samples: int
    num_read: int
    faults: tuple[SampleFault, ...]
    num_cut: int = 0

    def __str__(self) -> str:
        count = len(self.faults)
        head = f"read {self.num_read:,} of {self.num_samples:,} samples, {count:,} fault{'s' if count != 1 else ''}"
        head += f", {self.num_cut:,} texts were cut" if self.num_cut else ""
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])


class FaultTracker:
    """Reads samples with replacement. Workers may be forked or spawned; they share the states of the samples.

    read_sample   item, seed → the sample, or a fault
    known_faults  faults of the files, which were found before any sample was read
    """

    def __init__(
        self,
        num_samples: int,
        max_fraction: float,
        max_count: int,
        read_sample: Callable[[int, tuple[int, ...]], Any],
        known_faults: Callable[[], Iterable[SampleFault]] = tuple,
    ):
        self.max_fraction, self.max_count = max_fraction, max_count
        self._read_sample, self._known_faults = read_sample, known_faults
        self.shared_states = torch.zeros(num_samples, dtype=torch.uint8).share_memory_()

    @property
    def states(self) -> np.ndarray:
        """State of every sample: 0 if not read yet, READABLE or UNREADABLE."""
        return self.shared_states.numpy()

    def read(self, item: int, seed: tuple[int, ...]) -> Any:
        """Read a sample, or its replacement if it is unreadable."""
        states = self.states
        if not 0 <= item < len(states):
            raise IndexError(item)
        for turn in range(MAX_REPLACEMENTS):
            if states[item] != UNREADABLE:
                found = self._read_sample(item, seed)
                states[item] = UNREADABLE if isinstance(found, SampleFault) else READABLE
                if not isinstance(found, SampleFault):
                    return found
                self.check_limits(int((states == UNREADABLE).sum()), int((states > 0).sum()))
            item = permute_index(item, len(states), turn)
        raise DataError(
            f"{MAX_REPLACEMENTS} samples in a row are unreadable:{self._first_faults()}",
            "check the data and the decoders",
        )

    def mark_unreadable(self, item: int) -> None:
        """Mark a sample that was found to be unreadable by a check."""
        self.states[item] = UNREADABLE
        self.check_limits(int((self.states == UNREADABLE).sum()), int((self.states > 0).sum()))

    def check_limits(self, bad: int, num_read: int) -> None:
        """Raise `DataError` if there are too many faults."""
        if bad > self.max_count and bad > self.max_fraction * num_read:
            raise DataError(
                f"{bad:,} of {num_read:,} samples are unreadable, more than the limit of {self.max_fraction:.2%}:"
                f"{self._first_faults()}",
                "repair or remove them, or raise max_fault_fraction",
            )

    def report(self) -> SampleReport:
        """Report the faults of all processes. Unreadable samples are read again to get the reasons."""
        return SampleReport(len(self.states), int((self.states > 0).sum()), tuple(self._faults()))

    def _faults(self) -> Iterator[SampleFault]:
        for item in np.flatnonzero(self.states == UNREADABLE).tolist():
            found = self._read_sample(item, (item,))
            yield (
                found
                if isinstance(found, SampleFault)
                else SampleFault(f"sample {item:,}", "", "was unreadable before, but is readable now")
            )
        yield from self._known_faults()

    def _first_faults(self) -> str:
        """Format the first few faults, one on each line."""
        return "".join(f"\n  {fault}" for fault in islice(self._faults(), MAX_FAULTS_SHOWN))
