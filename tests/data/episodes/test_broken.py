"""Damaged, truncated or inconsistent episodes raise errors that name the file."""

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
from vitrail.data.episodes import Episode, EpisodeDataset, record_episodes
from vitrail.data.episodes.episode_dataset import MANIFEST_FILE
from vitrail.data.episodes.episode_sample import to_sample
from vitrail.data.episodes.frame_encoding import VIDEO_ENCODINGS, encode_frames
from vitrail.data.episodes.recorder import play_episode
from vitrail.data.episodes.simulators import open_simulator
from vitrail.data.shards import write_shards
from vitrail.data.shards.member_codecs import get_codec
from vitrail.errors import DataError, VitrailError

pytest.importorskip("av")


def test_truncated_shard_is_named(made, tmp_path):
    for name, data in files(made).items():
        (tmp_path / name).write_bytes(data[: len(data) // 2] if name == "pocket-000001.tar" else data)
    with pytest.raises(DataError, match=r"pocket-000001.tar is damaged"):
        EpisodeDataset(tmp_path)


def test_missing_shard_is_detected(made, tmp_path):
    for name, data in files(made).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "pocket-000001.tar").unlink()
    with pytest.raises(DataError, match=r"pocket-000002.tar holds episode 20, expected 10"):
        EpisodeDataset(tmp_path)


def test_mutated_shards_give_episodes_or_vitrail_errors(tmp_path):
    record_episodes(POCKET.replace(steps=8), tmp_path, episodes=3, quiet=True)
    path, rng = tmp_path / "pocket-000000.tar", random.Random(0)
    original = path.read_bytes()
    outcomes = collections.Counter()
    for _ in range(150):
        data = bytearray(original)
        for _ in range(rng.choice((1, 2, 40))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        (tmp_path / "pocket-000000.tar.vidx").unlink(missing_ok=True)
        try:
            outcomes["read"] += len(list(EpisodeDataset(tmp_path))) > 0
        except VitrailError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 20 and outcomes["read"] > 5  # a tar is padded, so some bytes have no effect


def test_broken_video_is_named(made, tmp_path):
    for name, data in files(made).items():
        (tmp_path / name).write_bytes(data)
    path = tmp_path / "pocket-000000.tar"
    with tarfile.open(path) as tar:
        member = tar.getmember("pocket/0/000004.frames.0000.mkv")
        data = bytearray(path.read_bytes())
        data[member.offset_data : member.offset_data + member.size] = os.urandom(member.size)
    path.write_bytes(data)
    episodes = EpisodeDataset(tmp_path)
    assert len(episodes[3]) > 1
    with pytest.raises(DataError, match=r"pocket-000000.tar: episode 4 cannot be read: a video is broken"):
        episodes[4]


def test_missing_actions_are_detected(tmp_path):
    manifest = POCKET.build_manifest()
    sample = to_sample(play_episode(open_simulator("pocket", 16), manifest, 0), manifest, 0)
    sample["actions.npy"] = sample["actions.npy"][:-1]
    write_shards([sample], tmp_path, name="pocket", quiet=True)
    (tmp_path / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(DataError, match=r"episode 0 cannot be read: actions has the shape \(\d+,\), expected \d+ rows"):
        EpisodeDataset(tmp_path)[0]


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
        {"steps": 3},  # shorter than the episodes
        {"side": 32},
        {"state": ["column"]},
        {"actions": {"kind": "choices", "names": ["left"]}},
    ],
    ids=str,
)
def test_inconsistent_manifest_is_refused(made, tmp_path, change):
    for name, data in files(made).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / MANIFEST_FILE).write_bytes(msgspec.json.encode(POCKET.build_manifest().to_dict() | change))
    with pytest.raises(DataError, match=str(tmp_path)):
        EpisodeDataset(tmp_path)[0]


@pytest.mark.parametrize(
    "text", [b'{"world":"\xff"}', b"[]", b"[" * 100_000, b""], ids=["utf-8", "list", "deep", "none"]
)
def test_invalid_manifest_is_named(tmp_path, text):
    (tmp_path / MANIFEST_FILE).write_bytes(text)
    with pytest.raises(DataError, match=f"{MANIFEST_FILE} cannot be read"):
        EpisodeDataset(tmp_path)


def npy(array: np.ndarray, pickled: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=pickled)
    return file.getvalue()


def encode_video(frames: int, height: int, width: int) -> bytes:
    return encode_frames(np.zeros((frames, height, width, 3), np.uint8), 5, VIDEO_ENCODINGS["lossless"])


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3))
    return file.getvalue()


