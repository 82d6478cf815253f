"""Contact sheets and clips of episodes."""

import numpy as np
import pytest
from PIL import Image

from vitrail.cli.data_command import app
from vitrail.data.episodes import EpisodeDataset
from vitrail.errors import ConfigError
from vitrail.plots.episode_sheet import tile_clips

av = pytest.importorskip("av")


def run(*words: str) -> None:
    app(list(words), result_action="return_value")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    run("make", "pocket", "-o", str(folder), "--episodes", "5", "--steps", "12", "--seed", "4", "--image-size", "17")
    return folder


def test_make_prints_a_summary(made, capsys):
    run("make", "pocket", "-o", str(made), "--episodes", "5", "--steps", "12", "--seed", "4", "--image-size", "17")
    output = capsys.readouterr().out
    frames = EpisodeDataset(made).lengths.sum()
    assert f"5 episodes of pocket, {frames} frames in 1 shards" in output


def test_sheet_has_one_row_per_episode(made, tmp_path):
    run("show", str(made), "-o", str(tmp_path / "two.png"), "--count", "12")
    run("show", str(made), "-o", str(tmp_path / "three.png"), "--count", "18")
    two, three = (Image.open(tmp_path / f"{name}.png") for name in ("two", "three"))
    assert two.width == three.width and two.height < three.height


def test_clip_plays_episodes_side_by_side(made, tmp_path):
    for suffix in ("gif", "mp4"):
        run("show", str(made), "-o", str(tmp_path / f"clip.{suffix}"), "--count", "4")
    episodes = EpisodeDataset(made)
    with Image.open(tmp_path / "clip.gif") as gif:
        assert gif.size == (34, 34) and gif.n_frames <= max(episodes.lengths)
    with av.open(str(tmp_path / "clip.mp4")) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert len(frames) <= max(episodes.lengths) and frames[0].shape == (34, 34, 3)


def test_shorter_clip_repeats_its_last_frame():
    short, long = np.full((1, 2, 2, 3), 1, np.uint8), np.full((3, 2, 2, 3), 2, np.uint8)
    whole = tile_clips([short, long, short])
    assert whole.shape == (3, 4, 4, 3)
    assert (whole[:, :2, :2] == 1).all() and (whole[:, :2, 2:] == 2).all() and (whole[:, 2:, 2:] == 0).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("pocket", "--num-questions", "3"), "pocket is a world.* --num-questions"),
        (("plain", "--policy", "random"), "plain is scenes.* --policy"),
        (("poket",), "poket"),
        (("coinrun", "--image-size", "99"), "coinrun .*99 pixels"),
        (("pocket", "--num-workers", "0"), "0 .*workers|workers.* 0"),
    ],
)
def test_incompatible_options_raise(words, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run("make", *words, "-o", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
