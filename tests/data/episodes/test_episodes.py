"""Recorded episodes are read back unchanged, whole or by windows, for any number of workers and after interruptions."""

import io
import signal
import subprocess
import sys
import tarfile
import threading
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.episodes.pockets import POCKET, files
from vitrail.data.episodes import (
    ContinuousActions,
    DiscreteActions,
    Episode,
    EpisodeDataset,
    RecordConfig,
    record_episodes,
)
from vitrail.data.episodes.episode_dataset import MANIFEST_FILE
from vitrail.data.episodes.episode_sample import EpisodeMetadata, read_field, to_sample
from vitrail.data.episodes.frame_encoding import VIDEO_ENCODINGS, decode_frames, encode_frames
from vitrail.data.episodes.recorder import EpisodeRecorder, play_episode
from vitrail.data.episodes.simulators import open_simulator
from vitrail.data.shards import write_shards
from vitrail.data.shards.member_codecs import get_codec
from vitrail.errors import ConfigError, DataError

pytest.importorskip("av")


def is_same(one: Episode, other: Episode) -> bool:
    arrays = [(getattr(one, name), getattr(other, name)) for name in ("frames", "actions", "rewards")]
    arrays += [(one.tracks[name], other.tracks[name]) for name in one.tracks | other.tracks]
    return (one.terminated, one.task) == (other.terminated, other.task) and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in arrays
    )


# ---- the format -------------------------------------------------------------------------------------------------


@st.composite
def episodes(draw) -> Episode:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    T, H, W = draw(st.integers(1, 40)), draw(st.integers(1, 24)), draw(st.integers(8, 24))
    is_static = draw(st.booleans())  # noise, or nearly constant frames, which are encoded differently
    frames = rng.integers(0, 256, (1 if is_static else T, H, W, 3), np.uint8).repeat(T if is_static else 1, 0)
    frames[:, 0, 0, 0] += np.arange(T, dtype=np.uint8)
    tracks = {
        "state": rng.standard_normal((T, 3)).astype(np.float32),
        "depth": rng.standard_normal((T, H, W)).astype(np.float16),
        "labels": rng.integers(0, 9, (T, H, W), np.uint16),
        "normals": rng.integers(-128, 128, (T, H, W, 3), np.int8),
        "camera": rng.standard_normal((T, 4, 4)).astype(np.float32),
    }
    chosen_tracks = {name: tracks[name] for name in draw(st.sets(st.sampled_from(sorted(tracks))))}
    is_continuous = draw(st.booleans())
    actions = rng.random((T - 1, 2), np.float32) if is_continuous else rng.integers(0, 4, T - 1)
    rewards = rng.standard_normal(T - 1).astype(np.float32)
    return Episode(frames, actions, rewards, draw(st.booleans()), draw(st.text(max_size=9)), chosen_tracks)


@settings(max_examples=25)
@given(episode=episodes(), chunk=st.integers(1, 50), data=st.data())
def test_stored_windows_equal_slices(episode, chunk, data):
    dials = ContinuousActions(names=("a", "b"), low=(0, 0), high=(1, 1))
    actions = dials if episode.actions.ndim == 2 else DiscreteActions(names=("n", "e", "s", "w"))
    side, names = max(episode.frames.shape[1:3]), ("x", "y", "z")
    manifest = POCKET.build_manifest().replace(
        actions=actions, tracks=tuple(episode.tracks), chunk=chunk, side=side, state=names
    )
    sample = to_sample(episode, manifest, 7)
    about = EpisodeMetadata(**sample.pop("json"))
    metadata = (about.number, about.length, about.ended, about.text)
    assert metadata == (7, len(episode), episode.terminated, episode.task)
    del sample["__key__"]
    members = {end: v if isinstance(v, bytes) else get_codec(end).encode(v) for end, v in sample.items()}
    start = data.draw(st.integers(0, len(episode) - 1))
    stop = data.draw(st.integers(start + 1, len(episode)))
    wanted = {"frames": episode.frames, **episode.tracks}
    for name, whole in wanted.items():
        found = read_field(name, members.__getitem__, about, manifest, start, stop)
        assert found.dtype == whole.dtype and np.array_equal(found, whole[start:stop]), name
    for name, whole in (("actions", episode.actions), ("rewards", episode.rewards)):
        found = read_field(name, members.__getitem__, about, manifest, start, stop)
        assert found.dtype == whole.dtype and np.array_equal(found, whole[start : stop - 1]), name


