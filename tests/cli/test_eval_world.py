"""`vitrail eval MODEL world` and `imitation`, on a small world that knows nothing."""

import json

import pytest
import torch
from PIL import Image

import worlds
from vitrail import hub
from vitrail.cli.eval import app
from vitrail.data.episodes import RecordConfig, record
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.models.genie import Genie

pytestmark = pytest.mark.filterwarnings("ignore:FD-")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    pytest.importorskip("av")
    folder = tmp_path_factory.mktemp("worlds")
    torch.manual_seed(0)
    hub.save(Genie(worlds.genie_config()), folder / "model")
    hub.save(Genie(worlds.genie_config(latent=False)), folder / "known")
    config = RecordConfig(world="pocket-curtain", side=8, steps=20, policy="seeker", seed=3)
    record(config, folder / "curtain", episodes=30, quiet=True)
    return folder


@pytest.fixture
def run(home, tmp_path, capsys):
    def call(suite, model, *words):
        out = tmp_path / "found.json"
        more = ["--device", "cpu", "--out", str(out)]
        app([suite, str(home / model), *map(str, words), *more], result_action="return_value")
        return json.loads(out.read_text()), capsys.readouterr()

    return call


def test_world(run, home, tmp_path):
    small = ("--part", "all", "--length", 16, "--frames", 8, "--steps", 1, "--count", 6)
    found, shown = run("world", "model", "--data", home / "curtain", *small, "--sheet", tmp_path / "sheet.png")
    names = [score["name"] for score in found["scores"]]
    assert names[:6] == [
        "codec psnr",
        "still psnr@4",
        "Δpsnr@4",
        "purity of latent actions",
        "left told from right by latent actions",
        "actions read back from frames",
    ]
    fvd = names.count("FVD, FD-pixels4"), names.count("FVD, FD-pixels4, to other videos")
    assert names.count("psnr") == names.count("psnr@4") == 1 and fvd == (1, 1)
    assert found["scores"][3]["beside"]["majority"] > 0 and found["scores"][4]["beside"] == {"chance": 0.5}
    assert found["network"] == "FD-pixels4"
    assert "real clips" in shown.out and Image.open(tmp_path / "sheet.png").width > 300
    back = [score for score in found["scores"] if "comes back" in score["name"]]
    assert bool(back) != ("permanence is not measured" in shown.err)


def test_every_video_is_of_another_episode(home):
    """A window of the same episode would be counted as another."""
    from vitrail.cli.eval_world import _videos
    from vitrail.data.episodes import Episodes

    long = sum(Episodes(home / "curtain").lengths >= 4)
    assert len(_videos(home / "curtain", "all", 1000, 4)[0]) == long < 1000
    assert len(_videos(home / "curtain", "all", 5, 4)[0]) == 5


def test_a_simulator_is_closed_whatever_happens(run, home, monkeypatch):
    from vitrail.data.episodes.worlds.pocket import Simulator

    closed = []
    monkeypatch.setattr(Simulator, "close", lambda self: closed.append(self), raising=False)
    with pytest.raises(DataError, match="labelled steps"):
        run("imitation", "model", "--data", home / "curtain", "--labels", 100_000, "--watched", 2)
    assert len(closed) == 1


def test_imitation(run, home):
    small = ("--labels", 8, "--rounds", 2, "--seeds", 1, "--episodes", 2, "--steps", 3, "--watched", 5)
    found, shown = run("imitation", "model", "--data", home / "curtain", *small)
    assert len(found["scores"]) == 8 and found["policy"] == "seeker" and "were watched" in shown.out


def test_what_cannot_be_judged_is_refused(run, home, tmp_path):
    with pytest.raises(CheckpointError, match="learned them"):
        run("imitation", "known", "--data", home / "curtain")
    with pytest.raises(ConfigError, match="of 16, and steps"):
        run("world", "model", "--data", home / "curtain", "--length", 4)
    record(RecordConfig(world="pocket", side=16, steps=20), tmp_path / "wide", episodes=3, quiet=True)
    with pytest.raises(DataError, match="the model's are"):
        run("world", "model", "--data", tmp_path / "wide", "--part", "all", "--length", 16)
    with pytest.raises(DataError, match="the model's are"):
        run("imitation", "model", "--data", tmp_path / "wide")
