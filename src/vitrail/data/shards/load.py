"""Batches out of samples, in the order asked for, made ahead by threads."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from torch.utils.data import Dataset, default_collate

from vitrail.data.order import permuted
from vitrail.data.shards.read import Shards
from vitrail.errors import ConfigError


class Shuffled(Dataset):
    """index → sample, without an end: every sample once an epoch, in an order and with crops drawn from the seed.

    Nothing is remembered: who reads from index k on, with any number of workers, gets what comes behind the first k.
    """

    def __init__(self, shards: Shards, seed: int = 0):
        if seed < 0:
            raise ConfigError(f"seed {seed}", "give one from 0 on")
        self.shards, self.seed = shards, seed

    def __getitem__(self, index: int) -> dict[str, Any]:
        epoch, place = divmod(index, len(self.shards))
        item = permuted(place, len(self.shards), (self.seed << 32) + epoch)
        return self.shards.sample(item, (self.seed, index))


class Samples(Protocol):
    """Whatever gives a sample by its number, to several threads at a time."""

    def __getitem__(self, index: int, /) -> Any: ...


def batches(
    samples: Samples,
    numbers: Iterable[Sequence[int]],
    *,
    workers: int = 2,
    ahead: int = 2,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Iterator[Any]:
    """The samples of each list of numbers as one batch, `ahead` batches a worker being made meanwhile.

    Reading, decoding and resizing let other threads run, so that threads do what torch's worker processes do without
    carrying every batch from one process to another. Samples that are made by Python code gain more from
    `torch.utils.data.DataLoader`, which takes the same `samples`.
    """

    def make(own: Sequence[int]) -> Any:
        return collate([samples[i] for i in own])

    if workers < 1 or ahead < 1:
        raise ConfigError(f"{workers} workers, {ahead} batches ahead", "both must be at least 1")
    pool = ThreadPoolExecutor(workers, "batches")
    waiting: deque[Future] = deque()
    try:
        for own in numbers:
            waiting.append(pool.submit(make, own))
            if len(waiting) > workers * ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
