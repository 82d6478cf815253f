"""Episodes on a sheet and in a clip."""

import numpy as np
import pytest
from PIL import Image

from vitrail.cli.data import app
from vitrail.data.episodes import Episodes
from vitrail.errors import ConfigError
from vitrail.show.episodes import side_by_side

av = pytest.importorskip("av")


def run(*words: str) -> None:
    app(list(words), result_action="return_value")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    run("make", "pocket", "-o", str(folder), "--episodes", "5", "--steps", "12", "--seed", "4", "--side", "17")
    return folder


def test_what_was_made_is_told(made, capsys):
    run("make", "pocket", "-o", str(made), "--episodes", "5", "--steps", "12", "--seed", "4", "--side", "17")
    told = capsys.readouterr().out
    frames = Episodes(made).lengths.sum()
    assert f"5 episodes of pocket, {frames} frames in 1 shards" in told


def test_a_sheet_has_a_row_for_each(made, tmp_path):
    run("show", str(made), "-o", str(tmp_path / "two.png"), "--count", "12")
    run("show", str(made), "-o", str(tmp_path / "three.png"), "--count", "18")
    two, three = (Image.open(tmp_path / f"{name}.png") for name in ("two", "three"))
    assert two.width == three.width and two.height < three.height


def test_a_clip_plays_them_side_by_side(made, tmp_path):
    for ending in ("gif", "mp4"):
        run("show", str(made), "-o", str(tmp_path / f"clip.{ending}"), "--count", "4")
    episodes = Episodes(made)
    with Image.open(tmp_path / "clip.gif") as gif:
        assert gif.size == (34, 34) and gif.n_frames <= max(episodes.lengths)
    with av.open(str(tmp_path / "clip.mp4")) as film:
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert len(frames) <= max(episodes.lengths) and frames[0].shape == (34, 34, 3)


def test_the_shorter_clip_stays_where_it_ended():
    short, long = np.full((1, 2, 2, 3), 1, np.uint8), np.full((3, 2, 2, 3), 2, np.uint8)
    whole = side_by_side([short, long, short])
    assert whole.shape == (3, 4, 4, 3)
    assert (whole[:, :2, :2] == 1).all() and (whole[:, :2, 2:] == 2).all() and (whole[:, 2:, 2:] == 0).all()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("pocket", "--questions", "3"), "pocket is a world, which has no --questions"),
        (("plain", "--policy", "random"), "plain is scenes, which has no --policy"),
        (("poket",), "no scenes and no world 'poket'"),
        (("coinrun", "--side", "99"), "coinrun with a side of 99 pixels"),
        (("pocket", "--workers", "0"), "by 0 workers"),
    ],
)
def test_what_does_not_go_together(words, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        run("make", *words, "-o", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
