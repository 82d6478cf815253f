"""Samples out of shards, in any order: sample = f(item), by the place where it lies.

What cannot be read is replaced by another sample, the same one every time, so that order stays a function; it is
counted, and named by `report`. What became of each sample is one byte in memory that all data workers share.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from tqdm import tqdm

from vitrail.config import Config
from vitrail.data.order import permuted
from vitrail.data.shards.decode import Look, decode_picture, need_simplejpeg
from vitrail.data.shards.index import Fault, index_of, state_of
from vitrail.data.shards.kinds import kind_of
from vitrail.data.shards.paths import expand
from vitrail.errors import ConfigError, DataError, VitrailError

GOOD, BAD = 1, 2
TRIES = 100  # that many in a row are never unreadable by chance
OPEN = 64  # files kept open
SHOWN = 5  # culprits an error names


class ShardsConfig(Config):
    """Which shards, and what of them.

    `paths` are tars, folders of them, or patterns ("train-{000..099}.tar", "*/part-*.tar"). `fields` are the endings to
    read, all of which a sample must have; "jpg;png" takes either and calls it "jpg". Without them everything is read.
    `look` says what pictures are made into; without it they are read whole.

    The run stops when over `tolerate` of the samples seen cannot be read, and over `patience` of them.
    """

    paths: str | tuple[str, ...]
    fields: tuple[str, ...] = ()
    look: Look | None = None
    tolerate: float = 0.01
    patience: int = 10

    def __post_init__(self) -> None:
        if not 0 <= self.tolerate <= 1 or self.patience < 0:
            raise ConfigError(
                f"shards that tolerate {self.tolerate} and {self.patience} samples that cannot be read",
                "give a share of 0 … 1 and a number from 0 on",
            )
        if any(not all(field.split(";")) for field in self.fields):
            raise ConfigError(f"shards with the fields {self.fields}", 'name endings, as "jpg" or "jpg;png"')


@dataclass(frozen=True)
class Report:
    """What was seen so far, in all data workers, and what could not be read."""

    samples: int
    seen: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        count = len(self.faults)
        head = f"{self.seen:,} of {self.samples:,} samples seen, {count:,} fault{'s' if count != 1 else ''}"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])


class Shards:
    """item → {"__key__": name, field: value, …}: text as str, JSON as objects, `cls` as int, `npy` as an array, a
    picture as uint8 (H, W, 3), anything else as bytes. `decoders` are others, by ending: bytes → value.

    Files are read by place alone, so that workers may be forked or spawned, and share nothing but what was seen.
    """

    def __init__(self, config: ShardsConfig, decoders: Mapping[str, Callable[[bytes], Any]] | None = None):
        self.config, self.decoders = config, dict(decoders or {})
        if config.look is not None:
            need_simplejpeg()
        self.paths = expand(config.paths)
        self.indexes = [index_of(path) for path in tqdm(self.paths, "index", delay=2, leave=False, disable=None)]
        self.starts = np.cumsum([0, *map(len, self.indexes)])  # the first item of each shard
        if not len(self):
            raise DataError(f"{_names(self.paths)} hold no samples", "check that these are the right files")
        self.shared = torch.zeros(len(self), dtype=torch.uint8).share_memory_()
        self._own()
        torn = sum(len(index.faults) for index in self.indexes)
        self._weigh(torn, len(self) + torn)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, item: int) -> dict[str, Any]:
        return self.sample(item, (item,))

    def sample(self, item: int, chance: tuple[int, ...]) -> dict[str, Any]:
        """A sample, or the one that stands in for it if it cannot be read. `chance` decides what a random look does."""
        if not 0 <= item < len(self):
            raise IndexError(item)
        for turn in range(TRIES):
            if self.fate[item] != BAD:
                found = self._read(item, chance)
                self.fate[item] = BAD if isinstance(found, Fault) else GOOD
                if not isinstance(found, Fault):
                    return found
                self._weigh(int((self.fate == BAD).sum()), int((self.fate > 0).sum()))
            item = permuted(item, len(self), turn)
        raise DataError(f"none of {TRIES} samples can be read:{self._culprits()}", "check the shards and the decoders")

    def report(self) -> Report:
        """What could not be read, in whichever process. The culprits are read once more, to say why."""
        return Report(len(self), int((self.fate > 0).sum()), tuple(self._faults()))

    def __repr__(self) -> str:
        kinds = sorted({kind for index in self.indexes for kind in index.kinds})
        ignored = sum(index.ignored for index in self.indexes)
        said = f"{len(self):,} samples of {', '.join(kinds)} in {len(self.paths):,} shards"
        return f"<{said}{f'; {ignored:,} files without an ending are not read' if ignored else ''}>"

    def _own(self) -> None:
        """What each process makes for itself."""
        self.fate = self.shared.numpy()  # of every sample: 0 not seen yet, GOOD or BAD
        self._open = lru_cache(OPEN)(_open)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("fate", "_open")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._own()

    # ---- reading ------------------------------------------------------------------------------------------------

    def _place(self, item: int) -> tuple[int, str, dict[str, tuple[int, int]]]:
        """shard, key, members"""
        shard = int(np.searchsorted(self.starts, item, side="right")) - 1
        index, own = self.indexes[shard], item - int(self.starts[shard])
        return shard, index.key(own), index.members(own)

    def _read(self, item: int, chance: tuple[int, ...]) -> dict[str, Any] | Fault:
        shard, key, members = self._place(item)
        sample: dict[str, Any] = {"__key__": key}
        for field in self.config.fields or members:
            choices = field.split(";") if self.config.fields else [field]
            ending = next((e for e in choices if e in members), None)
            if ending is None:
                return Fault(self.paths[shard].name, key, f"has no {' or '.join(choices)}, only {', '.join(members)}")
            try:
                sample[choices[0]] = self._decode(ending, self._bytes(shard, *members[ending]), chance)
            except Exception as error:  # whatever a decoder says of broken bytes; one at fault itself fails on them all
                return Fault(self.paths[shard].name, f"{key}.{ending}", _reason(error))
        return sample

    def _decode(self, ending: str, data: bytes, chance: tuple[int, ...]) -> Any:
        if ending in self.decoders:
            return self.decoders[ending](data)
        kind = kind_of(ending)
        if kind is None:
            return data
        return decode_picture(data, self.config.look, chance) if kind.decode is None else kind.decode(data)

    def _bytes(self, shard: int, offset: int, length: int) -> bytes:
        """By place alone: threads and forked workers may share the open file."""
        file = self._open(self.paths[shard], self.indexes[shard].state)
        data = os.pread(file.fileno(), length, offset)
        while len(data) < length:
            more = os.pread(file.fileno(), length - len(data), offset + len(data))
            if not more:
                raise DataError(f"is cut short: {len(data):,} of {length:,} bytes")
            data += more
        return data

    # ---- what went wrong ----------------------------------------------------------------------------------------

    def _faults(self) -> Iterator[Fault]:
        for item in np.flatnonzero(self.fate == BAD).tolist():
            found = self._read(item, (item,))
            shard, key, _ = self._place(item)
            known = isinstance(found, Fault)
            yield found if known else Fault(self.paths[shard].name, key, "could not be read before, and can now")
        for path, index in zip(self.paths, self.indexes, strict=True):
            yield from (Fault(path.name, *fault) for fault in index.faults)

    def _weigh(self, bad: int, seen: int) -> None:
        share = self.config.tolerate
        if bad > self.config.patience and bad > share * seen:
            raise DataError(
                f"{bad:,} of {seen:,} samples cannot be read, and {share:.2%} are tolerated:{self._culprits()}",
                "mend or remove them, or tolerate more",
            )

    def _culprits(self) -> str:
        """The first few, a line each."""
        return "".join(f"\n  {fault}" for fault in islice(self._faults(), SHOWN))


def _open(path: Path, state: tuple[int, int]) -> BinaryIO:
    """The file that was indexed, and no other of its name. It is closed when the last reader lets go of it."""
    file = path.open("rb", buffering=0)
    if state_of(os.fstat(file.fileno())) != state:
        raise DataError("lies in a file that has changed since it was indexed")
    return file


def _reason(error: Exception) -> str:
    said = error.problem if isinstance(error, VitrailError) else f"{type(error).__name__}: {error}"
    return " ".join(said.split())[:200]


def _names(paths: tuple[Path, ...]) -> str:
    return ", ".join(str(path) for path in paths[:3]) + (" …" if len(paths) > 3 else "")
