"""Windows of episodes as a source of training samples.

Shapes: T frames of a window, H and W pixels, A numbers of an action.
"""

import math
import mmap
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from vitrail.config import Config, NonNegativeInt, PositiveInt
from vitrail.data.episodes.episode_dataset import EpisodeDataset
from vitrail.data.source_spec import DataSourceSpec
from vitrail.errors import ConfigError, DataError
from vitrail.registry import DATA_SOURCES

TEST_EVERY = 10  # every tenth episode is in the test split
TRANSITION_FIELDS = ("actions", "rewards")  # T frames have T − 1 of them
PARALLEL_DECODE_BYTES = 16 << 20  # bytes; smaller sets decode faster than processes start


class EpisodesConfig(Config, tag="episodes", tag_field="kind"):
    """Settings of a source of episode windows.

    folder         folder of episodes, recorded by `vitrail data make`
    window_length  frames of a window
    stride         frames from one window to the next
    split          train is nine of ten episodes, test is the tenth
    fields         what to read: frames, actions, rewards, or a track
    cache_bytes    episodes are decoded once and cached if all fields fit in this many bytes; forked workers share the
                   cache. Otherwise each window is decoded on access
    """

    folder: str
    window_length: PositiveInt = 16
    stride: PositiveInt = 1
    split: Literal["train", "test", "all"] = "train"
    fields: tuple[str, ...] = ("frames", "actions")
    cache_bytes: NonNegativeInt = 256 << 20

    def __post_init__(self) -> None:
        if not self.fields:
            raise ConfigError("fields is empty", 'give at least one, such as "frames"')


class EpisodeSource:
    """Map an item to a window: {"frames": uint8 (T, H, W, 3), "actions": int64 (T − 1,) or float32 (T − 1, A), …}.

    Action t leads from frame t to frame t + 1.
    """

    def __init__(self, config: EpisodesConfig):
        self.config, self.episodes = config, EpisodeDataset(config.folder)
        self.episodes.check_fields(config.fields)
        numbers = np.arange(len(self.episodes))
        if config.split != "all":
            numbers = numbers[(numbers % TEST_EVERY == TEST_EVERY - 1) == (config.split == "test")]
        windows = (self.episodes.lengths[numbers] - config.window_length) // config.stride + 1
        self.episode_numbers, self.window_ends = numbers, np.cumsum(np.maximum(windows, 0))
        if not len(self):
            raise DataError(
                f"{config.folder} has no window of {config.window_length} frames in split {config.split!r}",
                f"it has {len(self.episodes)} episodes of up to {self.episodes.lengths.max()} frames; "
                "record more, or use a smaller window_length",
            )
        self._cache: dict[int, dict[str, np.ndarray]] = {}
        if self._total_bytes() <= config.cache_bytes:
            self._cache = self._decode_all()
            for array_ in (array for found in self._cache.values() for array in found.values()):
                array_.setflags(write=False)  # windows are views of the cache: copies took most of the time of a batch

    def _decode_all(self) -> dict[int, dict[str, np.ndarray]]:
        """Decode all episodes of the split. Large sets are decoded by processes into shared memory.

        Threads would not help: they wait for one another between frames this small.
        """
        numbers, lengths = self.episode_numbers.tolist(), self.episodes.lengths[self.episode_numbers].tolist()
        first_window = self._read_window(numbers[0], 0, 1)
        buffers = {name: self._allocate_shared(sum(lengths), array) for name, array in first_window.items()}
        starts = dict(zip(numbers, np.cumsum([0, *lengths[:-1]]).tolist(), strict=True))
        cache = {
            number: {
                name: buffer[(first := starts[number]) : first + length - (name in TRANSITION_FIELDS)]
                for name, buffer in buffers.items()
            }
            for number, length in zip(numbers, lengths, strict=True)
        }

        def bar(completed: Iterable[int]) -> None:
            for _ in tqdm(completed, "episodes", len(numbers), delay=2, leave=False, disable=None):
                pass

        num_processes = min(os.cpu_count() or 1, len(numbers))
        if (
            self._total_bytes() < PARALLEL_DECODE_BYTES
            or num_processes == 1
            or "fork" not in multiprocessing.get_all_start_methods()
        ):
            bar(self._decode_into(cache, number) for number in numbers)
            return cache
        fork = multiprocessing.get_context("fork")  # forked processes inherit the source and the shared memory
        with ProcessPoolExecutor(num_processes, fork, initializer=_init_worker, initargs=(self, cache)) as pool:
            bar(pool.map(_decode_in_worker, numbers, chunksize=4))
        return cache

    def _decode_into(self, buffers: dict[int, dict[str, np.ndarray]], number: int) -> int:
        for name, array in self._read_window(number, 0, int(self.episodes.lengths[number])).items():
            buffers[number][name][:] = array
        return number

    @staticmethod
    def _allocate_shared(count: int, like: np.ndarray) -> np.ndarray:
        """Allocate `count` rows like those of `like`, in memory shared with forked processes."""
        shape = (count, *like.shape[1:])
        return np.frombuffer(
            mmap.mmap(-1, max(1, math.prod(shape) * like.itemsize)), like.dtype, math.prod(shape)
        ).reshape(shape)

    @property
    def fingerprint(self) -> str:
        """Hash of the recorded episodes."""
        return self.episodes.fingerprint

    def __len__(self) -> int:
        return int(self.window_ends[-1]) if len(self.window_ends) else 0

    def locate(self, item: int) -> tuple[int, int]:
        """Return the episode and the first frame of a window."""
        if not 0 <= item < len(self):
            raise IndexError(item)
        row = int(np.searchsorted(self.window_ends, item, side="right"))
        before = int(self.window_ends[row - 1]) if row else 0
        return int(self.episode_numbers[row]), (item - before) * self.config.stride

    def __getitem__(self, item: int) -> dict[str, np.ndarray]:
        number, start = self.locate(item)
        stop = start + self.config.window_length
        if number not in self._cache:
            return self._read_window(number, start, self.config.window_length)
        cached = self._cache[number]
        return {name: array[start : stop - (name in TRANSITION_FIELDS)] for name, array in cached.items()}

    def _read_window(self, number: int, start: int, length: int) -> dict[str, np.ndarray]:
        return self.episodes.read_window(number, start, length, self.config.fields)

    def _total_bytes(self) -> int:
        """Total bytes of the split's fields, estimated from its first frame."""
        first_window = self._read_window(int(self.episode_numbers[0]), 0, 1)
        return sum(array.nbytes for array in first_window.values()) * int(
            self.episodes.lengths[self.episode_numbers].sum()
        )


_worker_state: list[Any] = []  # in a decoding process: the source and its buffers


def _init_worker(*state: Any) -> None:
    _worker_state[:] = state


def _decode_in_worker(number: int) -> int:
    source, cache = _worker_state
    return source._decode_into(cache, number)


DATA_SOURCES.register(
    "episodes", DataSourceSpec(EpisodesConfig, lambda config, _context: EpisodeSource(config), ("episodes",))
)
