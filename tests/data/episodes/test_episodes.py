"""What is recorded is what is read, whole or by windows, whoever records it and however often he is killed."""

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
from vitrail.data.episodes import Choices, Dials, Episode, Episodes, RecordConfig, record
from vitrail.data.episodes.film import HOW, decode_frames, encode_frames
from vitrail.data.episodes.pack import About, take, to_sample
from vitrail.data.episodes.read import MANIFEST
from vitrail.data.episodes.record import Recording, play
from vitrail.data.episodes.remote import open_simulator
from vitrail.data.shards import write_shards
from vitrail.data.shards.kinds import kind_of
from vitrail.errors import ConfigError, DataError

pytest.importorskip("av")


def same(one: Episode, other: Episode) -> bool:
    arrays = [(getattr(one, name), getattr(other, name)) for name in ("frames", "actions", "rewards")]
    arrays += [(one.tracks[name], other.tracks[name]) for name in one.tracks | other.tracks]
    return (one.ended, one.text) == (other.ended, other.text) and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in arrays
    )


# ---- the format -------------------------------------------------------------------------------------------------


@st.composite
def episodes(draw) -> Episode:
    chance = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    T, H, W = draw(st.integers(1, 40)), draw(st.integers(1, 24)), draw(st.integers(8, 24))
    still = draw(st.booleans())  # noise, or frames that hardly change, which are stored in another way
    frames = chance.integers(0, 256, (1 if still else T, H, W, 3), np.uint8).repeat(T if still else 1, 0)
    frames[:, 0, 0, 0] += np.arange(T, dtype=np.uint8)
    tracks = {
        "state": chance.standard_normal((T, 3)).astype(np.float32),
        "depth": chance.standard_normal((T, H, W)).astype(np.float16),
        "labels": chance.integers(0, 9, (T, H, W), np.uint16),
        "normals": chance.integers(-128, 128, (T, H, W, 3), np.int8),
        "camera": chance.standard_normal((T, 4, 4)).astype(np.float32),
    }
    kept = {name: tracks[name] for name in draw(st.sets(st.sampled_from(sorted(tracks))))}
    dials = draw(st.booleans())
    actions = chance.random((T - 1, 2), np.float32) if dials else chance.integers(0, 4, T - 1)
    rewards = chance.standard_normal(T - 1).astype(np.float32)
    return Episode(frames, actions, rewards, draw(st.booleans()), draw(st.text(max_size=9)), kept)


@settings(max_examples=25)
@given(episode=episodes(), chunk=st.integers(1, 50), data=st.data())
def test_a_window_of_what_is_stored_is_a_slice_of_what_was_given(episode, chunk, data):
    dials = Dials(names=("a", "b"), low=(0, 0), high=(1, 1))
    actions = dials if episode.actions.ndim == 2 else Choices(names=("n", "e", "s", "w"))
    side, names = max(episode.frames.shape[1:3]), ("x", "y", "z")
    manifest = POCKET.manifest().with_(
        actions=actions, tracks=tuple(episode.tracks), chunk=chunk, side=side, state=names
    )
    sample = to_sample(episode, manifest, 7)
    about = About(**sample.pop("json"))
    assert (about.number, about.length, about.ended, about.text) == (7, len(episode), episode.ended, episode.text)
    del sample["__key__"]
    members = {end: v if isinstance(v, bytes) else kind_of(end).encode(v) for end, v in sample.items()}
    start = data.draw(st.integers(0, len(episode) - 1))
    stop = data.draw(st.integers(start + 1, len(episode)))
    wanted = {"frames": episode.frames, **episode.tracks}
    for name, whole in wanted.items():
        found = take(name, members.__getitem__, about, manifest, start, stop)
        assert found.dtype == whole.dtype and np.array_equal(found, whole[start:stop]), name
    for name, whole in (("actions", episode.actions), ("rewards", episode.rewards)):
        found = take(name, members.__getitem__, about, manifest, start, stop)
        assert found.dtype == whole.dtype and np.array_equal(found, whole[start : stop - 1]), name


