"""An episode: what was seen, what was done, and what came of it; and the manifest of a folder of them.

T frames, H, W pixels, S numbers of a state, A numbers of an action
"""

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from vitrail.config import Config
from vitrail.errors import ConfigError, DataError

Video: TypeAlias = Literal["lossless", "small"]


class Choices(Config, tag="choices", tag_field="kind"):
    """Actions of which one is taken, by its number."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError("there is no action to choose from", "name at least one")

    def blank(self, count: int) -> np.ndarray:
        return np.zeros(count, np.int64)

    def check(self, actions: np.ndarray) -> None:
        """(N,) numbers of actions that there are"""
        if actions.dtype != np.int64 or actions.ndim != 1:
            raise DataError(
                f"actions are {actions.dtype} {actions.shape}", "choices are int64 (N,): the number of each"
            )
        if len(actions) and not 0 <= actions.min() <= actions.max() < len(self.names):
            raise DataError(
                f"actions number {actions.min()} … {actions.max()}",
                f"there are {len(self.names)}, counted from 0: {', '.join(self.names)}",
            )

    def say(self, action: np.ndarray) -> str:
        return self.names[int(action)]


class Dials(Config, tag="dials", tag_field="kind"):
    """Actions of several numbers, each with its range."""

    names: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        ranges = zip(self.low, self.high, strict=False)
        if not len(self.names) == len(self.low) == len(self.high) > 0 or any(a >= b for a, b in ranges):
            raise ConfigError(
                f"dials {self.names} from {self.low} to {self.high}", "give each a name, and a low below a high"
            )

    def blank(self, count: int) -> np.ndarray:
        return np.zeros((count, len(self.names)), np.float32)

    def check(self, actions: np.ndarray) -> None:
        """(N, A) numbers within their ranges"""
        if actions.dtype != np.float32 or actions.shape[1:] != (len(self.names),):
            raise DataError(
                f"actions are {actions.dtype} {actions.shape}",
                f"dials are float32 (N, {len(self.names)}): {', '.join(self.names)}",
            )
        low, high = (np.array(ends, np.float32) for ends in (self.low, self.high))
        inside = (actions >= low) & (actions <= high)
        if not inside.all():
            row, column = np.argwhere(~inside)[0]
            raise DataError(
                f"{self.names[column]} is {actions[row, column]} in action {row}",
                f"its range is {self.low[column]:g} … {self.high[column]:g}",
            )

    def say(self, action: np.ndarray) -> str:
        return " ".join(f"{name} {value:.3g}" for name, value in zip(self.names, action, strict=True))


Actions: TypeAlias = Choices | Dials


class Track(NamedTuple):
    """Something that is known of every frame: its axes behind T, the types it may have, and what it means."""

    axes: str
    dtypes: tuple[str, ...]
    says: str


TRACKS = {
    "state": Track("S", ("float32",), "what the agent knows of itself; the manifest names each number"),
    "depth": Track("HW", ("uint8", "uint16", "float16", "float32"), "distance, in the world's own unit"),
    "normals": Track("HW3", ("int8", "float16", "float32"), "which way a surface faces: x right, y down, z ahead"),
    "labels": Track(
        "HW", ("uint8", "uint16"), "which kind of thing a pixel belongs to; the manifest names each number"
    ),
    "camera": Track("44", ("float32",), "from the world to the camera"),
}


@dataclass(frozen=True, eq=False)
class Episode:
    """T frames and what lies between them: action t leads from frame t to frame t + 1, and brings reward t."""

    frames: np.ndarray  # (T, H, W, 3) uint8; of 0 × 0 pixels where they are still to be drawn
    actions: np.ndarray  # (T − 1,) int64 or (T − 1, A) float32
    rewards: np.ndarray  # (T − 1,) float32
    ended: bool  # by itself, not because recording stopped
    text: str = ""
    tracks: dict[str, np.ndarray] = field(default_factory=dict)  # by a name of `TRACKS`, (T, …)
    unseen: float = 0.0  # the reward of an action that ended it before a second frame was shown

    def __post_init__(self) -> None:
        T = len(self.frames)
        if self.frames.ndim != 4 or self.frames.shape[3] != 3 or self.frames.dtype != np.uint8 or not T:
            raise DataError(f"frames are {self.frames.dtype} {self.frames.shape}", "give uint8 (T, H, W, 3), T ≥ 1")
        for name, array in (("actions", self.actions), ("rewards", self.rewards)):
            if len(array) != T - 1:
                raise DataError(
                    f"{T} frames have {len(array)} {name}", f"give {T - 1}: one between each frame and the next"
                )
        if self.rewards.dtype != np.float32 or self.rewards.ndim != 1:
            raise DataError(f"rewards are {self.rewards.dtype} {self.rewards.shape}", "give float32 (T − 1,)")
        for name, track in self.tracks.items():
            check_track(name, track, self.frames.shape)

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def dones(self) -> np.ndarray:
        """(T − 1,) whether an action ended the episode"""
        dones = np.zeros(len(self.actions), bool)
        dones[len(dones) - 1 :] = self.ended
        return dones


def check_track(name: str, track: np.ndarray, frames: tuple[int, ...]) -> None:
    """A track must be of a known kind and fit its frames' shape (T, H, W, 3)."""
    if name not in TRACKS:
        raise DataError(f"there is no track {name!r}", f"known: {', '.join(TRACKS)}")
    kind = TRACKS[name]
    sizes = {"H": frames[1], "W": frames[2], "3": 3, "4": 4}
    wanted = [sizes.get(axis) for axis in kind.axes]
    fits = track.ndim == 1 + len(wanted) and len(track) == frames[0]
    fits = fits and all(want in (None, size) for want, size in zip(wanted, track.shape[1:], strict=True))
    if not fits or str(track.dtype) not in kind.dtypes:
        raise DataError(
            f"{name} is {track.dtype} {track.shape} beside frames {frames}",
            f"give (T, {', '.join(kind.axes)}) in {' or '.join(kind.dtypes)}",
        )