def test_small_videos_are_close_and_smaller():
    at = np.linspace(0, 200, 48)
    frames = np.stack([np.stack([at[:, None] + at[None] / 4 + t] * 3, 2) for t in range(20)]).astype(np.uint8)
    small, exact = (encode_frames(frames, 10, VIDEO_ENCODINGS[how]) for how in ("small", "lossless"))
    assert len(small) < len(exact)
    assert np.abs(decode_frames(small, 3, 17, 48).astype(int) - frames[3:17]).mean() < 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actions": np.zeros(5, np.int64)}, "4 frames come with 5 actions"),
        ({"rewards": np.zeros(4, np.float32)}, "4 frames come with 4 rewards"),
        ({"rewards": np.zeros(3)}, "rewards are float64"),
        ({"frames": np.zeros((4, 8, 8), np.uint8)}, "frames are uint8"),
        ({"tracks": {"smell": np.zeros(4)}}, "unknown track 'smell'"),
        ({"tracks": {"depth": np.zeros((4, 8, 9), np.uint8)}}, "depth is uint8"),
        ({"tracks": {"labels": np.zeros((4, 8, 8), np.float32)}}, "labels is float32"),
        ({"tracks": {"state": np.zeros((3, 2), np.float32)}}, "state is float32"),
    ],
)
def test_inconsistent_episode_is_refused(change, message):
    valid = {
        "frames": np.zeros((4, 8, 8, 3), np.uint8),
        "actions": np.zeros(3, np.int64),
        "rewards": np.zeros(3, np.float32),
        "terminated": True,
    }
    assert Episode(**valid).dones.tolist() == [False, False, True]
    with pytest.raises(DataError, match=message):
        Episode(**valid | change)


def test_invalid_actions_are_refused():
    choices, dials = DiscreteActions(names=("left", "right")), ContinuousActions(names=("gas",), low=(0,), high=(1,))
    choices.check_actions(np.array([0, 1, 1]))
    with pytest.raises(DataError, match=r"actions are numbered 0 … 2"):
        choices.check_actions(np.array([0, 2]))
    with pytest.raises(DataError, match="actions are float32"):
        choices.check_actions(np.zeros(3, np.float32))
    with pytest.raises(DataError, match=r"gas is 2.0 in action 1"):
        dials.check_actions(np.array([[0], [2]], np.float32))
    with pytest.raises(DataError, match=r"actions are float32 \(3, 2\)"):
        dials.check_actions(np.zeros((3, 2), np.float32))


# ---- recording --------------------------------------------------------------------------------------------------


def test_episodes_do_not_depend_on_workers(made, tmp_path):
    record_episodes(POCKET, tmp_path / "three", episodes=25, num_workers=3, episodes_per_shard=10, quiet=True)
    assert files(tmp_path / "three") == files(made)
    simulator = open_simulator("pocket", 16)
    simulator.reset(99)
    alone = play_episode(simulator, POCKET.build_manifest(), 13)
    assert is_same(alone, EpisodeDataset(made)[13])
    assert not is_same(alone, EpisodeDataset(made)[12])
    assert not is_same(alone, play_episode(simulator, POCKET.replace(seed=1).build_manifest(), 13))


def test_resumed_recording_writes_the_same_files(made, tmp_path):
    record_episodes(POCKET, tmp_path, episodes=25, episodes_per_shard=10, quiet=True)
    for name in ("pocket-000001.tar", "pocket-000002.tar"):  # as if the recording had been killed while it wrote these
        (tmp_path / name).unlink()
    (tmp_path / ".pocket-000001.tar.partial").write_bytes(b"half of it")
    assert len(EpisodeDataset(tmp_path)) == 10  # finished shards can be read
    record_episodes(POCKET, tmp_path, episodes=25, num_workers=2, episodes_per_shard=10, quiet=True)
    assert files(tmp_path) == files(made)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.tar")}
    record_episodes(POCKET, tmp_path, episodes=25, episodes_per_shard=10, quiet=True)  # nothing is left to record
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.tar")} == before


