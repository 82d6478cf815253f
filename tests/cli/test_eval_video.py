"""`vitrail eval MODEL charades` and `needle`: a small random Qwen2-VL is asked about real videos."""

import json

import pytest
from PIL import Image

pytest.importorskip("av")

from evals.test_needle_search import lettered
from pipelines.test_chat_video import FRAMES, RATE, save, write_clip
from vitrail.cli.eval_command import app
from vitrail.errors import VitrailError

SECONDS = FRAMES / RATE


def run(*words) -> None:
    app([str(word) for word in words], result_action="return_value")


@pytest.fixture(autouse=True)
def _few_sprites(monkeypatch):
    monkeypatch.setattr("vitrail.data.scenes.atlas_library.open_atlas", lambda name: lettered())


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
    where = ("--data", charades, "--video-folder", tmp_path / "clips", "--max-new-tokens", 6, "--device", "cpu")
    out, kept, page = (tmp_path / name for name in ("scores.json", "answers.jsonl", "found.html"))
    run(model, "charades", *where, "--num-frames", 4, "--out", out, "--answers", kept, "--page", page)
    result = capsys.readouterr().out
    assert "mean IoU" in result and "R@1 at IoU .7" in result and "whole video" in result and "blind" in result
    found = json.loads(out.read_text())
    assert (found["suite"], found["num_frames"], len(found["scores"])) == ("charades", 4, 5)
    neighbour = found["scores"][0]["baselines"]
    assert neighbour["whole video"] == pytest.approx((1 + 1 + 1.5) / 3 / SECONDS, abs=5e-3)
    assert set(neighbour) == {"whole video", "middle half", "majority", "blind"}
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert (
        len(rows) == 6
        and rows[0]["options"] == {"num_frames": 4, "max_new_tokens": 6}
        and rows[0]["media"][0].endswith(".mp4")
    )
    assert [row["blind"] for row in rows] == [False] * 3 + [True] * 3 and rows[3]["options"] == {"max_new_tokens": 6}
    text = page.read_text()
    assert "reference: 0.5 - 1.5 s" in text and text.count("data:image/png") == 3 * 4
    other = tmp_path / "other.jsonl"
    other.write_text(kept.read_text().replace('"answer":"', '"answer":"0.5 - 1.5 '))
    run("compare", "charades", kept, other, "--data", charades, "--video-folder", tmp_path / "clips")
    assert "of 3" in capsys.readouterr().out


def test_invalid_options_are_refused_before_loading_weights(model, charades, tmp_path, capsys):
    where = ("charades", "--data", charades, "--video-folder", tmp_path / "clips", "--device", "cpu")
    for words, output in (
        ((model, *where, "--num-frames", 4, "--fps", 1), "--num-frames and --fps exclude each other"),
        ((model, *where, "--num-frames", 99), "num_frames is 99, and the video has 21 frames"),
        ((model, "charades", "--data", charades), "video '3MSZA.mp4' is not in"),
        (("mini", *where), "does not support videos"),
    ):
        with pytest.raises(VitrailError, match=output):
            run(*words)
    charades.write_text(charades.read_text() + "\nAMT7R 2 1##it ends.")
    run(model, *where, "--max-new-tokens", 2, "--no-blind")
    assert "skipped 1 moments without a length" in capsys.readouterr().out


