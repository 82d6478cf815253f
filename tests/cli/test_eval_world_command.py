"""`vitrail eval MODEL world` and `imitation` on a small untrained world model."""

import json

import pytest
import torch
from PIL import Image

import worlds
from vitrail import hub
from vitrail.cli.eval_command import app
from vitrail.data.episodes import RecordConfig, record_episodes
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.models.genie_model import Genie

pytestmark = pytest.mark.filterwarnings("ignore:FD-")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    pytest.importorskip("av")
    folder = tmp_path_factory.mktemp("worlds")
    torch.manual_seed(0)
    hub.save(Genie(worlds.genie_config()), folder / "model")
    hub.save(Genie(worlds.genie_config(latent=False)), folder / "known")
    config = RecordConfig(world="pocket-curtain", image_size=8, steps=20, policy="seeker", seed=3)
    record_episodes(config, folder / "curtain", episodes=30, quiet=True)
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
    small = ("--split", "all", "--length", 16, "--rollout-frames", 8, "--steps", 1, "--count", 6)
    found, shown = run("world", "model", "--data", home / "curtain", *small, "--contact-sheet", tmp_path / "sheet.png")
    names = [score["name"] for score in found["scores"]]
    assert names[:6] == [
        "codec psnr",
        "still psnr@4",
        "Δpsnr@4",
        "purity of latent actions",
        "left/right accuracy of latent actions",
        "actions recovered from frames",
    ]
    fvd = names.count("FVD, FD-pixels4"), names.count("FVD, FD-pixels4, to other videos")
    assert names.count("psnr") == names.count("psnr@4") == 1 and fvd == (1, 1)
    assert found["scores"][3]["baselines"]["majority"] > 0 and found["scores"][4]["baselines"] == {"chance": 0.5}
    assert found["network"] == "FD-pixels4"
    assert "real clips" in shown.out and Image.open(tmp_path / "sheet.png").width > 300
    back = [score for score in found["scores"] if "reappears" in score["name"]]
    assert bool(back) != ("permanence is not measured" in shown.err)


def test_one_video_per_episode(home):
    """A window of the same episode would be counted as another."""
    from vitrail.data.episodes import EpisodeDataset
    from vitrail.evals.suites.world_scores import load_videos

    long = sum(EpisodeDataset(home / "curtain").lengths >= 4)
    assert len(load_videos(home / "curtain", "all", 1000, 4)[0]) == long < 1000
    assert len(load_videos(home / "curtain", "all", 5, 4)[0]) == 5


def test_simulator_is_closed_after_errors(run, home, monkeypatch):
    from vitrail.data.episodes.worlds.pocket import Simulator

    closed = []
    monkeypatch.setattr(Simulator, "close", lambda self: closed.append(self), raising=False)
    with pytest.raises(DataError, match="labelled steps"):
        run("imitation", "model", "--data", home / "curtain", "--num-labels", 100_000, "--max-videos", 2)
    assert len(closed) == 1


def test_imitation(run, home):
    small = (
        "--num-labels",
        8,
        "--train-steps",
        2,
        "--num-seeds",
        1,
        "--num-episodes",
        2,
        "--max-episode-steps",
        3,
        "--max-videos",
        5,
    )
    found, shown = run("imitation", "model", "--data", home / "curtain", *small)
    assert len(found["scores"]) == 8 and found["policy"] == "seeker" and "training data: " in shown.out


def test_invalid_options_are_refused(run, home, tmp_path):
    with pytest.raises(CheckpointError, match="is not a world model with latent"):
        run("imitation", "known", "--data", home / "curtain")
    with pytest.raises(ConfigError, match="and --steps is"):
        run("world", "model", "--data", home / "curtain", "--length", 4)
    record_episodes(RecordConfig(world="pocket", image_size=16, steps=20), tmp_path / "wide", episodes=3, quiet=True)
    with pytest.raises(DataError, match="has frames of"):
        run("world", "model", "--data", tmp_path / "wide", "--split", "all", "--length", 16)
    with pytest.raises(DataError, match="has frames of"):
        run("imitation", "model", "--data", tmp_path / "wide")