def test_small_videos_are_nearly_what_was_given_and_smaller():
    at = np.linspace(0, 200, 48)
    frames = np.stack([np.stack([at[:, None] + at[None] / 4 + t] * 3, 2) for t in range(20)]).astype(np.uint8)
    small, exact = (encode_frames(frames, 10, HOW[how]) for how in ("small", "lossless"))
    assert len(small) < len(exact)
    assert np.abs(decode_frames(small, 3, 17, 48).astype(int) - frames[3:17]).mean() < 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"actions": np.zeros(5, np.int64)}, "4 frames have 5 actions"),
        ({"rewards": np.zeros(4, np.float32)}, "4 frames have 4 rewards"),
        ({"rewards": np.zeros(3)}, "rewards are float64"),
        ({"frames": np.zeros((4, 8, 8), np.uint8)}, "frames are uint8"),
        ({"tracks": {"smell": np.zeros(4)}}, "no track 'smell'"),
        ({"tracks": {"depth": np.zeros((4, 8, 9), np.uint8)}}, "depth is uint8"),
        ({"tracks": {"labels": np.zeros((4, 8, 8), np.float32)}}, "labels is float32"),
        ({"tracks": {"state": np.zeros((3, 2), np.float32)}}, "state is float32"),
    ],
)
def test_what_does_not_fit_together_is_no_episode(change, says):
    sound = {
        "frames": np.zeros((4, 8, 8, 3), np.uint8),
        "actions": np.zeros(3, np.int64),
        "rewards": np.zeros(3, np.float32),
        "ended": True,
    }
    assert Episode(**sound).dones.tolist() == [False, False, True]
    with pytest.raises(DataError, match=says):
        Episode(**sound | change)


def test_actions_that_there_are_not():
    choices, dials = Choices(names=("left", "right")), Dials(names=("gas",), low=(0,), high=(1,))
    choices.check(np.array([0, 1, 1]))
    with pytest.raises(DataError, match=r"actions number 0 … 2"):
        choices.check(np.array([0, 2]))
    with pytest.raises(DataError, match="actions are float32"):
        choices.check(np.zeros(3, np.float32))
    with pytest.raises(DataError, match=r"gas is 2.0 in action 1"):
        dials.check(np.array([[0], [2]], np.float32))
    with pytest.raises(DataError, match=r"actions are float32 \(3, 2\)"):
        dials.check(np.zeros((3, 2), np.float32))


# ---- recording --------------------------------------------------------------------------------------------------


def test_an_episode_is_the_same_whoever_records_it(made, tmp_path):
    record(POCKET, tmp_path / "three", episodes=25, workers=3, per_shard=10, quiet=True)
    assert files(tmp_path / "three") == files(made)
    simulator = open_simulator("pocket", 16)
    simulator.reset(99)
    alone = play(simulator, POCKET.manifest(), 13)
    assert same(alone, Episodes(made)[13])
    assert not same(alone, Episodes(made)[12])
    assert not same(alone, play(simulator, POCKET.with_(seed=1).manifest(), 13))


def test_a_run_that_goes_on_makes_the_same_files(made, tmp_path):
    record(POCKET, tmp_path, episodes=25, per_shard=10, quiet=True)
    for name in ("pocket-000001.tar", "pocket-000002.tar"):  # as if it had been killed while these were made
        (tmp_path / name).unlink()
    (tmp_path / ".pocket-000001.tar.partial").write_bytes(b"half of it")
    assert len(Episodes(tmp_path)) == 10  # what is there can be read
    record(POCKET, tmp_path, episodes=25, workers=2, per_shard=10, quiet=True)
    assert files(tmp_path) == files(made)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.tar")}
    record(POCKET, tmp_path, episodes=25, per_shard=10, quiet=True)  # nothing is left to do
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.tar")} == before


@pytest.mark.slow
def test_killed_and_begun_again(tmp_path):
    command = [sys.executable, "-m", "vitrail.cli", "data", "make", "pocket", "-o"]
    options = ["--episodes", "220", "--steps", "20", "--side", "16", "--workers", "2"]
    process = subprocess.Popen([*command, str(tmp_path / "killed"), *options], stderr=subprocess.DEVNULL)
    while not list((tmp_path / "killed").glob("*.tar")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(list((tmp_path / "killed").glob("*.tar")))
    for folder in ("killed", "whole"):
        subprocess.run([*command, str(tmp_path / folder), *options], check=True, capture_output=True)
    assert done < 3 and files(tmp_path / "killed") == files(tmp_path / "whole")


def test_another_setting_needs_another_folder(made):
    with pytest.raises(DataError, match="holds episodes whose steps is 40, not 41"):
        record(POCKET.with_(steps=41), made, episodes=25, per_shard=10)


def test_a_folder_in_which_nothing_was_recorded_takes_any_setting(tmp_path):
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(POCKET.with_(seed=5).manifest()))
    with pytest.raises(DataError, match="holds no episodes yet"):
        Episodes(tmp_path)
    record(POCKET, tmp_path, episodes=1, quiet=True)
    assert Episodes(tmp_path).manifest == POCKET.manifest()


