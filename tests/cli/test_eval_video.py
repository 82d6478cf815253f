"""`vitrail eval MODEL charades` and `needle`: a small random Qwen2-VL is asked about real videos."""

import json

import pytest

pytest.importorskip("av")

from test_talker_video import FRAMES, RATE, save, write_clip
from vitrail.cli.eval import app
from vitrail.errors import VitrailError

SECONDS = FRAMES / RATE


def run(*words) -> None:
    app([str(word) for word in words], result_action="return_value")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2_vl")
    save(folder, "qwen2_vl")
    return folder


@pytest.fixture
def charades(tmp_path):
    (tmp_path / "clips").mkdir()
    for name in ("3MSZA", "AMT7R"):
        write_clip(tmp_path / "clips" / f"{name}.mp4")
    lines = ["3MSZA 0.5 1.5##a square moves.", "3MSZA 0.0 1.0##it is dark.", "AMT7R 1.0 2.5##a square moves."]
    (tmp_path / "charades_sta_test.txt").write_text("\n".join(lines))
    return tmp_path / "charades_sta_test.txt"


def test_charades(model, charades, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["vitrail", "eval", "qwen", "charades"])
    where = ("--data", charades, "--videos", tmp_path / "clips", "--max-new", 6, "--device", "cpu")
    out, kept, page = (tmp_path / name for name in ("scores.json", "answers.jsonl", "found.html"))
    run(model, "charades", *where, "--frames", 4, "--out", out, "--answers", kept, "--page", page)
    told = capsys.readouterr().out
    assert "mean IoU" in told and "R@1 at IoU .7" in told and "whole video" in told and "blind" in told
    found = json.loads(out.read_text())
    assert (found["suite"], found["frames"], len(found["scores"])) == ("charades", 4, 5)
    beside = found["scores"][0]["beside"]
    assert beside["whole video"] == pytest.approx((1 + 1 + 1.5) / 3 / SECONDS, abs=5e-3)
    assert set(beside) == {"whole video", "middle half", "majority", "blind"}
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(rows) == 6 and rows[0]["how"] == {"frames": 4, "max_new": 6} and rows[0]["pictures"][0].endswith(".mp4")
    assert [row["blind"] for row in rows] == [False] * 3 + [True] * 3 and rows[3]["how"] == {"max_new": 6}
    text = page.read_text()
    assert "right: 0.5 - 1.5 s" in text and text.count("data:image/png") == 3 * 4
    other = tmp_path / "other.jsonl"
    other.write_text(kept.read_text().replace('"answer":"', '"answer":"0.5 - 1.5 '))
    run("compare", "charades", kept, other, "--data", charades, "--videos", tmp_path / "clips")
    assert "of 3" in capsys.readouterr().out


def test_what_cannot_be_asked_is_said_first(model, charades, tmp_path, capsys):
    where = ("charades", "--data", charades, "--videos", tmp_path / "clips", "--device", "cpu")
    for words, said in (
        ((model, *where, "--frames", 4, "--fps", 1), "both say"),
        ((model, *where, "--frames", 99), "99 frames of a video that has 21"),
        ((model, "charades", "--data", charades), "video '3MSZA.mp4' is not in"),
        (("mini", *where), "a unified model reads no videos"),
    ):
        with pytest.raises(VitrailError, match=said):
            run(*words)
    charades.write_text(charades.read_text() + "\nAMT7R 2 1##it ends.")
    run(model, *where, "--max-new", 2, "--no-blind")
    assert "skipped 1 moments without a length" in capsys.readouterr().out
