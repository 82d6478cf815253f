"""Episodes (observations, actions, rewards), action spaces, and the manifest of a folder of episodes.

Shapes: T frames, H and W pixels, S numbers of a state, A numbers of an action.
"""

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from vitrail.config import Config
from vitrail.errors import ConfigError, DataError

VideoQuality: TypeAlias = Literal["lossless", "small"]


class DiscreteActions(Config, tag="choices", tag_field="kind"):
    """Discrete action space: one of several named actions, by its number."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError("a discrete action space has no actions", "name at least one")

    def make_zeros(self, count: int) -> np.ndarray:
        """Return `count` zero actions, int64 (N,)."""
        return np.zeros(count, np.int64)

    def check_actions(self, actions: np.ndarray) -> None:
        """Check that actions are int64 (N,) and valid action numbers."""
        if actions.dtype != np.int64 or actions.ndim != 1:
            raise DataError(f"actions are {actions.dtype} {actions.shape}", "give action numbers as int64 (N,)")
        if len(actions) and not 0 <= actions.min() <= actions.max() < len(self.names):
            raise DataError(
                f"actions are numbered {actions.min()} … {actions.max()}",
                f"there are {len(self.names)} actions, numbered from 0: {', '.join(self.names)}",
            )

    def describe(self, action: np.ndarray) -> str:
        """Return the name of an action."""
        return self.names[int(action)]


class ContinuousActions(Config, tag="dials", tag_field="kind"):
    """Continuous action space: several named numbers, each with a range."""

    names: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        ranges = zip(self.low, self.high, strict=False)
        if not len(self.names) == len(self.low) == len(self.high) > 0 or any(a >= b for a, b in ranges):
            raise ConfigError(
                f"actions {self.names} range from {self.low} to {self.high}",
                "give each a name, and a low that is below its high",
            )

    def make_zeros(self, count: int) -> np.ndarray:
        """Return `count` zero actions, float32 (N, A)."""
        return np.zeros((count, len(self.names)), np.float32)

    def check_actions(self, actions: np.ndarray) -> None:
        """Check that actions are float32 (N, A) and within their ranges."""
        if actions.dtype != np.float32 or actions.shape[1:] != (len(self.names),):
            raise DataError(
                f"actions are {actions.dtype} {actions.shape}",
                f"give float32 (N, {len(self.names)}): {', '.join(self.names)}",
            )
        low, high = (np.array(ends, np.float32) for ends in (self.low, self.high))
        inside = (actions >= low) & (actions <= high)
        if not inside.all():
            row, column = np.argwhere(~inside)[0]
            raise DataError(
                f"{self.names[column]} is {actions[row, column]} in action {row}",
                f"its range is {self.low[column]:g} … {self.high[column]:g}",
            )

    def describe(self, action: np.ndarray) -> str:
        """Format an action as names and values."""
        return " ".join(f"{name} {value:.3g}" for name, value in zip(self.names, action, strict=True))


ActionSpace: TypeAlias = DiscreteActions | ContinuousActions


class TrackSpec(NamedTuple):
    """A quantity recorded for every frame: its axes after T, its permitted types and its meaning."""

    axes: str
    dtypes: tuple[str, ...]
    description: str


TRACKS = {
    "state": TrackSpec("S", ("float32",), "state of the agent; the manifest names each number"),
    "depth": TrackSpec("HW", ("uint8", "uint16", "float16", "float32"), "distance, in the world's own unit"),
    "normals": TrackSpec("HW3", ("int8", "float16", "float32"), "surface normals: x right, y down, z forward"),
    "labels": TrackSpec("HW", ("uint8", "uint16"), "kind of object at each pixel; the manifest names each number"),
    "camera": TrackSpec("44", ("float32",), "world-to-camera matrix"),
}


@dataclass(frozen=True, eq=False)
class Episode:
    """T frames and the transitions between them: action t leads from frame t to frame t + 1 and yields reward t."""

    frames: np.ndarray  # (T, H, W, 3) uint8; 0 × 0 pixels if frames are rendered when they are read
    actions: np.ndarray  # (T − 1,) int64 or (T − 1, A) float32
    rewards: np.ndarray  # (T − 1,) float32
    terminated: bool  # the episode ended by itself; recording was not truncated
    task: str = ""
    tracks: dict[str, np.ndarray] = field(default_factory=dict)  # keys are names of `TRACKS`, values (T, …)
    unobserved_reward: float = 0.0  # reward of an action that ended the episode before a second frame was observed

    def __post_init__(self) -> None:
        T = len(self.frames)
        if self.frames.ndim != 4 or self.frames.shape[3] != 3 or self.frames.dtype != np.uint8 or not T:
            raise DataError(f"frames are {self.frames.dtype} {self.frames.shape}", "give uint8 (T, H, W, 3), T ≥ 1")
        for name, array in (("actions", self.actions), ("rewards", self.rewards)):
            if len(array) != T - 1:
                raise DataError(f"{T} frames come with {len(array)} {name}", f"give {T - 1}: one for each transition")
        if self.rewards.dtype != np.float32 or self.rewards.ndim != 1:
            raise DataError(f"rewards are {self.rewards.dtype} {self.rewards.shape}", "give float32 (T − 1,)")
        for name, track in self.tracks.items():
            check_track(name, track, self.frames.shape)

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def dones(self) -> np.ndarray:
        """Whether each action ended the episode, (T − 1,)."""
        dones = np.zeros(len(self.actions), bool)
        dones[len(dones) - 1 :] = self.terminated
        return dones


def check_track(name: str, track: np.ndarray, frames: tuple[int, ...]) -> None:
    """Check that a track is of a known kind and fits the frames' shape (T, H, W, 3)."""
    if name not in TRACKS:
        raise DataError(f"unknown track {name!r}", f"known: {', '.join(TRACKS)}")
    spec = TRACKS[name]
    sizes = {"H": frames[1], "W": frames[2], "3": 3, "4": 4}
    expected = [sizes.get(axis) for axis in spec.axes]
    is_valid = track.ndim == 1 + len(expected) and len(track) == frames[0]
    is_valid = is_valid and all(
        expected_size in (None, size) for expected_size, size in zip(expected, track.shape[1:], strict=True)
    )
    if not is_valid or str(track.dtype) not in spec.dtypes:
        raise DataError(
            f"{name} is {track.dtype} {track.shape} for frames of shape {frames}",
            f"give (T, {', '.join(spec.axes)}) in {' or '.join(spec.dtypes)}",
        )


