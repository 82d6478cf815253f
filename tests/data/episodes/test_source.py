"""Windows of recorded episodes: every one once, however they are decoded, for training and for judging apart."""

from pathlib import Path

import numpy as np
import pytest

from vitrail.data.episodes import Episodes, EpisodesConfig, EpisodeSource, RecordConfig, record
from vitrail.errors import DataError

pytest.importorskip("av")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """25 episodes of the pocket world in three shards."""
    folder = tmp_path_factory.mktemp("made")
    record(RecordConfig(world="pocket", steps=40, side=16), folder, episodes=25, per_shard=10, quiet=True)
    return folder


@pytest.mark.parametrize(("hold", "large"), [(0, 0), (1 << 30, 1 << 30), (1 << 30, 0)])
def test_a_source_gives_every_window_once(made, hold, large, monkeypatch):
    """Decoded when asked for, once, or once by processes that share their memory."""
    monkeypatch.setattr("vitrail.data.episodes.source.LARGE", large)
    whole = Episodes(made)
    source = EpisodeSource(
        EpisodesConfig(folder=str(made), length=5, stride=3, hold=hold, fields=("frames", "actions", "labels"))
    )
    seen = [source.place(i) for i in range(len(source))]
    episodes = [n for n in range(25) if n % 10 != 9]
    assert seen == [(n, start) for n in episodes for start in range(0, whole.lengths[n] - 4, 3)]
    for item in range(0, len(source), 17):
        number, start = seen[item]
        window, episode = source[item], whole[number]
        assert np.array_equal(window["frames"], episode.frames[start : start + 5])
        assert np.array_equal(window["actions"], episode.actions[start : start + 4])
        assert np.array_equal(window["labels"], episode.tracks["labels"][start : start + 5])
        assert window["frames"].dtype == np.uint8 and window["actions"].dtype == np.int64
    with pytest.raises(IndexError):
        source[len(source)]


def test_training_and_judging_share_no_episode(made):
    parts = {
        part: {s.place(i)[0] for i in range(len(s))}
        for part in ("train", "test", "all")
        for s in [EpisodeSource(EpisodesConfig(folder=str(made), length=2, part=part))]
    }
    assert parts["test"] == {9, 19} and not parts["train"] & parts["test"]
    assert parts["all"] == parts["train"] | parts["test"]


def test_windows_reach_data_workers(made):
    from torch.utils.data import DataLoader

    source = EpisodeSource(EpisodesConfig(folder=str(made), length=4, hold=0))
    batches = DataLoader(source, batch_size=3, sampler=range(9), num_workers=1)  # type: ignore[arg-type]
    frames = np.concatenate([batch["frames"].numpy() for batch in batches])
    assert np.array_equal(frames, np.stack([source[i]["frames"] for i in range(9)]))


def test_what_is_held_is_not_written_on(made):
    source = EpisodeSource(EpisodesConfig(folder=str(made), length=4))
    with pytest.raises(ValueError, match="read-only"):
        source[0]["frames"][0] = 0


@pytest.mark.parametrize("large", [1 << 30, 0])
def test_an_episode_that_cannot_be_decoded_is_named_by_whoever_decodes_it(made, large, monkeypatch):
    monkeypatch.setattr("vitrail.data.episodes.source.LARGE", large)

    def window(self, number, start, length, fields):
        if number == 13:
            raise DataError("episode 13 is damaged", "record it again")
        return whole(self, number, start, length, fields)

    whole = Episodes.window
    monkeypatch.setattr(Episodes, "window", window)
    with pytest.raises(DataError) as refused:
        EpisodeSource(EpisodesConfig(folder=str(made), length=4))
    assert (refused.value.problem, refused.value.remedy) == ("episode 13 is damaged", "record it again")


def test_windows_longer_than_any_episode_are_refused(made):
    with pytest.raises(DataError, match="no window of 99 frames"):
        EpisodeSource(EpisodesConfig(folder=str(made), length=99))
