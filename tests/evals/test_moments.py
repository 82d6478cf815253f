"""Charades-STA and its like: scores as TimeChat's `eval_tvg.py` has them, beside what needs no model."""

from dataclasses import replace

import pytest

from data.formats.conftest import MAKERS
from vitrail.data.formats import open_format
from vitrail.data.formats.sample import Sample
from vitrail.errors import DataError
from vitrail.evals.suites.benchmarks import benchmark
from vitrail.evals.suites.scored import moments
from vitrail.evals.suites.sheets import Sheet

# Twelve rows of TimeChat's example files: what is true, and what was read from the model's answer.
ROWS = [
    ((0.0, 6.1), (0.0, 6.4)),
    ((0.0, 9.5), (0.0, 10.9)),
    ((0.0, 10.9), (1.3, 10.2)),
    ((18.8, 25.8), (20.8, 29.7)),
    ((1.1, 6.4), (0.0, 3.9)),
    ((0.0, 10.8), (0.0, 25.0)),
    ((5.0, 17.9), (0.0, 30.0)),
    ((0.4, 5.2), (4.0, 6.0)),
    ((11.3, 16.6), (14.4, 22.4)),
    ((0.0, 4.1), (0.0, 20.8)),
    ((3.1, 17.9), None),
    ((1.0, 11.0), None),
]


def test_scores_are_those_of_the_script():
    """`python eval_tvg.py --sample` prints 58.333333333333336, 25.0 and 25.0; the mean is of its `iou`."""
    samples = [Sample(id=str(n), moments=(true,), notes={"seconds": 30.0}) for n, (true, _) in enumerate(ROWS)]
    said = ["no idea" if read is None else f"It happens in {read[0]} - {read[1]} seconds." for _, read in ROWS]
    found = {score.name: score for score in benchmark("charades").score(samples, said)}
    assert found["mean IoU"].value == pytest.approx(0.41741777399374874, abs=1e-12)
    at = [100 * found[f"R@1 at IoU {at}"].value for at in (".3", ".5", ".7")]
    assert at == pytest.approx([58.333333333333336, 25.0, 25.0], abs=1e-12)
    assert found["no span"].value == 2 / 12
    for score in found.values():
        assert score.interval[0] <= score.value <= score.interval[1] and score.of == 12
        assert set(score.beside) == {"whole video", "middle half", "majority"}


def test_what_needs_no_model():
    spans = [(0, 3), (0.2, 2.9), (6, 9), (5, 5.1)]
    sheet = Sheet.of(Sample(id=str(n), moments=(span,), notes={"seconds": 10.0}) for n, span in enumerate(spans))
    assert moments.whole(sheet)[0] == "0.00 - 10.00 seconds"
    assert moments.middle_half(sheet)[0] == "2.50 - 7.50 seconds"
    assert moments.majority(sheet) == ["0.00 - 3.00 seconds"] * 4
    short = Sheet.of(sheet.samples[3:])  # which begins and ends at one mark
    assert moments.majority(short) == ["4.50 - 5.50 seconds"]
    scores = benchmark("charades").score(sheet.samples, moments.majority(sheet))
    assert scores[0].value == scores[0].beside["majority"] > scores[0].beside["whole video"]


def test_one_of_several_moments_will_do(tmp_path):
    made = MAKERS["qvhighlights"][1](tmp_path)
    samples = open_format("qvhighlights", made.path, **made.options)
    row = benchmark("qvhighlights")
    assert "A girl cooked." in row.question(samples[0]) and "{" not in row.question(samples[0])
    assert [score.value for score in row.score(samples, ["82 - 150", "20 - 24.5"])][:4] == [1, 1, 1, 1]
    assert row.compare(samples, ["82 - 150", "20 - 24.5"], ["0 - 1"] * 2).difference > 0.9
    assert [told for told, _ in row.verdicts(samples, ["82 - 150", "none"])] == ["right", "unread"]
    with pytest.raises(DataError, match="is not known"):
        row.score([replace(samples[0], moments=())], [""])


def test_questions_about_one_video_stand_or_fall_together(tmp_path):
    made = MAKERS["charades-sta"][1](tmp_path)
    sheet = Sheet.of(open_format("charades-sta", made.path, **made.options))
    assert sheet.pictures[0] == sheet.pictures[1] != sheet.pictures[2]
    with pytest.raises(DataError, match=r"3MSZA\.mp4"):  # its length is the file's, and this is none
        moments.whole(sheet)
