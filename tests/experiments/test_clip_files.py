"""The trained video model of results/starts answers questions about mp4 files of another program's encoder."""

from pathlib import Path

import pytest

from experiments.results_files import read_results_file
from experiments.video.__main__ import measure_clip_files
from experiments.video.clip_files import ALL, FRAMES, SAME, iter_clip_examples, score_clip_files
from experiments.video.video_page import render_video_page
from vitrail.cli.ask_command import ask_questions
from vitrail.errors import ConfigError, DataError
from vitrail.pipelines import ChatPipeline

pytest.importorskip("av")
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "results" / "starts" / "video-time"


def test_ask_answers_questions_about_an_mp4(tmp_path, capsys):
    """The first clip of the test split, as `vitrail ask clip.mp4 …`: its events, in order, and its shapes."""
    (clip,) = iter_clip_examples(1)
    file = str(clip.write_mp4(tmp_path / "clip.mp4", crf=23))
    first, last, *_, shapes = clip.questions
    assert (first.kind, last.kind, shapes.kind) == ("order", "order", "shapes") and first.opposite == last.reference
    rows = (("What happens first?", first), ("What happens last?", last), (shapes.question, shapes))
    for question, expected in rows:
        ask_questions(file, question, model=str(MODEL), device="cpu")
        assert capsys.readouterr().out.strip() == expected.reference


@pytest.mark.slow
def test_mp4_files_score_as_high_as_frames():
    """Forty clips. Answers about order are no better than a random event of the clip, see docs/vlm-video.md."""
    scores = score_clip_files(ChatPipeline.load(MODEL, device="cpu"), 40, (23,))
    frames, files = scores[FRAMES], scores["mp4, crf 23"]
    least = {"needle": 1.0, "shapes": 0.95, "count": 0.88, "part": 0.7, "when": 0.45, "order": 0.2}
    assert all(rows[kind].value >= value for rows in (frames, files) for kind, value in least.items())
    assert files[SAME].value >= 0.95 and abs(files[ALL].value - frames[ALL].value) <= 0.02 and files[ALL].count == 200
    kept = read_results_file(ROOT / "results" / "video-time-files.json").values
    assert frames[ALL].value == pytest.approx(kept[FRAMES, "files", ALL][1], abs=0.02)


def test_scores_of_files_are_on_the_page(tmp_path):
    results = tmp_path / "video-time.json"
    results.write_text((ROOT / "results" / "video-time.json").read_text())
    assert "## Video files" not in render_video_page(results, "page.svg")
    measure_clip_files(model=MODEL, count=1, crf=(23,), json=tmp_path / "video-time-files.json")
    text = render_video_page(results, "page.svg")
    assert "| kind | frames | mp4, crf 23 |" in text
    line = next(line for line in text.splitlines() if line.startswith("| order | 100.0%"))
    assert line.count("100.0% [34.2%, 100.0%] of 2") == 2  # both events of the first clip, Wilson's interval


def test_bad_counts_and_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="count is 0"):
        next(iter_clip_examples(0))
    (tmp_path / "video-time.json").write_text((ROOT / "results" / "video-time.json").read_text())
    (tmp_path / "video-time-files.json").write_text('{"table": [{"variant": "frames"}]}')
    with pytest.raises(DataError, match=r"video-time-files\.json is not a file of"):
        render_video_page(tmp_path / "video-time.json", "page.svg")
