"""Episodes that are broken, cut short or of another kind are named."""

import collections
import fnmatch
import gzip
import io
import os
import random
import tarfile

import msgspec
import numpy as np
import pytest

from data.episodes.pockets import POCKET, files
from vitrail.data.episodes import Episode, Episodes, record
from vitrail.data.episodes.film import HOW, encode_frames
from vitrail.data.episodes.pack import to_sample
from vitrail.data.episodes.read import MANIFEST
from vitrail.data.episodes.record import play
from vitrail.data.episodes.remote import open_simulator
from vitrail.data.shards import write_shards
from vitrail.data.shards.kinds import kind_of
from vitrail.errors import DataError, VitrailError

pytest.importorskip("av")


def test_a_shard_that_is_cut_short_is_named(made, tmp_path):
    for name, data in files(made).items():
        (tmp_path / name).write_bytes(data[: len(data) // 2] if name == "pocket-000001.tar" else data)
    with pytest.raises(DataError, match=r"pocket-000001.tar is damaged"):
        Episodes(tmp_path)


def test_a_shard_that_is_missing_is_missed(made, tmp_path):
    for name, data in files(made).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "pocket-000001.tar").unlink()
    with pytest.raises(DataError, match=r"pocket-000002.tar holds episode 20, where 10 is missing"):
        Episodes(tmp_path)


def test_mutated_shards_give_episodes_or_an_error_of_ours(tmp_path):
    record(POCKET.with_(steps=8), tmp_path, episodes=3, quiet=True)
    path, chance = tmp_path / "pocket-000000.tar", random.Random(0)
    sound = path.read_bytes()
    fate = collections.Counter()
    for _ in range(150):
        data = bytearray(sound)
        for _ in range(chance.choice((1, 2, 40))):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(data)
        (tmp_path / "pocket-000000.tar.vidx").unlink(missing_ok=True)
        try:
            fate["read"] += len(list(Episodes(tmp_path))) > 0
        except VitrailError:
            fate["refused"] += 1
    assert fate["refused"] > 20 and fate["read"] > 5  # a tar is padded: some bytes matter to nobody


def test_a_video_that_is_broken_is_named(made, tmp_path):
    for name, data in files(made).items():
        (tmp_path / name).write_bytes(data)
    path = tmp_path / "pocket-000000.tar"
    with tarfile.open(path) as tar:
        about = tar.getmember("pocket/0/000004.frames.0000.mkv")
        data = bytearray(path.read_bytes())
        data[about.offset_data : about.offset_data + about.size] = os.urandom(about.size)
    path.write_bytes(data)
    episodes = Episodes(tmp_path)
    assert len(episodes[3]) > 1
    with pytest.raises(DataError, match=r"pocket-000000.tar: episode 4 cannot be read: a video is broken"):
        episodes[4]


def test_actions_that_were_lost_are_missed(tmp_path):
    manifest = POCKET.manifest()
    sample = to_sample(play(open_simulator("pocket", 16), manifest, 0), manifest, 0)
    sample["actions.npy"] = sample["actions.npy"][:-1]
    write_shards([sample], tmp_path, name="pocket", quiet=True)
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(
        DataError, match=r"episode 0 cannot be read: actions has the shape \(\d+,\) where \d+ rows are wanted"
    ):
        Episodes(tmp_path)[0]


@pytest.mark.parametrize(
    "change",
    [
        {"world": "../made/pocket"},
        {"world": "/etc/pocket"},
        {"world": "po*"},
        {"world": "po\0cket"},
        {"world": ""},
        {"drawn": True},
        {"drawn": True, "world": "nowhere"},
        {"drawn": True, "world": "pusht"},
        {"tracks": ["state", "smell"]},
        {"rate": 0.0},
        {"rate": -1.0},
        {"rate": 1e-300},
        {"rate": 1e300},
        {"side": 1 << 40},
        {"chunk": 1 << 40},
        {"steps": 1 << 70},
        {"steps": 3},  # fewer than the episodes have
        {"side": 32},
        {"state": ["column"]},
        {"actions": {"kind": "choices", "names": ["left"]}},
    ],
    ids=str,
)
def test_a_manifest_that_does_not_fit_is_refused(made, tmp_path, change):
    for name, data in files(made).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(POCKET.manifest().plain() | change))
    with pytest.raises(DataError, match=str(tmp_path)):
        Episodes(tmp_path)[0]


@pytest.mark.parametrize(
    "text", [b'{"world":"\xff"}', b"[]", b"[" * 100_000, b""], ids=["utf-8", "list", "deep", "none"]
)
def test_a_manifest_that_is_none_is_named(tmp_path, text):
    (tmp_path / MANIFEST).write_bytes(text)
    with pytest.raises(DataError, match=f"{MANIFEST} cannot be read"):
        Episodes(tmp_path)


