"""Batches of samples in a given order, loaded ahead of time by threads."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from torch.utils.data import Dataset, default_collate

from vitrail.data.sampler import permute_index
from vitrail.data.shards.shard_dataset import ShardDataset
from vitrail.errors import ConfigError


class ShuffledDataset(Dataset):
    """Endless stream of samples: index → sample. Each epoch has every sample once, in random order and with random
    crops.

    There is no state: reading from index k on gives what follows the first k samples, with any number of workers.
    """

    def __init__(self, shards: ShardDataset, seed: int = 0):
        if seed < 0:
            raise ConfigError(f"the seed is {seed}", "give one from 0 on")
        self.shards, self.seed = shards, seed

    def __getitem__(self, index: int) -> dict[str, Any]:
        epoch, place = divmod(index, len(self.shards))
        item = permute_index(place, len(self.shards), (self.seed << 32) + epoch)
        return self.shards.read_sample(item, (self.seed, index))


class SampleSequence(Protocol):
    """Anything that returns a sample by index and is safe to use from several threads."""

    def __getitem__(self, index: int, /) -> Any: ...


def load_batches(
    samples: SampleSequence,
    batch_indices: Iterable[Sequence[int]],
    *,
    num_workers: int = 2,
    prefetch: int = 2,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Iterator[Any]:
    """Load the samples of each list of indices as one batch. Each worker prepares up to `prefetch` batches ahead.

    Reading, decoding and resizing release the GIL, so threads replace torch's worker processes without copying batches
    between processes. Use `torch.utils.data.DataLoader` with the same `samples` if Python code makes them.
    """

    def load_batch(indices: Sequence[int]) -> Any:
        return collate([samples[i] for i in indices])

    if num_workers < 1 or prefetch < 1:
        raise ConfigError(f"num_workers is {num_workers} and prefetch is {prefetch}", "both must be at least 1")
    pool = ThreadPoolExecutor(num_workers, "batches")
    pending: deque[Future] = deque()
    try:
        for indices in batch_indices:
            pending.append(pool.submit(load_batch, indices))
            if len(pending) > num_workers * prefetch:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