SPAN = 11  # frames of the episode below, in chunks of 8
ABOUT = {"number": 0, "length": SPAN, "ended": False, "reward": 0.0, "text": ""}


@pytest.mark.parametrize(
    ("member", "data", "message"),
    [
        ("json", msgspec.json.encode(ABOUT | {"length": 0}), "0 frames but at most"),
        ("json", msgspec.json.encode(ABOUT | {"length": -5}), "-5 frames but at most"),
        ("json", msgspec.json.encode(ABOUT | {"length": 1 << 63}), "9223372036854775808 frames but at most"),
        ("json", msgspec.json.encode(ABOUT | {"text": "?"}).replace(b"?", b"\xff"), "utf-8"),
        ("actions.npy", npz(), "magic"),
        ("actions.npy", gzip.compress(npy(np.zeros(SPAN - 1, np.int64))), "magic"),
        ("actions.npy", npy(np.array([None] * (SPAN - 1)), True), "allow_pickle=False"),
        ("rewards.npy", npy(np.zeros((SPAN - 1, 3), np.float32)), "rewards are float32"),
        ("rewards.npy", npy(np.zeros(SPAN - 1)), "rewards are float64"),
        ("state.npy", npy(np.array(["x"] * SPAN)), "state is <U1"),
        ("state.npy", npy(np.array(3.0)), "single number"),
        ("state.npy", npy(np.zeros((SPAN, 3), np.float32)), "state has 3 numbers, expected 2"),
        ("labels.0000.npy.gz", npz(), "gzip"),
        ("labels.0000.npy.gz", gzip.compress(npy(np.array(3))), "single number"),
        ("labels.0000.npy.gz", gzip.compress(npy(np.zeros((8, 3), np.uint8))), "labels is uint8"),
        ("labels.0000.npy.gz", gzip.compress(npy(np.zeros((8, 8, 8), np.uint8))), "labels has 8 × 8 pixels"),
        ("labels.0000.npy.gz", gzip.compress(npy(np.zeros((8, 16, 8), np.uint8))), "different types"),
        ("labels.0000.npy.gz", gzip.compress(npy(np.zeros((8, 16, 16), np.uint16))), "different types"),
        ("labels.0000.npy.gz", gzip.compress(bytes(1 << 20)), "more than 24,576 bytes"),
        ("frames.0000.mkv", encode_video(8, 8, 8), "8 × 8 pixels, expected a side of 16"),
        ("frames.0001.mkv", encode_video(8, 32, 16), "32 × 16 pixels, expected a side of 16"),
        ("frames.0001.mkv", encode_video(8, 16, 8), "different types"),
        ("frames.*.mkv", encode_video(8, 16, 8), "frames and labels have different sizes"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",  # gzip output contains the time
)
def test_member_of_wrong_type_is_named(tmp_path, member, data, message):
    manifest = POCKET.build_manifest().replace(chunk=8)
    episode = Episode(
        frames=np.zeros((SPAN, 16, 16, 3), np.uint8),
        actions=np.zeros(SPAN - 1, np.int64),
        rewards=np.zeros(SPAN - 1, np.float32),
        terminated=False,
        tracks={"state": np.zeros((SPAN, 2), np.float32), "labels": np.zeros((SPAN, 16, 16), np.uint8)},
    )
    sample = to_sample(episode, manifest, 0)
    with tarfile.open(tmp_path / "pocket-000000.tar", "w") as tar:
        for ending in [ending for ending in sample if ending != "__key__"]:
            encoded = sample[ending] if isinstance(sample[ending], bytes) else get_codec(ending).encode(sample[ending])
            content = data if fnmatch.fnmatch(ending, member) else encoded
            info = tarfile.TarInfo(f"{sample['__key__']}.{ending}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    (tmp_path / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(DataError, match=message) as error:
        EpisodeDataset(tmp_path)[0]
    assert "pocket-000000.tar: episode 0 cannot be read" in error.value.problem


def test_folder_without_valid_manifest(tmp_path):
    with pytest.raises(DataError, match=f"holds no {MANIFEST_FILE}"):
        EpisodeDataset(tmp_path)
    (tmp_path / MANIFEST_FILE).write_text('{"world": 3}')
    with pytest.raises(DataError, match="cannot be read"):
        EpisodeDataset(tmp_path)
    later = POCKET.build_manifest().to_dict() | {"version": 2}
    (tmp_path / MANIFEST_FILE).write_bytes(msgspec.json.encode(later))
    with pytest.raises(DataError, match=f"{MANIFEST_FILE} cannot be read: the episodes have format version 2"):
        EpisodeDataset(tmp_path)