def npy(array: np.ndarray, pickled: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=pickled)
    return file.getvalue()


def film(frames: int, height: int, width: int) -> bytes:
    return encode_frames(np.zeros((frames, height, width, 3), np.uint8), 5, HOW["lossless"])


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3))
    return file.getvalue()


SPAN = 11  # frames of the episode below, in chunks of 8
ABOUT = {"number": 0, "length": SPAN, "ended": False, "reward": 0.0, "text": ""}


@pytest.mark.parametrize(
    ("member", "data", "says"),
    [
        ("json", msgspec.json.encode(ABOUT | {"length": 0}), "0 frames of at most"),
        ("json", msgspec.json.encode(ABOUT | {"length": -5}), "-5 frames of at most"),
        ("json", msgspec.json.encode(ABOUT | {"length": 1 << 63}), "9223372036854775808 frames of at most"),
        ("json", msgspec.json.encode(ABOUT | {"text": "?"}).replace(b"?", b"\xff"), "utf-8"),
        ("actions.npy", npz(), "magic"),
        ("actions.npy", gzip.compress(npy(np.zeros(SPAN - 1, np.int64))), "magic"),
        ("actions.npy", npy(np.array([None] * (SPAN - 1)), True), "allow_pickle=False"),
        ("rewards.npy", npy(np.zeros((SPAN - 1, 3), np.float32)), "rewards are float32"),
        ("rewards.npy", npy(np.zeros(SPAN - 1)), "rewards are float64"),
        ("state.npy", npy(np.array(["x"] * SPAN)), "state is <U1"),
        ("state.npy", npy(np.array(3.0)), "single number"),
        ("state.npy", npy(np.zeros((SPAN, 3), np.float32)), "state has 3 numbers where 2 are named"),
        ("labels.0000.npy.gz", npz(), "gzip"),
        ("labels.0000.npy.gz", gzip.compress(npy(np.array(3))), "single number"),
        ("labels.0000.npy.gz", gzip.compress(npy(np.zeros((8, 3), np.uint8))), "labels is uint8"),
        ("labels.0000.npy.gz", gzip.compress(npy(np.zeros((8, 8, 8), np.uint8))), "labels has 8 × 8 pixels"),
        ("labels.0000.npy.gz", gzip.compress(npy(np.zeros((8, 16, 8), np.uint8))), "different kinds"),
        ("labels.0000.npy.gz", gzip.compress(npy(np.zeros((8, 16, 16), np.uint16))), "different kinds"),
        ("labels.0000.npy.gz", gzip.compress(bytes(1 << 20)), "more than 24,576 bytes"),
        ("frames.0000.mkv", film(8, 8, 8), "8 × 8 pixels where a side has 16"),
        ("frames.0001.mkv", film(8, 32, 16), "32 × 16 pixels where a side has 16"),
        ("frames.0001.mkv", film(8, 16, 8), "different kinds"),
        ("frames.*.mkv", film(8, 16, 8), "frames and labels have different sizes"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",  # what gzip writes has the time in it
)
def test_a_member_of_another_kind_is_named(tmp_path, member, data, says):
    manifest = POCKET.manifest().with_(chunk=8)
    episode = Episode(
        frames=np.zeros((SPAN, 16, 16, 3), np.uint8),
        actions=np.zeros(SPAN - 1, np.int64),
        rewards=np.zeros(SPAN - 1, np.float32),
        ended=False,
        tracks={"state": np.zeros((SPAN, 2), np.float32), "labels": np.zeros((SPAN, 16, 16), np.uint8)},
    )
    sample = to_sample(episode, manifest, 0)
    with tarfile.open(tmp_path / "pocket-000000.tar", "w") as tar:
        for ending in [ending for ending in sample if ending != "__key__"]:
            sound = sample[ending] if isinstance(sample[ending], bytes) else kind_of(ending).encode(sample[ending])
            held = data if fnmatch.fnmatch(ending, member) else sound
            info = tarfile.TarInfo(f"{sample['__key__']}.{ending}")
            info.size = len(held)
            tar.addfile(info, io.BytesIO(held))
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(DataError, match=says) as error:
        Episodes(tmp_path)[0]
    assert "pocket-000000.tar: episode 0 cannot be read" in error.value.problem


def test_a_folder_of_something_else(tmp_path):
    with pytest.raises(DataError, match=f"holds no {MANIFEST}"):
        Episodes(tmp_path)
    (tmp_path / MANIFEST).write_text('{"world": 3}')
    with pytest.raises(DataError, match="cannot be read"):
        Episodes(tmp_path)
    later = POCKET.manifest().plain() | {"version": 2}
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(later))
    with pytest.raises(DataError, match=f"{MANIFEST} cannot be read: these episodes are of version 2"):
        Episodes(tmp_path)
