"""Windows of recorded episodes: each occurs once, for every way of decoding, and splits do not overlap."""

from pathlib import Path

import numpy as np
import pytest

from vitrail.data.episodes import EpisodeDataset, EpisodesConfig, EpisodeSource, RecordConfig, record_episodes
from vitrail.errors import DataError

pytest.importorskip("av")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """25 episodes of the pocket world in three shards."""
    folder = tmp_path_factory.mktemp("made")
    record_episodes(
        RecordConfig(world="pocket", steps=40, image_size=16), folder, episodes=25, episodes_per_shard=10, quiet=True
    )
    return folder


@pytest.mark.parametrize(("hold", "large"), [(0, 0), (1 << 30, 1 << 30), (1 << 30, 0)])
def test_every_window_occurs_once(made, hold, large, monkeypatch):
    """Decoded on access, once, or once by processes with shared memory."""
    monkeypatch.setattr("vitrail.data.episodes.episode_source.PARALLEL_DECODE_BYTES", large)
    whole = EpisodeDataset(made)
    source = EpisodeSource(
        EpisodesConfig(
            folder=str(made), window_length=5, stride=3, cache_bytes=hold, fields=("frames", "actions", "labels")
        )
    )
    locations = [source.locate(i) for i in range(len(source))]
    episodes = [n for n in range(25) if n % 10 != 9]
    assert locations == [(n, start) for n in episodes for start in range(0, whole.lengths[n] - 4, 3)]
    for item in range(0, len(source), 17):
        number, start = locations[item]
        window, episode = source[item], whole[number]
        assert np.array_equal(window["frames"], episode.frames[start : start + 5])
        assert np.array_equal(window["actions"], episode.actions[start : start + 4])
        assert np.array_equal(window["labels"], episode.tracks["labels"][start : start + 5])
        assert window["frames"].dtype == np.uint8 and window["actions"].dtype == np.int64
    with pytest.raises(IndexError):
        source[len(source)]


def test_splits_share_no_episode(made):
    parts = {
        part: {s.locate(i)[0] for i in range(len(s))}
        for part in ("train", "test", "all")
        for s in [EpisodeSource(EpisodesConfig(folder=str(made), window_length=2, split=part))]
    }
    assert parts["test"] == {9, 19} and not parts["train"] & parts["test"]
    assert parts["all"] == parts["train"] | parts["test"]


def test_windows_reach_data_workers(made):
    from torch.utils.data import DataLoader

    source = EpisodeSource(EpisodesConfig(folder=str(made), window_length=4, cache_bytes=0))
    batches = DataLoader(source, batch_size=3, sampler=range(9), num_workers=1)  # type: ignore[arg-type]
    frames = np.concatenate([batch["frames"].numpy() for batch in batches])
    assert np.array_equal(frames, np.stack([source[i]["frames"] for i in range(9)]))


def test_cached_windows_are_read_only(made):
    source = EpisodeSource(EpisodesConfig(folder=str(made), window_length=4))
    with pytest.raises(ValueError, match="read-only"):
        source[0]["frames"][0] = 0


@pytest.mark.parametrize("large", [1 << 30, 0])
def test_decoding_errors_pass_through_processes(made, large, monkeypatch):
    monkeypatch.setattr("vitrail.data.episodes.episode_source.PARALLEL_DECODE_BYTES", large)

    def window(self, number, start, length, fields):
        if number == 13:
            raise DataError("episode 13 is damaged", "record it again")
        return original(self, number, start, length, fields)

    original = EpisodeDataset.read_window
    monkeypatch.setattr(EpisodeDataset, "read_window", window)
    with pytest.raises(DataError) as refused:
        EpisodeSource(EpisodesConfig(folder=str(made), window_length=4))
    assert (refused.value.problem, refused.value.remedy) == ("episode 13 is damaged", "record it again")


def test_too_long_windows_are_refused(made):
    with pytest.raises(DataError, match="no window of 99 frames"):
        EpisodeSource(EpisodesConfig(folder=str(made), window_length=99))