# Limits of a manifest. A video file cannot store a lower rate; the others bound memory.
MAX_STEPS, MAX_PIXELS, MAX_FRAMES = 10**9, 4096, 1024
MIN_RATE, MAX_RATE = 0.01, 1000.0  # actions per second


class Manifest(Config):
    """Settings shared by all episodes of a folder: how they were recorded, and what their numbers mean.

    Episode n is a function of the manifest and n. Field names are the keys of `episodes.json`.
    """

    world: str
    seed: int
    policy: str
    steps: int  # most actions of an episode
    repeat: int  # simulator steps for each action
    side: int  # pixels of the longer side
    rate: float  # actions per second
    actions: ActionSpace
    state: tuple[str, ...]  # names of the numbers in `state`
    labels: tuple[str, ...]  # names of the numbers in `labels`
    tracks: tuple[str, ...]
    drawn: bool  # frames are not stored; they are rendered from the state when they are read
    video: VideoQuality
    packages: tuple[str, ...]  # the simulator's packages
    chunk: int = 64  # frames stored together; a window reads whole chunks
    version: int = 1

    def __post_init__(self) -> None:
        if self.version != 1:
            raise DataError(f"the episodes have format version {self.version}", "read them with a newer vitrail")
        if self.seed < 0 or self.steps < 1 or self.repeat < 1 or self.side < 8 or self.chunk < 1:
            raise ConfigError(
                f"episodes have seed {self.seed}, {self.steps} steps, frame skip {self.repeat}, {self.side} pixels",
                "give a seed from 0 on, at least one step, a frame skip of at least 1, and at least 8 pixels",
            )
        if max(self.steps, self.repeat) > MAX_STEPS or self.side > MAX_PIXELS or self.chunk > MAX_FRAMES:
            raise ConfigError(
                f"episodes have {self.steps} steps, frame skip {self.repeat}, {self.side} pixels, chunk {self.chunk}",
                f"give at most {MAX_STEPS}, {MAX_STEPS}, {MAX_PIXELS} and {MAX_FRAMES}",
            )
        if not MIN_RATE <= self.rate <= MAX_RATE:
            raise ConfigError(f"the rate is {self.rate:g} actions per second", f"give {MIN_RATE:g} … {MAX_RATE:g}")
        if not re.fullmatch(r"[\w-][\w.-]*", self.world):  # the name is part of file names
            raise ConfigError(f"invalid world name {self.world!r}", "use letters, digits, '-', '_' and '.'")
        for name in self.tracks:
            if name not in TRACKS:
                raise ConfigError(f"unknown track {name!r}", f"known: {', '.join(TRACKS)}")
