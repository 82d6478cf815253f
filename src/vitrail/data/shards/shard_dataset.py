"""Reads samples of shards in any order, by byte offset: sample = f(item).

An unreadable sample is replaced by another one, always the same, so the order stays a function. It is counted and
listed by `report`. The state of each sample is one byte of memory shared by all data workers.
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

from vitrail.config import Config, Fraction, NonNegativeInt
from vitrail.data.sampler import permute_index
from vitrail.data.shards.image_decoding import ImageTransform, decode_image, require_simplejpeg
from vitrail.data.shards.member_codecs import get_codec
from vitrail.data.shards.shard_index import ShardFault, get_file_state, load_index
from vitrail.data.shards.shard_paths import expand_paths
from vitrail.errors import ConfigError, DataError, VitrailError

READABLE, UNREADABLE = 1, 2
MAX_REPLACEMENTS = 100  # more unreadable samples in a row are not a coincidence
MAX_OPEN_FILES = 64  # most files kept open
MAX_FAULTS_SHOWN = 5  # faults listed in an error message


class ShardsConfig(Config):
    """Which shards to read, and how.

    paths               tar files, folders of them, or patterns ("train-{000..099}.tar", "*/part-*.tar")
    fields              endings to read, which every sample must have; "jpg;png" accepts either and names it "jpg".
                        All members if not given
    transform           how images are transformed; whole images if not given
    max_fault_fraction  training stops if more than this fraction of the samples read is unreadable,
    max_faults          and more than this number
    """

    paths: str | tuple[str, ...]
    fields: tuple[str, ...] = ()
    transform: ImageTransform | None = None
    max_fault_fraction: Fraction = 0.01
    max_faults: NonNegativeInt = 10

    def __post_init__(self) -> None:
        if any(not all(field.split(";")) for field in self.fields):
            raise ConfigError(f"shards have invalid fields: {self.fields}", 'give endings such as "jpg" or "jpg;png"')


@dataclass(frozen=True)
class ShardReport:
    """How many samples were read so far, by all data workers, and the faults."""

    num_samples: int
    num_read: int
    faults: tuple[ShardFault, ...]

    def __str__(self) -> str:
        count = len(self.faults)
        head = f"read {self.num_read:,} of {self.num_samples:,} samples, {count:,} fault{'s' if count != 1 else ''}"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])


class ShardDataset:
    """Map an item to a sample: {"__key__": name, field: value, …}.

    Text is str, JSON is an object, `cls` is int, `npy` is an array, an image is uint8 (H, W, 3), anything else is
    bytes. `decoders` adds decoders by ending: bytes → value. Workers may be forked or spawned; they share only the
    states of the samples.
    """

    def __init__(self, config: ShardsConfig, decoders: Mapping[str, Callable[[bytes], Any]] | None = None):
        self.config, self.decoders = config, dict(decoders or {})
        if config.transform is not None:
            require_simplejpeg()
        self.paths = expand_paths(config.paths)
        self.indexes = [load_index(path) for path in tqdm(self.paths, "index", delay=2, leave=False, disable=None)]
        self.shard_starts = np.cumsum([0, *map(len, self.indexes)])  # first item of each shard
        if not len(self):
            raise DataError(f"{_names(self.paths)} hold no samples", "check that the paths are correct")
        self.shared_states = torch.zeros(len(self), dtype=torch.uint8).share_memory_()
        self._init_process()
        num_faults = sum(len(index.faults) for index in self.indexes)
        self._check_limits(num_faults, len(self) + num_faults)

    def __len__(self) -> int:
        return int(self.shard_starts[-1])

    def __getitem__(self, item: int) -> dict[str, Any]:
        return self.read_sample(item, (item,))

    def read_sample(self, item: int, seed: tuple[int, ...]) -> dict[str, Any]:
        """Read a sample, or its replacement if it is unreadable. `seed` determines a random transform."""
        if not 0 <= item < len(self):
            raise IndexError(item)
        for turn in range(MAX_REPLACEMENTS):
            if self.sample_states[item] != UNREADABLE:
                found = self._read(item, seed)
                self.sample_states[item] = UNREADABLE if isinstance(found, ShardFault) else READABLE
                if not isinstance(found, ShardFault):
                    return found
                self._check_limits(int((self.sample_states == UNREADABLE).sum()), int((self.sample_states > 0).sum()))
            item = permute_index(item, len(self), turn)
        raise DataError(
            f"{MAX_REPLACEMENTS} samples in a row are unreadable:{self._first_faults()}",
            "check the shards and the decoders",
        )

    def read_original(self, item: int) -> dict[str, Any]:
        """Read a sample without replacement. Raise `DataError` with its shard and member if it is unreadable."""
        found = self._read(item, (item,))
        if isinstance(found, ShardFault):
            raise DataError(str(found), "repair or remove the sample")
        return found

    def report(self) -> ShardReport:
        """Report the faults of all processes. Unreadable samples are read again to get the reasons."""
        return ShardReport(len(self), int((self.sample_states > 0).sum()), tuple(self._faults()))

    def __repr__(self) -> str:
        kinds = sorted({kind for index in self.indexes for kind in index.kinds})
        ignored = sum(index.ignored for index in self.indexes)
        summary = f"{len(self):,} samples of {', '.join(kinds)} in {len(self.paths):,} shards"
        return f"<{summary}{f'; {ignored:,} files without an ending are ignored' if ignored else ''}>"

    def _init_process(self) -> None:
        """Create what each process needs for itself."""
        self.sample_states = self.shared_states.numpy()  # of every sample: 0 if not read yet, READABLE or UNREADABLE
        self._open = lru_cache(MAX_OPEN_FILES)(_open)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("sample_states", "_open")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._init_process()

    # ---- reading ------------------------------------------------------------------------------------------------

    def _locate(self, item: int) -> tuple[int, str, dict[str, tuple[int, int]]]:
        """Return shard number, key and members of an item."""
        shard = int(np.searchsorted(self.shard_starts, item, side="right")) - 1
        index, sample = self.indexes[shard], item - int(self.shard_starts[shard])
        return shard, index.get_key(sample), index.get_members(sample)

    def _read(self, item: int, chance: tuple[int, ...]) -> dict[str, Any] | ShardFault:
        shard, key, members = self._locate(item)
        sample: dict[str, Any] = {"__key__": key}
        for field in self.config.fields or members:
            choices = field.split(";") if self.config.fields else [field]
            ending = next((e for e in choices if e in members), None)
            if ending is None:
                return ShardFault(
                    self.paths[shard].name, key, f"has no {' or '.join(choices)}, only {', '.join(members)}"
                )
            try:
                sample[choices[0]] = self._decode(ending, self._read_bytes(shard, *members[ending]), chance)
            # a decoder may raise anything on damaged bytes; a faulty decoder fails on all samples
            except Exception as error:
                return ShardFault(self.paths[shard].name, f"{key}.{ending}", _reason(error))
        return sample

    def _decode(self, ending: str, data: bytes, chance: tuple[int, ...]) -> Any:
        if ending in self.decoders:
            return self.decoders[ending](data)
        kind = get_codec(ending)
        if kind is None:
            return data
        return decode_image(data, self.config.transform, chance) if kind.decode is None else kind.decode(data)

    def _read_bytes(self, shard: int, offset: int, length: int) -> bytes:
        """Read bytes by offset, without a file position: threads and forked workers may share the open file."""
        file = self._open(self.paths[shard], self.indexes[shard].file_state)
        data = os.pread(file.fileno(), length, offset)
        while len(data) < length:
            more = os.pread(file.fileno(), length - len(data), offset + len(data))
            if not more:
                raise DataError(f"is truncated: {len(data):,} of {length:,} bytes")
            data += more
        return data

    # ---- faults -------------------------------------------------------------------------------------------------

    def _faults(self) -> Iterator[ShardFault]:
        for item in np.flatnonzero(self.sample_states == UNREADABLE).tolist():
            found = self._read(item, (item,))
            shard, key, _ = self._locate(item)
            known = isinstance(found, ShardFault)
            yield (
                found
                if known
                else ShardFault(self.paths[shard].name, key, "was unreadable before, but is readable now")
            )
        for path, index in zip(self.paths, self.indexes, strict=True):
            yield from (ShardFault(path.name, *fault) for fault in index.faults)

    def _check_limits(self, bad: int, num_read: int) -> None:
        """Raise `DataError` if there are too many faults."""
        limit = self.config.max_fault_fraction
        if bad > self.config.max_faults and bad > limit * num_read:
            raise DataError(
                f"{bad:,} of {num_read:,} samples are unreadable, more than the limit of {limit:.2%}:"
                f"{self._first_faults()}",
                "repair or remove them, or raise max_fault_fraction",
            )

    def _first_faults(self) -> str:
        """Format the first few faults, one on each line."""
        return "".join(f"\n  {fault}" for fault in islice(self._faults(), MAX_FAULTS_SHOWN))


def _open(path: Path, state: tuple[int, int]) -> BinaryIO:
    """Open a shard, and check that it has not changed since it was indexed. It is closed with its last reference."""
    file = path.open("rb", buffering=0)
    if get_file_state(os.fstat(file.fileno())) != state:
        raise DataError("is in a file that has changed since it was indexed")
    return file


def _reason(error: Exception) -> str:
    message = error.problem if isinstance(error, VitrailError) else f"{type(error).__name__}: {error}"
    return " ".join(message.split())[:200]


def _names(paths: tuple[Path, ...]) -> str:
    return ", ".join(str(path) for path in paths[:3]) + (" …" if len(paths) > 3 else "")