def test_needles_in_scenes(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["vitrail", "eval", "qwen", "needle"])
    out, page, drawn = (tmp_path / name for name in ("scores.json", "found.html", "grid.png"))
    where = ("--count", 2, "--image-size", 32, "--max-new-tokens", 3, "--device", "cpu")
    run(
        model,
        "needle",
        "--num-frames",
        4,
        "--num-frames",
        7,
        "--depths",
        3,
        *where,
        "--out",
        out,
        "--page",
        page,
        "--heatmap",
        drawn,
    )
    result = capsys.readouterr().out
    assert "needle found, frames 7, depth 50%" in result and "no needle" in result and "majority 50.0%" in result
    found = json.loads(out.read_text())
    assert (found["num_frames"], found["depths"], len(found["scores"])) == ([4, 7], [0.0, 0.5, 1.0], 1 + 2 + 6)
    assert found["scores"][0]["count"] == 12 and found["scores"][3]["subset"] == {"frames": 4, "depth": "0%"}
    assert found["tokens"]["7"] > found["tokens"]["4"] > 0
    assert Image.open(drawn).width > 200
    text = page.read_text()
    assert "Needle retrieval" in text and "frames of the haystack" in text and "Without the needle" in text


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_needles_in_a_video(model, tmp_path, capsys, ending):
    clip = write_clip(tmp_path / "film.mp4")
    Image.new("RGB", (30, 20), "red").save(tmp_path / "note.png")
    result = [{"path": "note.png", "prompt": "Find the note. Which colour has it?", "answer": "red"}]
    (tmp_path / "dataset.json").write_text(json.dumps(result))
    where = (
        "--video",
        clip,
        "--needles",
        tmp_path / "dataset.json",
        "--depths",
        2,
        "--max-new-tokens",
        2,
        "--device",
        "cpu",
    )
    run(model, "needle", "--num-frames", 6, *where, "--heatmap", tmp_path / f"grid.{ending}")
    assert "majority 100.0%" in capsys.readouterr().out and (tmp_path / f"grid.{ending}").is_file()
    with pytest.raises(VitrailError, match=r"film\.mp4 has 21 frames, fewer than 22"):
        run(model, "needle", "--num-frames", 22, *where)


def test_needle_frames_and_timestamps(model, tmp_path, monkeypatch):
    """The video's frames in their order, with the needle at its place among them, and once without it."""
    from vitrail.pipelines import ChatPipeline

    shown = []
    monkeypatch.setattr(ChatPipeline, "ask", lambda _, video, question, **how: shown.append(video) or "red")
    Image.new("RGB", (56, 40), "red").save(tmp_path / "note.png")
    (tmp_path / "dataset.json").write_text(json.dumps([{"path": "note.png", "prompt": "Which?", "answer": "red"}]))
    where = ("--needles", tmp_path / "dataset.json", "--video", write_clip(tmp_path / "film.mp4"), "--device", "cpu")
    run(model, "needle", "--num-frames", 6, "--depths", 4, *where)
    hay = [frame.tobytes() for frame in shown[0].source]
    red = Image.new("RGB", (56, 40), "red").tobytes()
    assert len(hay) == len(set(hay)) == 6 and red not in hay
    for video, at in zip(shown[1:], (0, 2, 4, 6), strict=True):
        assert [frame.tobytes() for frame in video.source] == [*hay[:at], red, *hay[at:]]
        assert list(video.timestamps) == list(range(7))


def test_haystack_beyond_the_context_is_refused_before_generation(model, monkeypatch):
    from vitrail.pipelines import ChatPipeline

    monkeypatch.setattr(ChatPipeline, "ask", lambda *_, **__: pytest.fail("was asked"))
    words = ("--count", 1, "--image-size", 32, "--device", "cpu")
    with pytest.raises(VitrailError, match=r"of 2,000 frames: the prompt has [\d,]+ tokens, .* 2,048"):
        run(model, "needle", "--num-frames", 4, "--num-frames", 2000, *words)
    for wrong, output in (
        ((model, "needle", "--num-frames", 0), "0 frames"),
        ((model, "needle", "--depths", 0), "0 depths"),
        ((model, "needle", "--heatmap", "grid.doc"), "is not a chart format"),
        ((model, "needle", "--image-folder", "here"), "give --needles"),
        (("mini", "needle"), "does not support videos"),
    ):
        with pytest.raises(VitrailError) as caught:
            run(*wrong)
        assert output in f"{caught.value.problem} {caught.value.remedy}"


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl"])
def test_needles_for_other_families(family, tmp_path, capsys):
    from hub.test_internvl_video import save as save_internvl

    _ = save_internvl(tmp_path) if family == "internvl" else save(tmp_path, family)
    run(
        tmp_path,
        "needle",
        "--num-frames",
        3,
        "--depths",
        2,
        "--count",
        1,
        "--image-size",
        16,
        "--max-new-tokens",
        2,
        "--device",
        "cpu",
    )
    assert "needle found, frames 3, depth 100%" in capsys.readouterr().out


def test_model_without_video_support_is_refused(tmp_path):
    from pipelines.test_chat import save as save_llava

    save_llava(tmp_path)
    with pytest.raises(VitrailError, match="takes images and no videos"):
        run(tmp_path, "needle", "--count", 1, "--image-size", 32, "--device", "cpu")
