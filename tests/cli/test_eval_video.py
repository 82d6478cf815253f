"""`vitrail eval MODEL charades` and `needle`: a small random Qwen2-VL is asked about real videos."""

import json

import pytest
from PIL import Image

pytest.importorskip("av")

from evals.test_needle import lettered
from test_talker_video import FRAMES, RATE, save, write_clip
from vitrail.cli.eval import app
from vitrail.errors import VitrailError

SECONDS = FRAMES / RATE


def run(*words) -> None:
    app([str(word) for word in words], result_action="return_value")


@pytest.fixture(autouse=True)
def _few_sprites(monkeypatch):
    monkeypatch.setattr("vitrail.data.scenes.library.open_atlas", lambda name: lettered())


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


def test_needles_in_scenes(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["vitrail", "eval", "qwen", "needle"])
    out, page, drawn = (tmp_path / name for name in ("scores.json", "found.html", "grid.png"))
    where = ("--count", 2, "--side", 32, "--max-new", 3, "--device", "cpu")
    run(
        model,
        "needle",
        "--frames",
        4,
        "--frames",
        7,
        "--depths",
        3,
        *where,
        "--out",
        out,
        "--page",
        page,
        "--show",
        drawn,
    )
    told = capsys.readouterr().out
    assert "needle found, frames 7, depth 50%" in told and "no needle" in told and "majority 50.0%" in told
    found = json.loads(out.read_text())
    assert (found["frames"], found["depths"], len(found["scores"])) == ([4, 7], [0.0, 0.5, 1.0], 1 + 2 + 6)
    assert found["scores"][0]["of"] == 12 and found["scores"][3]["part"] == {"frames": 4, "depth": "0%"}
    assert found["tokens"]["7"] > found["tokens"]["4"] > 0
    assert Image.open(drawn).width > 200
    text = page.read_text()
    assert "Where needles are found" in text and "frames of the haystack" in text and "Without the needle" in text


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_needles_in_a_video(model, tmp_path, capsys, ending):
    clip = write_clip(tmp_path / "film.mp4")
    Image.new("RGB", (30, 20), "red").save(tmp_path / "note.png")
    told = [{"path": "note.png", "prompt": "Find the note. Which colour has it?", "answer": "red"}]
    (tmp_path / "dataset.json").write_text(json.dumps(told))
    where = ("--video", clip, "--needles", tmp_path / "dataset.json", "--depths", 2, "--max-new", 2, "--device", "cpu")
    run(model, "needle", "--frames", 6, *where, "--show", tmp_path / f"grid.{ending}")
    assert "majority 100.0%" in capsys.readouterr().out and (tmp_path / f"grid.{ending}").is_file()
    with pytest.raises(VitrailError, match=r"film\.mp4: 22 frames of a video that has 21"):
        run(model, "needle", "--frames", 22, *where)


def test_what_the_model_is_shown(model, tmp_path, monkeypatch):
    """The video's frames in their order, with the needle at its place among them, and once without it."""
    from vitrail.talker import Talker

    shown = []
    monkeypatch.setattr(Talker, "ask", lambda _, video, question, **how: shown.append(video) or "red")
    Image.new("RGB", (56, 40), "red").save(tmp_path / "note.png")
    (tmp_path / "dataset.json").write_text(json.dumps([{"path": "note.png", "prompt": "Which?", "answer": "red"}]))
    where = ("--needles", tmp_path / "dataset.json", "--video", write_clip(tmp_path / "film.mp4"), "--device", "cpu")
    run(model, "needle", "--frames", 6, "--depths", 4, *where)
    hay = [frame.tobytes() for frame in shown[0].source]
    red = Image.new("RGB", (56, 40), "red").tobytes()
    assert len(hay) == len(set(hay)) == 6 and red not in hay
    for video, at in zip(shown[1:], (0, 2, 4, 6), strict=True):
        assert [frame.tobytes() for frame in video.source] == [*hay[:at], red, *hay[at:]]
        assert list(video.seconds) == list(range(7))


def test_a_haystack_that_does_not_fit_is_refused_before_anything_is_said(model, monkeypatch):
    from vitrail.talker import Talker

    monkeypatch.setattr(Talker, "ask", lambda *_, **__: pytest.fail("was asked"))
    words = ("--count", 1, "--side", 32, "--device", "cpu")
    with pytest.raises(VitrailError, match=r"of 2,000 frames: the prompt has [\d,]+ tokens, .* 2,048"):
        run(model, "needle", "--frames", 4, "--frames", 2000, *words)
    for wrong, said in (
        ((model, "needle", "--frames", 0), "0 frames"),
        ((model, "needle", "--depths", 0), "0 depths"),
        ((model, "needle", "--show", "grid.doc"), "no kind of picture"),
        ((model, "needle", "--pictures", "here"), "give --needles"),
        (("mini", "needle"), "reads no videos"),
    ):
        with pytest.raises(VitrailError) as caught:
            run(*wrong)
        assert said in f"{caught.value.problem} {caught.value.remedy}"


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl"])
def test_needles_for_other_families(family, tmp_path, capsys):
    from hub.test_internvl_video import save as save_internvl

    _ = save_internvl(tmp_path) if family == "internvl" else save(tmp_path, family)
    run(tmp_path, "needle", "--frames", 3, "--depths", 2, "--count", 1, "--side", 16, "--max-new", 2, "--device", "cpu")
    assert "needle found, frames 3, depth 100%" in capsys.readouterr().out


def test_a_model_that_reads_no_videos_names_those_that_do(tmp_path):
    from test_talker import save as save_llava

    save_llava(tmp_path)
    with pytest.raises(VitrailError, match="reads pictures and no videos"):
        run(tmp_path, "needle", "--count", 1, "--side", 32, "--device", "cpu")
