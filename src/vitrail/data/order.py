"""Data order as a function: sample = f(seed, index).

Nothing is shuffled in memory and nothing is kept between steps, so any number of workers and ranks see the same order,
and to resume is to know one integer. Index i falls in a block; a block holds each source as often as its weight says
(rounding is carried over, so that it never drifts), in an order drawn from the seed; the k-th draw from a source is the
k-th item of a permutation of it, a new one every epoch.
"""

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vitrail.config import Config
from vitrail.errors import ConfigError

BLOCK = 256


class Mixture(Config):
    """How often each source is drawn. `weights` at the start move in a straight line to `final` over `over` samples."""

    weights: dict[str, float]
    final: dict[str, float] | None = None
    over: int = 0

    def __post_init__(self) -> None:
        for name, table in (("weights", self.weights), ("final", self.final)):
            if table is None:
                continue
            if not table or any(w < 0 or not np.isfinite(w) for w in table.values()) or not sum(table.values()):
                raise ConfigError(
                    f"mixture.{name} {table} draws from nothing", "give at least one source a weight above 0"
                )
        if self.final is not None and (set(self.final) != set(self.weights) or self.over < 1):
            raise ConfigError(
                f"mixture.final {sorted(self.final)} does not go with {sorted(self.weights)} over {self.over} samples",
                "name the same sources in both, and say over how many samples they move",
            )

    def at(self, index: int) -> np.ndarray:
        """Shares that add up to one, in the order of `weights`."""
        start = np.array(list(self.weights.values()), dtype=np.float64)
        start /= start.sum()
        if self.final is None:
            return start
        end = np.array([self.final[name] for name in self.weights], dtype=np.float64)
        end /= end.sum()
        t = min(index / self.over, 1.0)
        return (1 - t) * start + t * end


class Draw(NamedTuple):
    """One sample: which source, which item of it, and in which epoch of that source."""

    source: str
    item: int
    epoch: int


class Order:
    """The order of one stage over sources of known sizes."""

    def __init__(self, mixture: Mixture, sizes: Mapping[str, int], seed: int = 0):
        missing = [name for name in mixture.weights if name not in sizes]
        if missing:
            raise ConfigError(
                f"the mixture draws from {missing[0]!r}, which is no source", f"known: {', '.join(sizes)}"
            )
        empty = [name for name in mixture.weights if not sizes[name]]
        if empty:
            raise ConfigError(
                f"source {empty[0]!r} holds nothing", "check what it reads, or leave it out of the mixture"
            )
        self.mixture, self.seed = mixture, seed
        self.names = list(mixture.weights)
        self.sizes = [sizes[name] for name in self.names]
        self._drawn = [np.zeros(len(self.names), dtype=np.int64)]  # draws of each source before block b
        self._owed = np.zeros(len(self.names))  # what rounding has kept back so far
        self._last: tuple[int, list[tuple[int, int]]] | None = None

    def __getitem__(self, index: int) -> Draw:
        if index < 0:
            raise IndexError(index)
        block, place = divmod(index, BLOCK)
        self._reach(block + 1)
        source, count = self._shuffled(block)[place]
        epoch, item = divmod(count, self.sizes[source])
        return Draw(self.names[source], permuted(item, self.sizes[source], _mix(self.seed, 1, source, epoch)), epoch)

    def _shuffled(self, block: int) -> list[tuple[int, int]]:
        """The block's samples in their order: which source, and which draw from it. Neighbours ask for the same one."""
        kept = self._last
        if kept is None or kept[0] != block:
            before, after = self._drawn[block], self._drawn[block + 1]
            labels = np.repeat(np.arange(len(self.names)), after - before)
            labels = labels[np.random.default_rng(_mix(self.seed, 0, block)).permutation(BLOCK)]
            count, found = before.tolist(), []
            for source in labels.tolist():
                found.append((source, count[source]))
                count[source] += 1
            kept = self._last = block, found
        return kept[1]

    def _reach(self, blocks: int) -> None:
        """Share out whole blocks by largest remainder, carrying what was not given to the next."""
        while len(self._drawn) <= blocks:
            b = len(self._drawn) - 1
            due = self.mixture.at(b * BLOCK) * BLOCK + self._owed
            given = np.maximum(np.floor(due), 0).astype(np.int64)
            order = np.argsort(-(due - given), kind="stable")
            for i in range(BLOCK - int(given.sum())):
                given[order[i % len(order)]] += 1
            self._owed = due - given
            self._drawn.append(self._drawn[-1] + given)


def permuted(item: int, size: int, key: int) -> int:
    """The item-th element of a permutation of range(size), computed alone: a Feistel network over the next square,
    walked until it lands inside."""
    side = math.isqrt(size - 1) + 1
    while True:
        left, right = divmod(item, side)
        for round_ in range(4):
            left, right = right, (left + _mix(key, round_, right)) % side
        item = left * side + right
        if item < size:
            return item


@lru_cache(maxsize=1 << 17)  # an epoch asks for the same few rounds again and again
def _mix(*numbers: int) -> int:
    """63 bits that depend on all the numbers, the same on every machine."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