# The command line, which waits before it renames a third shard, to be killed.
UNFINISHED = """
import pathlib, runpy, time
plain = pathlib.Path.replace
def replace(self, target):
    while target.suffix == ".tar" and len(list(target.parent.glob("*.tar"))) == 2:
        time.sleep(1)
    return plain(self, target)
pathlib.Path.replace = replace
runpy.run_module("vitrail", run_name="__main__")
"""


@pytest.mark.slow
def test_killed_recording_resumes(tmp_path):
    command = [sys.executable, "-m", "vitrail", "data", "make", "pocket", "-o"]
    options = ["--episodes", "220", "--steps", "20", "--side", "16", "--workers", "2"]
    unfinished = [sys.executable, "-c", UNFINISHED, *command[3:], str(tmp_path / "killed"), *options]
    process = subprocess.Popen(unfinished, stderr=subprocess.DEVNULL)
    while not list((tmp_path / "killed").glob("*.tar")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_shards = len(list((tmp_path / "killed").glob("*.tar")))
    for folder in ("killed", "whole"):
        subprocess.run([*command, str(tmp_path / folder), *options], check=True, capture_output=True)
    assert num_shards < 3 and files(tmp_path / "killed") == files(tmp_path / "whole")


def test_other_settings_need_another_folder(made):
    with pytest.raises(DataError, match="holds episodes with steps 40, not 41"):
        record_episodes(POCKET.replace(steps=41), made, episodes=25, episodes_per_shard=10)


def test_folder_without_episodes_accepts_other_settings(tmp_path):
    (tmp_path / MANIFEST_FILE).write_bytes(msgspec.json.encode(POCKET.replace(seed=5).build_manifest()))
    with pytest.raises(DataError, match="holds no episodes"):
        EpisodeDataset(tmp_path)
    record_episodes(POCKET, tmp_path, episodes=1, quiet=True)
    assert EpisodeDataset(tmp_path).manifest == POCKET.build_manifest()


def test_invalid_record_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="unknown world 'poket'"):
        record_episodes(RecordConfig(world="poket"), tmp_path, episodes=1)
    with pytest.raises(ConfigError, match="pocket has no policy 'expert'"):
        record_episodes(RecordConfig(world="pocket", policy="expert"), tmp_path, episodes=1)
    with pytest.raises(ConfigError, match="0 episodes, 1 workers"):
        record_episodes(POCKET, tmp_path, episodes=0)
    with pytest.raises(ConfigError, match="frame_skip is 0"):
        record_episodes(POCKET.replace(frame_skip=0), tmp_path, episodes=1)
    with pytest.raises(ConfigError, match=r"0\.005 actions per second"):
        record_episodes(POCKET.replace(frame_skip=1000), tmp_path, episodes=1)
    with pytest.raises(ConfigError, match="99 pixels"):
        record_episodes(RecordConfig(world="coinrun", image_size=99), tmp_path / "coin", episodes=1, quiet=True)


def test_frame_skip_repeats_actions():
    class Counter:
        def reset(self, seed):
            self.n = 0
            return self.seen()

        def step(self, action):
            self.n += 1
            return self.seen(), 1.0, self.n == 8

        def seen(self):
            picture = np.full((8, 8, 3), self.n, np.uint8)
            return {"frame": picture, "labels": picture[..., 0], "state": np.zeros(2, np.float32)}

    episode = play_episode(Counter(), POCKET.replace(frame_skip=3).build_manifest(), 0)
    assert episode.frames[:, 0, 0, 0].tolist() == [0, 3, 6, 8] and episode.rewards.tolist() == [3, 3, 2]
    assert episode.terminated and POCKET.replace(frame_skip=5).build_manifest().rate == 1


class BlindSimulator:
    """Simulator that ends without a last frame."""

    def __init__(self, last: int):
        self.last = last

    def reset(self, seed):
        self.n = 0
        return self.seen()

    def step(self, action):
        self.n += 1
        return ({}, 10.0, True) if self.n == self.last else (self.seen(), 1.0, False)

    def seen(self):
        picture = np.full((16, 16, 3), self.n, np.uint8)
        return {"frame": picture, "labels": picture[..., 0], "state": np.zeros(2, np.float32)}


