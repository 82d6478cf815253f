"""Windows of episodes as a source of training samples.

T frames of a window, H, W pixels, A numbers of an action
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

from vitrail.config import Config
from vitrail.data.episodes.read import Episodes
from vitrail.errors import ConfigError, DataError

HELD_OUT = 10  # every tenth episode is kept for judging
BETWEEN = ("actions", "rewards")  # of T frames there are T − 1
LARGE = 16 << 20  # bytes: what is smaller is decoded before processes would have begun


class EpisodesConfig(Config, tag="episodes", tag_field="kind"):
    """Windows of `length` frames from a folder that `vitrail data make` recorded, `stride` frames apart.

    `part` says which episodes are read: training reads nine of ten, judging the tenth. Sets whose fields have no more
    than `hold` bytes are decoded once and kept, and forked data workers share them; of others each window is decoded
    when it is asked for.
    """

    folder: str
    length: int = 16
    stride: int = 1
    part: Literal["train", "test", "all"] = "train"
    fields: tuple[str, ...] = ("frames", "actions")
    hold: int = 256 << 20

    def __post_init__(self) -> None:
        if self.length < 1 or self.stride < 1 or self.hold < 0 or not self.fields:
            raise ConfigError(
                f"windows of {self.length} frames every {self.stride}, of the fields {self.fields}, {self.hold} held",
                "give at least one frame, stride and field, and bytes from 0 on",
            )


class EpisodeSource:
    """item → {"frames": uint8 (T, H, W, 3), "actions": int64 (T − 1,) or float32 (T − 1, A), …}: action t leads from
    frame t to frame t + 1."""

    def __init__(self, config: EpisodesConfig):
        self.config, self.episodes = config, Episodes(config.folder)
        self.episodes.check(config.fields)
        wanted = np.arange(len(self.episodes))
        if config.part != "all":
            wanted = wanted[(wanted % HELD_OUT == HELD_OUT - 1) == (config.part == "test")]
        windows = (self.episodes.lengths[wanted] - config.length) // config.stride + 1
        self.wanted, self.ends = wanted, np.cumsum(np.maximum(windows, 0))
        if not len(self):
            raise DataError(
                f"{config.folder} holds no window of {config.length} frames to {config.part} on",
                f"its episodes have up to {self.episodes.lengths.max()} frames, and there are {len(self.episodes)}; "
                "record more, or ask for shorter windows",
            )
        self._held: dict[int, dict[str, np.ndarray]] = {}
        if self._bytes() <= config.hold:
            self._held = self._decoded()
            for held in (array for found in self._held.values() for array in found.values()):
                held.setflags(write=False)  # windows are views of it: to copy each took most of the time of a batch

    def _decoded(self) -> dict[int, dict[str, np.ndarray]]:
        """All that is wanted, by number. A large set is decoded by processes, into memory that they share: threads wait
        for one another between frames this small."""
        numbers, lengths = self.wanted.tolist(), self.episodes.lengths[self.wanted].tolist()
        one = self._read(numbers[0], 0, 1)
        rows = {name: self._room(sum(lengths), array) for name, array in one.items()}
        starts = dict(zip(numbers, np.cumsum([0, *lengths[:-1]]).tolist(), strict=True))
        held = {
            number: {name: a[(at := starts[number]) : at + length - (name in BETWEEN)] for name, a in rows.items()}
            for number, length in zip(numbers, lengths, strict=True)
        }

        def bar(done: Iterable[int]) -> None:
            for _ in tqdm(done, "episodes", len(numbers), delay=2, leave=False, disable=None):
                pass

        jobs = min(os.cpu_count() or 1, len(numbers))
        if self._bytes() < LARGE or jobs == 1 or "fork" not in multiprocessing.get_all_start_methods():
            bar(self._fill(held, number) for number in numbers)
            return held
        fork = multiprocessing.get_context("fork")  # with all that they need, and the memory, as it is
        with ProcessPoolExecutor(jobs, fork, initializer=_share, initargs=(self, held)) as pool:
            bar(pool.map(_fill_shared, numbers, chunksize=4))
        return held

    def _fill(self, held: dict[int, dict[str, np.ndarray]], number: int) -> int:
        for name, array in self._read(number, 0, int(self.episodes.lengths[number])).items():
            held[number][name][:] = array
        return number

    @staticmethod
    def _room(count: int, like: np.ndarray) -> np.ndarray:
        """Empty rows of the shape of those of `like`, which processes that are forked share."""
        shape = (count, *like.shape[1:])
        return np.frombuffer(
            mmap.mmap(-1, max(1, math.prod(shape) * like.itemsize)), like.dtype, math.prod(shape)
        ).reshape(shape)

    @property
    def fingerprint(self) -> str:
        """Changes with what was recorded."""
        return self.episodes.fingerprint

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def place(self, item: int) -> tuple[int, int]:
        """Episode and first frame of a window."""
        if not 0 <= item < len(self):
            raise IndexError(item)
        row = int(np.searchsorted(self.ends, item, side="right"))
        before = int(self.ends[row - 1]) if row else 0
        return int(self.wanted[row]), (item - before) * self.config.stride

    def __getitem__(self, item: int) -> dict[str, np.ndarray]:
        number, start = self.place(item)
        stop = start + self.config.length
        if number not in self._held:
            return self._read(number, start, self.config.length)
        held = self._held[number]
        return {name: a[start : stop - (name in BETWEEN)] for name, a in held.items()}

    def _read(self, number: int, start: int, length: int) -> dict[str, np.ndarray]:
        return self.episodes.window(number, start, length, self.config.fields)

    def _bytes(self) -> int:
        """Of all that is wanted, by its first frame."""
        one = self._read(int(self.wanted[0]), 0, 1)
        return sum(a.nbytes for a in one.values()) * int(self.episodes.lengths[self.wanted].sum())


_shared: list[Any] = []  # of a process that decodes: the source, and where to put what it finds


def _share(*given: Any) -> None:
    _shared[:] = given


def _fill_shared(number: int) -> int:
    source, held = _shared
    return source._fill(held, number)