# What a manifest may ask for. A film cannot be slower, and memory is taken by the others.
MOST_STEPS, MOST_PIXELS, MOST_FRAMES = 10**9, 4096, 1024
SLOWEST, FASTEST = 0.01, 1000.0  # actions a second


class Manifest(Config):
    """What the episodes of a folder share: how they were recorded, and what their numbers mean. Episode n is a function
    of this."""

    world: str
    seed: int
    policy: str
    steps: int  # at most
    repeat: int  # steps of the simulator that an action lasts
    side: int  # pixels; of the longer side
    rate: float  # actions a second
    actions: Actions
    state: tuple[str, ...]  # what the numbers of `state` are
    labels: tuple[str, ...]  # what the numbers in `labels` mean
    tracks: tuple[str, ...]
    drawn: bool  # frames are not stored: they are drawn from the state when they are read
    video: Video
    packages: tuple[str, ...]  # the simulator
    chunk: int = 64  # frames stored together: what a window is cut from
    version: int = 1

    def __post_init__(self) -> None:
        if self.version != 1:
            raise DataError(f"these episodes are of version {self.version}", "read them with a newer vitrail")
        if self.seed < 0 or self.steps < 1 or self.repeat < 1 or self.side < 8 or self.chunk < 1:
            raise ConfigError(
                f"episodes of seed {self.seed}, {self.steps} steps, {self.repeat} repeats, {self.side} pixels",
                "give a seed from 0 on, at least one step and repeat, and 8 pixels",
            )
        if max(self.steps, self.repeat) > MOST_STEPS or self.side > MOST_PIXELS or self.chunk > MOST_FRAMES:
            raise ConfigError(
                f"episodes of {self.steps} steps, {self.repeat} repeats, {self.side} pixels, {self.chunk} in a chunk",
                f"give at most {MOST_STEPS}, {MOST_STEPS}, {MOST_PIXELS} and {MOST_FRAMES}",
            )
        if not SLOWEST <= self.rate <= FASTEST:
            raise ConfigError(f"{self.rate:g} actions a second", f"give {SLOWEST:g} … {FASTEST:g}")
        if not re.fullmatch(r"[\w-][\w.-]*", self.world):  # it is part of the names of files
            raise ConfigError(f"a world called {self.world!r}", "give letters, digits, '-', '_' and '.'")
        for name in self.tracks:
            if name not in TRACKS:
                raise ConfigError(f"there is no track {name!r}", f"known: {', '.join(TRACKS)}")
