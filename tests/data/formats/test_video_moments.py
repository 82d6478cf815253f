"""Moments of videos in the formats of Charades-STA, QVHighlights and ActivityNet Captions, and V-NIAH's needles."""

import json

import pytest

from vitrail.data.formats import detect_format, open_dataset
from vitrail.errors import DataError


def test_charades(make):
    made = make("charades-sta")
    first, second, third = open_dataset("charades-sta", made.path, **made.options)
    assert (first.id, second.id, third.id) == ("3MSZA/1", "3MSZA/2", "AMT7R/1")
    assert first.moments == ((24.3, 30.4),) and first.turns[0].text == "person turn a light on."
    assert [part.kind for part in first.turns[0].parts] == ["video", "text"]
    assert (first.videos[0].name, third.videos[0].name) == ("3MSZA.mp4", "AMT7R.mkv") and first.media == first.videos


def test_several_moments_and_lengths(make):
    one, two = open_dataset("qvhighlights", (made := make("qvhighlights")).path, **made.options)
    assert one.moments == ((82.0, 150.0),) and two.moments == ((0.0, 16.0), (20.0, 24.5))
    assert two.metadata["seconds"] == 150.0 and two.videos[0].name == "NUs_60.0_210.0.mp4"
    samples = open_dataset("activitynet-captions", (made := make("activitynet-captions")).path, **made.options)
    assert [sample.id for sample in samples][1:3] == ["v_QOlSCBRmfWY/2", "v_ehGHCYKzyZ8/1"]
    assert samples[1].turns[0].text == "She runs." and samples[1].moments == ((17.37, 60.81),)


def test_needles(make):
    samples = open_dataset("v-niah", make("v-niah").path)
    assert samples[0].turns[0].text == "What is first on the note?" and samples[1].answers == ("B",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("3MSZA 24.3##person turn a light on.", "line 2: .* is not a moment"),
        ("3MSZA 24.3 late##person turn a light on.", "line 2: .* is not a moment"),
        ("3MSZA 24.3 30.4 person turn a light on.", "line 2: .* is not a moment"),
        ("3MSZA -1 30.4##person turn a light on.", r"3MSZA/2 has invalid times \(-1.0, 30.4"),
        ("3MSZA nan 30.4##person turn a light on.", r"3MSZA/2 has invalid times \(nan"),
    ],
)
def test_invalid_lines_are_refused(make, line, message):
    made = make("charades-sta")
    made.path.write_text(f"3MSZA 1.0 2.0##person sits.\n{line}\n")
    with pytest.raises(DataError, match=message):
        open_dataset("charades-sta", made.path, **made.options)


def test_other_errors_and_skipped_moments(make, tmp_path):
    made = make("charades-sta")
    made.path.write_text("3MSZA 1.0 2.0##person sits.\r\n\n3MSZA 5.0 4.0##person stands.\n")
    samples = open_dataset("charades-sta", made.path, **made.options)
    assert len(samples) == 1 and samples.skipped == {"moments without a length": 1}
    made.path.write_text("3MSZA 1.0 2.0##person sits.\nLOST 1.0 2.0##person stands.\n")
    with pytest.raises(DataError, match=r"LOST/1: video 'LOST.mp4' is not in") as caught:
        open_dataset("charades-sta", made.path, **made.options).check()
    assert "=FOLDER" in caught.value.remedy
    (tmp_path / "empty").mkdir()
    made.path.write_text("../clips/3MSZA 1.0 2.0##person sits.\n")
    with pytest.raises(DataError, match="leads out of"):
        open_dataset("charades-sta", made.path, video_folder=tmp_path / "empty").check()
    row = {"qid": 1, "query": "A dog.", "vid": "a", "duration": 150}
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    assert detect_format(tmp_path / "test.jsonl") == "qvhighlights"
    with pytest.raises(DataError, match="query 1 has no relevant_windows"):
        open_dataset("qvhighlights", tmp_path / "test.jsonl")
    entry = {"duration": 9.0, "timestamps": [[0, 1]], "sentences": []}
    (tmp_path / "val.json").write_text(json.dumps({"v_a": entry}))
    with pytest.raises(DataError, match="v_a has 1 timestamps and 0 sentences"):
        open_dataset("activitynet-captions", tmp_path / "val.json")
    (tmp_path / "needles.json").write_text(json.dumps([{"path": "a.png", "prompt": "What?", "answer": " "}]))
    with pytest.raises(DataError, match="no answer"):
        open_dataset("v-niah", tmp_path / "needles.json")