def test_unobserved_last_frame():
    episode = play_episode(BlindSimulator(4), POCKET.build_manifest(), 0)
    assert (
        len(episode) == 4
        and episode.rewards.tolist() == [1, 1, 11]
        and episode.terminated
        and not episode.unobserved_reward
    )


def test_reward_of_an_unobserved_second_frame_is_kept(tmp_path):
    manifest = POCKET.build_manifest()
    samples = [to_sample(play_episode(BlindSimulator(last), manifest, n), manifest, n) for n, last in enumerate((1, 4))]
    write_shards(samples, tmp_path, name="pocket", quiet=True)
    (tmp_path / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
    episodes = EpisodeDataset(tmp_path)
    assert [about.reward for about in episodes.metadata] == [10, 13]
    assert [(len(episode), episode.terminated, episode.unobserved_reward) for episode in episodes] == [
        (1, True, 10),
        (4, True, 0),
    ]


class HangingSimulator(BlindSimulator):
    """Simulator that responds only after it is killed."""

    def __init__(self):
        super().__init__(4)
        self.started, self.killed = threading.Event(), threading.Event()

    def step(self, action):
        self.started.set()
        assert self.killed.wait(600)
        raise DataError("killed")

    def kill(self):
        self.killed.set()


def test_interrupted_recording_does_not_wait_for_a_hanging_simulator(monkeypatch):
    simulator = HangingSimulator()
    monkeypatch.setattr(sys.modules[EpisodeRecorder.__module__], "open_simulator", lambda world, side: simulator)
    with pytest.raises(KeyboardInterrupt), EpisodeRecorder(POCKET.build_manifest(), 4, 1) as samples:
        future = samples.pool.submit(samples._record, 0)
        assert simulator.started.wait(600)
        raise KeyboardInterrupt
    assert simulator.killed.is_set() and future.done()


# ---- reading ----------------------------------------------------------------------------------------------------


def test_pocket_world_follows_actions(made):
    moves = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])  # left, right, up, down, as (column, row)
    for episode in EpisodeDataset(made):
        positions = episode.tracks["state"]
        step = np.diff(positions, axis=0)
        is_blocked = ~step.any(1)
        assert np.array_equal(step[~is_blocked], moves[episode.actions][~is_blocked])
        assert 0 < is_blocked.mean() < 1  # some moves are blocked, others are not
        assert episode.terminated == bool(episode.rewards.sum()) and episode.rewards[:-1].sum() == 0
        cells = (episode.tracks["labels"] == 2).argmax(1).max(1), (episode.tracks["labels"] == 2).argmax(2).max(1)
        assert np.array_equal(np.stack(cells, 1)[:, ::-1] // 2, positions)  # two pixels per cell


def test_fingerprint_depends_on_the_episodes(made, tmp_path):
    record_episodes(POCKET.replace(seed=2), tmp_path, episodes=3, quiet=True)
    assert EpisodeDataset(tmp_path).fingerprint != EpisodeDataset(made).fingerprint == EpisodeDataset(made).fingerprint


def test_invalid_windows_are_refused(made):
    episodes = EpisodeDataset(made)
    with pytest.raises(ConfigError, match="frames 0 … 99 of episode 0"):
        episodes.read_window(0, 0, 99)
    with pytest.raises(ConfigError, match="has no field 'depth'"):
        episodes.read_window(0, 0, 2, ("depth",))


def test_shards_are_readable_without_vitrail(made):
    """Shards are WebDataset tars of Matroska and .npy files."""
    import av

    with tarfile.open(made / "pocket-000000.tar") as tar:
        names = tar.getnames()
        video = tar.extractfile("pocket/0/000000.frames.0000.mkv").read()  # type: ignore[union-attr]
        actions = tar.extractfile("pocket/0/000000.actions.npy").read()  # type: ignore[union-attr]
    assert "pocket/0/000009.json" in names
    with av.open(io.BytesIO(video)) as video_clip:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in video_clip.decode(video=0)])
    episode = EpisodeDataset(made)[0]
    assert np.array_equal(frames, episode.frames)
    assert np.array_equal(np.load(io.BytesIO(actions)), episode.actions)
