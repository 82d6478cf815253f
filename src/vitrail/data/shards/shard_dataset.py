"""Reads samples of shards in any order, by byte offset: sample = f(item).

An unreadable sample is replaced by another one, always the same, so the order stays a function. It is counted and
listed by `report`. The state of each sample is one byte of memory shared by all data workers.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from vitrail.config import Config, Fraction, NonNegativeInt
from vitrail.data.sample_faults import MAX_FAULTS_SHOWN, FaultTracker, SampleFault, SampleReport
from vitrail.data.shards.image_decoding import ImageTransform, decode_image, require_simplejpeg
from vitrail.data.shards.member_codecs import get_codec
from vitrail.data.shards.shard_file import RemoteFile, RemoteReadError, ShardFile, ShardReader
from vitrail.data.shards.shard_index import ShardIndex, load_index
from vitrail.data.shards.shard_paths import expand_shards
from vitrail.errors import ConfigError, DataError, VitrailError

MAX_OPEN_FILES = 64  # most files kept open
MAX_GAP_BYTES = 1 << 16  # between members of a remote sample that one request reads
INDEX_THREADS = 8  # that index remote shards


class ShardsConfig(Config):
    """Which shards to read, and how.

    paths               tar files, folders of them, patterns ("train-{000..099}.tar", "*/part-*.tar"), or URLs of these
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


