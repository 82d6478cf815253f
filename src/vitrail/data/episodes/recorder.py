"""Records episodes of worlds into folders, in parallel and resumable. Episode n of a seed is the same on
every machine."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vitrail.config import Config, Seed
from vitrail.data.episodes.episode import Episode, Manifest, VideoQuality
from vitrail.data.episodes.episode_dataset import MANIFEST_FILE, is_episode_folder, read_manifest
from vitrail.data.episodes.episode_sample import to_sample
from vitrail.data.episodes.frame_encoding import require_av
from vitrail.data.episodes.simulators import Simulator, open_simulator, step_repeated
from vitrail.data.episodes.worlds import WORLDS
from vitrail.data.shards.shard_writer import write_shards
from vitrail.errors import ConfigError, DataError, suggest_name

EPISODES_PER_SHARD = 100  # episodes; an interrupted run repeats fewer than this


class RecordConfig(Config):
    """What to record. A setting that is not given is the world's default.

    world          name in `WORLDS`
    seed           seed of the first episode; other seeds share no episodes
    policy         name of a policy of the world
    steps          most actions of an episode
    frame_skip     simulator steps for each action
    image_size     pixels of the longer side
    video_quality  lossless or small
    """

    world: str
    seed: Seed = 0
    policy: str | None = None
    steps: int | None = None
    frame_skip: int = 1
    image_size: int | None = None
    video_quality: VideoQuality = "lossless"

    def build_manifest(self) -> Manifest:
        """Build the manifest of the folder, with the world's defaults filled in."""
        if self.world not in WORLDS:
            raise ConfigError(f"unknown world {self.world!r}", suggest_name(self.world, WORLDS))
        world = WORLDS[self.world]
        policy = self.policy or next(iter(world.policies))
        if policy not in world.policies:
            raise ConfigError(f"{self.world} has no policy {policy!r}", suggest_name(policy, world.policies))
        side = world.image_size if self.image_size is None else self.image_size
        if side != world.image_size and not world.supports_any_size:
            raise ConfigError(f"{self.world} does not support {side} pixels", f"use its own size, {world.image_size}")
        if self.frame_skip < 1:
            raise ConfigError(f"frame_skip is {self.frame_skip}", "use at least 1")
        return Manifest(
            world=self.world,
            seed=self.seed,
            policy=policy,
            steps=world.max_steps if self.steps is None else self.steps,
            repeat=self.frame_skip,
            side=side,
            rate=world.control_rate_hz / self.frame_skip,
            actions=world.action_space,
            state=world.state_names,
            labels=world.label_names,
            tracks=world.tracks,
            drawn=world.render is not None,
            video=self.video_quality,
            packages=world.packages,
        )


def record_episodes(
    config: RecordConfig,
    folder: Path,
    *,
    episodes: int,
    num_workers: int = 1,
    episodes_per_shard: int = EPISODES_PER_SHARD,
    quiet: bool = False,
) -> list[Path]:
    """Write episodes 0 … `episodes` − 1 to a folder. A repeated call continues where the last one stopped."""
    if episodes < 1 or num_workers < 1 or episodes_per_shard < 1:
        raise ConfigError(
            f"{episodes} episodes, {num_workers} workers, {episodes_per_shard} episodes per shard",
            "give at least one of each",
        )
    manifest = config.build_manifest()
    require_av()
    _prepare_folder(folder, manifest)
    with EpisodeRecorder(manifest, episodes, num_workers) as recording:
        return write_shards(recording, folder, name=manifest.world, max_samples=episodes_per_shard, quiet=quiet)


def _prepare_folder(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, or check that it equals the one in a folder that holds episodes already."""
    if is_episode_folder(folder) and any(folder.glob("*.tar")):
        existing = read_manifest(folder)
        if existing != manifest:
            wanted, found = manifest.to_dict(), existing.to_dict()
            name = next(name for name in wanted if wanted[name] != found[name])
            raise DataError(
                f"{folder} holds episodes with {name} {found[name]!r}, not {wanted[name]!r}",
                "record with the same settings, or into another folder",
            )
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{MANIFEST_FILE}.{os.getpid()}.partial"
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        partial.replace(folder / MANIFEST_FILE)
    except OSError as error:
        raise DataError(f"{folder} cannot be written to: {error.strerror}", "choose another folder") from error


class EpisodeRecorder:
    """Map a number to the shard sample of an episode. Threads record the next episodes ahead of time.

    Each thread has its own simulator. Simulators run in other processes and encoding releases the GIL, so threads run
    in parallel.
    """

    def __init__(self, manifest: Manifest, count: int, num_workers: int):
        self.manifest, self.episodes, self.prefetch = manifest, count, 2 * num_workers
        self.thread_local = threading.local()
        self.simulators: list[Any] = []
        self.pool = ThreadPoolExecutor(num_workers, "episodes")
        self.pending: dict[int, Future[dict[str, Any]]] = {}

    def __enter__(self) -> "EpisodeRecorder":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        if error is not None:  # a thread may be waiting for a simulator that does not respond
            for simulator in self.simulators:
                getattr(simulator, "kill", lambda: None)()
        self.pool.shutdown()
        for simulator in self.simulators:
            getattr(simulator, "close", lambda: None)()

    def __len__(self) -> int:
        return self.episodes

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(self.episodes))

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not 0 <= number < self.episodes:
            raise IndexError(number)
        for n in range(number, min(number + self.prefetch, self.episodes)):
            if n not in self.pending:
                self.pending[n] = self.pool.submit(self._record, n)
        return self.pending.pop(number).result()

    def _record(self, number: int) -> dict[str, Any]:
        if not hasattr(self.thread_local, "simulator"):
            self.thread_local.simulator = open_simulator(self.manifest.world, self.manifest.side)
            self.simulators.append(self.thread_local.simulator)
        return to_sample(play_episode(self.thread_local.simulator, self.manifest, number), self.manifest, number)


def play_episode(simulator: Simulator, manifest: Manifest, number: int) -> Episode:
    """Play one episode from its start. The result is a function of the manifest and the number."""
    world = WORLDS[manifest.world]
    rng = np.random.default_rng((manifest.seed, number))
    start_seed = int(rng.integers(1 << 31))
    policy = world.policies[manifest.policy](rng)
    observations, actions, rewards, terminated, unobserved_reward = [simulator.reset(start_seed)], [], [], False, 0.0
    while not terminated and len(actions) < manifest.steps:
        action = policy.select_action(observations[-1])
        observation, reward, terminated = step_repeated(simulator, action, manifest.repeat)
        if manifest.drawn or "frame" in observation:
            observations.append(observation)
            actions.append(action)
            rewards.append(reward)
        elif rewards:  # the last frame was not observed: its reward belongs to the last observed step
            rewards[-1] += reward
        else:
            unobserved_reward = reward
    shape = (len(actions), *manifest.actions.make_zeros(0).shape[1:])
    frames = (
        np.zeros((len(observations), 0, 0, 3), np.uint8)
        if manifest.drawn
        else np.stack([s["frame"] for s in observations])
    )
    return Episode(
        frames=frames,
        actions=np.array(actions, manifest.actions.make_zeros(0).dtype).reshape(shape),
        rewards=np.array(rewards, np.float32),
        terminated=terminated,
        task=world.task,
        tracks={name: np.stack([s[name] for s in observations]) for name in manifest.tracks},
        unobserved_reward=unobserved_reward,
    )