def test_what_cannot_be_recorded(tmp_path):
    with pytest.raises(ConfigError, match="no world 'poket'"):
        record(RecordConfig(world="poket"), tmp_path, episodes=1)
    with pytest.raises(ConfigError, match="nobody plays pocket as 'expert'"):
        record(RecordConfig(world="pocket", policy="expert"), tmp_path, episodes=1)
    with pytest.raises(ConfigError, match="0 episodes by 1 workers"):
        record(POCKET, tmp_path, episodes=0)
    with pytest.raises(ConfigError, match="actions that last 0 steps"):
        record(POCKET.with_(repeat=0), tmp_path, episodes=1)
    with pytest.raises(ConfigError, match=r"0\.005 actions a second"):
        record(POCKET.with_(repeat=1000), tmp_path, episodes=1)
    with pytest.raises(ConfigError, match="99 pixels"):
        record(RecordConfig(world="coinrun", side=99), tmp_path / "coin", episodes=1, quiet=True)


def test_an_action_lasts_as_long_as_it_is_repeated():
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

    episode = play(Counter(), POCKET.with_(repeat=3).manifest(), 0)
    assert episode.frames[:, 0, 0, 0].tolist() == [0, 3, 6, 8] and episode.rewards.tolist() == [3, 3, 2]
    assert episode.ended and POCKET.with_(repeat=5).manifest().rate == 1


class Blind:
    """Ends without a last picture."""

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


def test_an_end_that_is_not_shown():
    episode = play(Blind(4), POCKET.manifest(), 0)
    assert len(episode) == 4 and episode.rewards.tolist() == [1, 1, 11] and episode.ended and not episode.unseen


def test_the_reward_of_an_end_behind_the_first_frame_is_kept(tmp_path):
    manifest = POCKET.manifest()
    samples = [to_sample(play(Blind(last), manifest, n), manifest, n) for n, last in enumerate((1, 4))]
    write_shards(samples, tmp_path, name="pocket", quiet=True)
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    episodes = Episodes(tmp_path)
    assert [about.reward for about in episodes.about] == [10, 13]
    assert [(len(episode), episode.ended, episode.unseen) for episode in episodes] == [(1, True, 10), (4, True, 0)]


class Stuck(Blind):
    """Answers only when it is killed."""

    def __init__(self):
        super().__init__(4)
        self.begun, self.killed = threading.Event(), threading.Event()

    def step(self, action):
        self.begun.set()
        assert self.killed.wait(60)
        raise DataError("killed")

    def kill(self):
        self.killed.set()


def test_an_interrupted_recording_does_not_wait_for_a_simulator_that_is_stuck(monkeypatch):
    simulator = Stuck()
    monkeypatch.setattr(sys.modules[Recording.__module__], "open_simulator", lambda world, side: simulator)
    with pytest.raises(KeyboardInterrupt), Recording(POCKET.manifest(), 4, 1) as samples:
        future = samples.pool.submit(samples._make, 0)
        assert simulator.begun.wait(60)
        raise KeyboardInterrupt
    assert simulator.killed.is_set() and future.done()


# ---- reading ----------------------------------------------------------------------------------------------------


def test_the_pocket_world_obeys_its_actions(made):
    moves = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])  # left, right, up, down, as (column, row)
    for episode in Episodes(made):
        places = episode.tracks["state"]
        step = np.diff(places, axis=0)
        stood = ~step.any(1)
        assert np.array_equal(step[~stood], moves[episode.actions][~stood])
        assert 0 < stood.mean() < 1  # there are walls, and there is room
        assert episode.ended == bool(episode.rewards.sum()) and episode.rewards[:-1].sum() == 0
        cells = (episode.tracks["labels"] == 2).argmax(1).max(1), (episode.tracks["labels"] == 2).argmax(2).max(1)
        assert np.array_equal(np.stack(cells, 1)[:, ::-1] // 2, places)  # two pixels a cell


def test_the_fingerprint_changes_with_what_was_recorded(made, tmp_path):
    record(POCKET.with_(seed=2), tmp_path, episodes=3, quiet=True)
    assert Episodes(tmp_path).fingerprint != Episodes(made).fingerprint == Episodes(made).fingerprint


def test_what_cannot_be_asked_for(made):
    episodes = Episodes(made)
    with pytest.raises(ConfigError, match="frames 0 … 99 of episode 0"):
        episodes.window(0, 0, 99)
    with pytest.raises(ConfigError, match="holds no 'depth'"):
        episodes.window(0, 0, 2, ("depth",))


def test_other_readers_find_ordinary_files(made):
    """WebDataset tars of Matroska and .npy: nothing of ours is needed."""
    import av

    with tarfile.open(made / "pocket-000000.tar") as tar:
        names = tar.getnames()
        video = tar.extractfile("pocket/0/000000.frames.0000.mkv").read()  # type: ignore[union-attr]
        actions = tar.extractfile("pocket/0/000000.actions.npy").read()  # type: ignore[union-attr]
    assert "pocket/0/000009.json" in names
    with av.open(io.BytesIO(video)) as film:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)])
    episode = Episodes(made)[0]
    assert np.array_equal(frames, episode.frames)
    assert np.array_equal(np.load(io.BytesIO(actions)), episode.actions)
