"""Data order as a pure function: sample = f(seed, index).

Nothing is shuffled in memory and no state is kept between steps. Any number of workers and ranks computes the same
order, and a run resumes from one integer.

Indices are grouped into blocks. In each block every source occurs in proportion to its weight; rounding errors carry
over to the next block, so proportions do not drift. The order within a block is random with the seed. The k-th draw of
a source is the k-th item of a permutation of that source; every epoch has a new permutation.
"""

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vitrail.config import Config
from vitrail.errors import ConfigError

BLOCK_SIZE = 256


class MixtureConfig(Config):
    """Sampling weights of the sources.

    weights         source → weight at the start
    final_weights   weights after `anneal_samples` samples, reached linearly
    anneal_samples  number of samples over which the weights change
    """

    weights: dict[str, float]
    final_weights: dict[str, float] | None = None
    anneal_samples: int = 0

    def __post_init__(self) -> None:
        for name, table in (("weights", self.weights), ("final_weights", self.final_weights)):
            if table is None:
                continue
            if not table or any(w < 0 or not np.isfinite(w) for w in table.values()) or not sum(table.values()):
                raise ConfigError(
                    f"mixture.{name} is {table}: no positive weight", "give at least one source a weight above 0"
                )
        if self.final_weights is not None and (set(self.final_weights) != set(self.weights) or self.anneal_samples < 1):
            raise ConfigError(
                f"mixture.final_weights {sorted(self.final_weights)} does not match mixture.weights "
                f"{sorted(self.weights)}, or anneal_samples is {self.anneal_samples}",
                "name the same sources in both, and set anneal_samples to at least 1",
            )

    def weights_at(self, index: int) -> np.ndarray:
        """Weights at a sample index, normalized to sum to one, in the order of `weights`."""
        start = np.array(list(self.weights.values()), dtype=np.float64)
        start /= start.sum()
        if self.final_weights is None:
            return start
        end = np.array([self.final_weights[name] for name in self.weights], dtype=np.float64)
        end /= end.sum()
        t = min(index / self.anneal_samples, 1.0)
        return (1 - t) * start + t * end


class SampleReference(NamedTuple):
    """One sample: the source, the item of that source, and the epoch of that source."""

    source: str
    item: int
    epoch: int


class MixtureSampler:
    """Sample order of one stage over sources of known sizes: index → `SampleReference`."""

    def __init__(self, mixture: MixtureConfig, sizes: Mapping[str, int], seed: int = 0):
        missing = [name for name in mixture.weights if name not in sizes]
        if missing:
            raise ConfigError(
                f"mixture.weights names {missing[0]!r}, which is not a source", f"known: {', '.join(sizes)}"
            )
        empty = [name for name in mixture.weights if not sizes[name]]
        if empty:
            raise ConfigError(f"source {empty[0]!r} is empty", "check its files, or remove it from the mixture")
        self.mixture, self.seed = mixture, seed
        self.names = list(mixture.weights)
        self.sizes = [sizes[name] for name in self.names]
        self._draws_before = [np.zeros(len(self.names), dtype=np.int64)]  # draws of each source before each block
        self._remainder = np.zeros(len(self.names))  # rounding remainder of each source
        self._cached_block: tuple[int, list[tuple[int, int]]] | None = None

    def __getitem__(self, index: int) -> SampleReference:
        if index < 0:
            raise IndexError(index)
        block, place = divmod(index, BLOCK_SIZE)
        self._extend(block + 1)
        source, count = self._order_block(block)[place]
        epoch, item = divmod(count, self.sizes[source])
        return SampleReference(
            self.names[source], permute_index(item, self.sizes[source], _mix(self.seed, 1, source, epoch)), epoch
        )

    def _order_block(self, block: int) -> list[tuple[int, int]]:
        """Samples of a block in order, as (source, draw of that source). Caches the last block, since neighbours ask
        for it."""
        cached = self._cached_block
        if cached is None or cached[0] != block:
            before, after = self._draws_before[block], self._draws_before[block + 1]
            labels = np.repeat(np.arange(len(self.names)), after - before)
            labels = labels[np.random.default_rng(_mix(self.seed, 0, block)).permutation(BLOCK_SIZE)]
            count, samples = before.tolist(), []
            for source in labels.tolist():
                samples.append((source, count[source]))
                count[source] += 1
            cached = block, samples
            self._cached_block = cached
        return cached[1]

    def _extend(self, blocks: int) -> None:
        """Allocate further blocks by largest remainder, and carry the rounding error to the next block."""
        while len(self._draws_before) <= blocks:
            block = len(self._draws_before) - 1
            quota = self.mixture.weights_at(block * BLOCK_SIZE) * BLOCK_SIZE + self._remainder
            counts = np.maximum(np.floor(quota), 0).astype(np.int64)
            order = np.argsort(-(quota - counts), kind="stable")
            for rank in range(BLOCK_SIZE - int(counts.sum())):
                counts[order[rank % len(order)]] += 1
            self._remainder = quota - counts
            self._draws_before.append(self._draws_before[-1] + counts)


def permute_index(item: int, size: int, key: int) -> int:
    """Return element `item` of a permutation of range(size), without computing the others.

    Uses a Feistel network over the next square number, repeated until the result is below `size`.
    """
    root = math.isqrt(size - 1) + 1
    while True:
        left, right = divmod(item, root)
        for round_number in range(4):
            left, right = right, (left + _mix(key, round_number, right)) % root
        item = left * root + right
        if item < size:
            return item


def sample_indices(size: int, count: int, seed: int) -> list[int]:
    """Draw up to `count` different indices below `size`, in ascending order."""
    return sorted(permute_index(i, size, seed) for i in range(min(count, size)))


@lru_cache(maxsize=1 << 17)  # an epoch repeats the same few rounds
def _mix(*numbers: int) -> int:
    """Hash the numbers to 63 bits, the same on every machine."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