class ShardDataset:
    """Map an item to a sample: {"__key__": name, field: value, …}.

    Text is str, JSON is an object, `cls` is int, `npy` is an array, an image is uint8 (H, W, 3), anything else is
    bytes. `decoders` adds decoders by ending: bytes → value. `convert` turns a sample into something else, with the
    seed of its transform. Workers may be forked or spawned; they share only the states of the samples.
    """

    def __init__(
        self,
        config: ShardsConfig,
        decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
        convert: Callable[[dict[str, Any], tuple[int, ...]], Any] | None = None,
    ):
        self.config, self.decoders, self.convert = config, dict(decoders or {}), convert
        if config.transform is not None:
            require_simplejpeg()
        self.paths = expand_shards(config.paths)
        self.indexes = _load_indexes(self.paths)
        self.shard_starts = np.cumsum([0, *map(len, self.indexes)])  # first item of each shard
        num_faults = sum(len(index.faults) for index in self.indexes)
        if not len(self):
            names = ", ".join(map(str, self.paths[:3])) + (" …" if len(self.paths) > 3 else "")
            faults = "".join(f"\n  {fault}" for fault in islice(self._index_faults(), MAX_FAULTS_SHOWN))
            raise DataError(f"{names} hold no samples{faults}", "check that the paths are correct")
        self.faults = FaultTracker(
            len(self), config.max_fault_fraction, config.max_faults, self._read, self._index_faults
        )
        self._init_process()
        self.faults.check_limits(num_faults, len(self) + num_faults)

    def __len__(self) -> int:
        return int(self.shard_starts[-1])

    def __getitem__(self, item: int) -> Any:
        return self.read_sample(item, (item,))

    def read_sample(self, item: int, seed: tuple[int, ...]) -> Any:
        """Read a sample, or its replacement if it is unreadable. `seed` determines a random transform."""
        return self.faults.read(item, seed)

    def read_original(self, item: int) -> Any:
        """Read a sample without replacement. Raise `DataError` with its shard and member if it is unreadable."""
        found = self._read(item, (item,))
        if isinstance(found, SampleFault):
            raise DataError(str(found), "repair or remove the sample")
        return found

    def report(self) -> SampleReport:
        """Report the faults of all processes. Unreadable samples are read again to get the reasons."""
        return self.faults.report()

    @property
    def fingerprint(self) -> str:
        """Hash of the names and sizes of the shards, and of the keys and sizes of their members."""
        digest = hashlib.blake2b(digest_size=8)
        for path, index in zip(self.paths, self.indexes, strict=True):
            digest.update(msgspec.json.encode([path.name, index.file_state[0], index.kinds]))
            digest.update(index.keys)
            digest.update(index.length.tobytes())
        return digest.hexdigest()

    def measure_members(self, kinds: Collection[str]) -> np.ndarray:
        """Return the bytes (N,) of the members of these kinds of each sample."""
        sizes = []
        for index in self.indexes:
            is_counted = np.array([kind in kinds for kind in index.kinds], dtype=bool)
            totals = np.concatenate([[0], np.cumsum(np.where(is_counted[index.kind], index.length, 0))])
            sizes.append(totals[index.first[1:]] - totals[index.first[:-1]])
        return np.concatenate(sizes)

    def __repr__(self) -> str:
        kinds = sorted({kind for index in self.indexes for kind in index.kinds})
        ignored = sum(index.ignored for index in self.indexes)
        summary = f"{len(self):,} samples of {', '.join(kinds)} in {len(self.paths):,} shards"
        return f"<{summary}{f'; {ignored:,} files without an ending are ignored' if ignored else ''}>"

    def _init_process(self) -> None:
        """Create what each process needs for itself."""
        self._open = lru_cache(MAX_OPEN_FILES)(ShardReader)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_open"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._init_process()

    # ---- reading ------------------------------------------------------------------------------------------------

    def _locate(self, item: int) -> tuple[int, str, dict[str, tuple[int, int]]]:
        """Return shard number, key and members of an item."""
        shard = int(np.searchsorted(self.shard_starts, item, side="right")) - 1
        index, sample = self.indexes[shard], item - int(self.shard_starts[shard])
        return shard, index.get_key(sample), index.get_members(sample)

    def _read(self, item: int, seed: tuple[int, ...]) -> Any:
        """Read a sample; a `SampleFault` if it is unreadable."""
        shard, key, members = self._locate(item)
        name, sample = self.paths[shard].name, {"__key__": key}
        endings: dict[str, str] = {}  # field → ending
        for field in self.config.fields or members:
            choices = field.split(";") if self.config.fields else [field]
            ending = next((e for e in choices if e in members), None)
            if ending is None:
                return SampleFault(name, key, f"has no {' or '.join(choices)}, only {', '.join(members)}")
            endings[choices[0]] = ending
        part = key
        # a decoder may raise anything on damaged bytes; a faulty decoder fails on all samples
        try:
            read = self._prepare_read(shard, [members[ending] for ending in endings.values()])
            for field, ending in endings.items():
                part = f"{key}.{ending}"
                sample[field] = self._decode(ending, read(*members[ending]), seed)
            part = key
            return sample if self.convert is None else self.convert(sample, seed)
        except RemoteReadError:
            raise
        except Exception as error:
            return SampleFault(name, part, _reason(error))

    def _prepare_read(self, shard: int, places: list[tuple[int, int]]) -> Callable[[int, int], bytes]:
        """Return a function offset, length → bytes. Members of a remote shard are adjacent: one request reads all."""
        reader = self._open(self.paths[shard], self.indexes[shard].file_state)
        if not reader.is_remote or len(places) < 2:
            return lambda offset, length: reader.read(length, offset)
        start = min(offset for offset, _ in places)
        whole = max(offset + length for offset, length in places) - start
        if whole > 2 * sum(length for _, length in places) + MAX_GAP_BYTES:
            return lambda offset, length: reader.read(length, offset)
        data = reader.read(whole, start)
        return lambda offset, length: data[offset - start : offset - start + length]

    def _decode(self, ending: str, data: bytes, seed: tuple[int, ...]) -> Any:
        if ending in self.decoders:
            return self.decoders[ending](data)
        kind = get_codec(ending)
        if kind is None:
            return data
        return decode_image(data, self.config.transform, seed) if kind.decode is None else kind.decode(data)

    def _index_faults(self) -> Iterator[SampleFault]:
        """Faults of the shards that were found when they were indexed."""
        for path, index in zip(self.paths, self.indexes, strict=True):
            yield from (SampleFault(path.name, *fault) for fault in index.faults)


def _load_indexes(shards: tuple[ShardFile, ...]) -> list[ShardIndex]:
    """Load or build all indexes. Those of remote shards are loaded by several threads."""
    progress = partial(tqdm, desc="index", total=len(shards), delay=2, leave=False, disable=None)
    if not any(isinstance(shard, RemoteFile) for shard in shards):
        return [load_index(shard) for shard in progress(shards)]
    with ThreadPoolExecutor(INDEX_THREADS, "index") as pool:
        return list(progress(pool.map(load_index, shards)))


def _reason(error: Exception) -> str:
    message = error.problem if isinstance(error, VitrailError) else f"{type(error).__name__}: {error}"
    return " ".join(message.split())[:200]
