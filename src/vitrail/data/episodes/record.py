"""Worlds → folders of episodes: in parallel, resumable, and episode n of a seed the same whoever records it."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vitrail.config import Config
from vitrail.data.episodes.episode import Episode, Manifest, Video
from vitrail.data.episodes.film import need_av
from vitrail.data.episodes.pack import to_sample
from vitrail.data.episodes.read import MANIFEST, are_episodes, read_manifest
from vitrail.data.episodes.remote import Simulator, lasting, open_simulator
from vitrail.data.episodes.worlds import WORLDS
from vitrail.data.shards.write import write_shards
from vitrail.errors import ConfigError, DataError, nearest

PER_SHARD = 100  # episodes: what a killed run does over is less than this


class RecordConfig(Config):
    """What to record. What is not given is the world's own."""

    world: str
    seed: int = 0
    policy: str | None = None
    steps: int | None = None
    repeat: int = 1  # steps of the simulator that an action lasts
    side: int | None = None
    video: Video = "lossless"

    def manifest(self) -> Manifest:
        if self.world not in WORLDS:
            raise ConfigError(f"there is no world {self.world!r}", nearest(self.world, WORLDS))
        world = WORLDS[self.world]
        policy = self.policy or next(iter(world.policies))
        if policy not in world.policies:
            raise ConfigError(f"nobody plays {self.world} as {policy!r}", nearest(policy, world.policies))
        side = world.side if self.side is None else self.side
        if side != world.side and not world.any_side:
            raise ConfigError(f"{self.world} with a side of {side} pixels", f"its pictures have {world.side}")
        if self.repeat < 1:
            raise ConfigError(f"actions that last {self.repeat} steps", "repeat them at least once")
        return Manifest(
            world=self.world,
            seed=self.seed,
            policy=policy,
            steps=world.steps if self.steps is None else self.steps,
            repeat=self.repeat,
            side=side,
            rate=world.rate / self.repeat,
            actions=world.actions,
            state=world.state,
            labels=world.labels,
            tracks=world.tracks,
            drawn=world.draw is not None,
            video=self.video,
            packages=world.packages,
        )


def record(
    config: RecordConfig,
    folder: Path,
    *,
    episodes: int,
    workers: int = 1,
    per_shard: int = PER_SHARD,
    quiet: bool = False,
) -> list[Path]:
    """Write episodes 0 … `episodes` − 1 to a folder. Called again, it goes on where it stopped, to the same files."""
    if episodes < 1 or workers < 1 or per_shard < 1:
        raise ConfigError(f"{episodes} episodes by {workers} workers, {per_shard} a shard", "give at least one of each")
    manifest = config.manifest()
    need_av()
    _begin(folder, manifest)
    with Recording(manifest, episodes, workers) as recording:
        return write_shards(recording, folder, name=manifest.world, count=per_shard, quiet=quiet)


def _begin(folder: Path, manifest: Manifest) -> None:
    """Leave the manifest in the folder, or find the same there if anything was recorded by it."""
    if are_episodes(folder) and any(folder.glob("*.tar")):
        other = read_manifest(folder)
        if other != manifest:
            mine, theirs = manifest.plain(), other.plain()
            name = next(name for name in mine if mine[name] != theirs[name])
            raise DataError(
                f"{folder} holds episodes whose {name} is {theirs[name]!r}, not {mine[name]!r}",
                "record with the same settings, or into another folder",
            )
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{MANIFEST}.{os.getpid()}.partial"
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        partial.replace(folder / MANIFEST)
    except OSError as error:
        raise DataError(f"{folder} cannot be written to: {error.strerror}", "choose another folder") from error


class Recording:
    """number → the sample of an episode. Threads make those behind it meanwhile, each with a simulator of its own: the
    simulating is done in other processes, and encoding lets other threads run."""

    def __init__(self, manifest: Manifest, count: int, workers: int):
        self.manifest, self.episodes, self.ahead = manifest, count, 2 * workers
        self.own = threading.local()
        self.opened: list[Any] = []
        self.pool = ThreadPoolExecutor(workers, "episodes")
        self.waiting: dict[int, Future[dict[str, Any]]] = {}

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        if error is not None:  # a thread may wait for a simulator that never answers
            for simulator in self.opened:
                getattr(simulator, "kill", lambda: None)()
        self.pool.shutdown()
        for simulator in self.opened:
            getattr(simulator, "close", lambda: None)()

    def __len__(self) -> int:
        return self.episodes

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(self.episodes))

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not 0 <= number < self.episodes:
            raise IndexError(number)
        for n in range(number, min(number + self.ahead, self.episodes)):
            if n not in self.waiting:
                self.waiting[n] = self.pool.submit(self._make, n)
        return self.waiting.pop(number).result()

    def _make(self, number: int) -> dict[str, Any]:
        if not hasattr(self.own, "simulator"):
            self.own.simulator = open_simulator(self.manifest.world, self.manifest.side)
            self.opened.append(self.own.simulator)
        return to_sample(play(self.own.simulator, self.manifest, number), self.manifest, number)


def play(simulator: Simulator, manifest: Manifest, number: int) -> Episode:
    """One episode from its beginning: a function of the manifest and its number."""
    world = WORLDS[manifest.world]
    chance = np.random.default_rng((manifest.seed, number))
    start = int(chance.integers(1 << 31))
    policy = world.policies[manifest.policy](chance)
    seen, actions, rewards, ended, unseen = [simulator.reset(start)], [], [], False, 0.0
    while not ended and len(actions) < manifest.steps:
        action = policy.act(seen[-1])
        now, reward, ended = lasting(simulator, action, manifest.repeat)
        if manifest.drawn or "frame" in now:
            seen.append(now)
            actions.append(action)
            rewards.append(reward)
        elif rewards:  # the end was not shown: what it brought belongs to the last step that was
            rewards[-1] += reward
        else:
            unseen = reward
    shape = (len(actions), *manifest.actions.blank(0).shape[1:])
    frames = np.zeros((len(seen), 0, 0, 3), np.uint8) if manifest.drawn else np.stack([s["frame"] for s in seen])
    return Episode(
        frames=frames,
        actions=np.array(actions, manifest.actions.blank(0).dtype).reshape(shape),
        rewards=np.array(rewards, np.float32),
        ended=ended,
        text=world.text,
        tracks={name: np.stack([s[name] for s in seen]) for name in manifest.tracks},
        unseen=unseen,
    )
