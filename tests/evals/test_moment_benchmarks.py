"""Moment scoring, compared with TimeChat's `eval_tvg.py`, and its baselines."""

from dataclasses import replace

import pytest

from data.formats.conftest import MAKERS
from vitrail.data.formats import open_dataset
from vitrail.data.formats.sample import Sample
from vitrail.errors import DataError
from vitrail.evals.metrics import moment_metrics
from vitrail.evals.metrics.scoring_table import ScoringTable
from vitrail.evals.suites.benchmarks import get_benchmark

# Twelve rows of TimeChat's example files: reference, and span parsed from the answer.
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


def test_moment_scores_match_the_script():
    """`python eval_tvg.py --sample` prints 58.333333333333336, 25.0 and 25.0; the mean is of its `iou`."""
    samples = [Sample(id=str(n), moments=(true,), metadata={"seconds": 30.0}) for n, (true, _) in enumerate(ROWS)]
    output = ["no idea" if read is None else f"It happens in {read[0]} - {read[1]} seconds." for _, read in ROWS]
    found = {score.name: score for score in get_benchmark("charades").score(samples, output)}
    assert found["mean IoU"].value == pytest.approx(0.41741777399374874, abs=1e-12)
    at = [100 * found[f"R@1 at IoU {at}"].value for at in (".3", ".5", ".7")]
    assert at == pytest.approx([58.333333333333336, 25.0, 25.0], abs=1e-12)
    assert found["no span"].value == 2 / 12
    for score in found.values():
        assert score.interval[0] <= score.value <= score.interval[1] and score.count == 12
        assert set(score.baselines) == {"whole video", "middle half", "majority"}


def test_moment_baselines():
    spans = [(0, 3), (0.2, 2.9), (6, 9), (5, 5.1)]
    sheet = ScoringTable.from_samples(
        Sample(id=str(n), moments=(span,), metadata={"seconds": 10.0}) for n, span in enumerate(spans)
    )
    assert moment_metrics.build_whole_video_answers(sheet)[0] == "0.00 - 10.00 seconds"
    assert moment_metrics.middle_half_answers(sheet)[0] == "2.50 - 7.50 seconds"
    assert moment_metrics.majority_answers(sheet) == ["0.00 - 3.00 seconds"] * 4
    short = ScoringTable.from_samples(sheet.samples[3:])  # starts and ends at one tenth
    assert moment_metrics.majority_answers(short) == ["4.50 - 5.50 seconds"]
    scores = get_benchmark("charades").score(sheet.samples, moment_metrics.majority_answers(sheet))
    assert scores[0].value == scores[0].baselines["majority"] > scores[0].baselines["whole video"]


def test_best_of_several_moments_counts(tmp_path):
    made = MAKERS["qvhighlights"][1](tmp_path)
    samples = open_dataset("qvhighlights", made.path, **made.options)
    row = get_benchmark("qvhighlights")
    assert "A girl cooked." in row.build_question(samples[0]) and "{" not in row.build_question(samples[0])
    assert [score.value for score in row.score(samples, ["82 - 150", "20 - 24.5"])][:4] == [1, 1, 1, 1]
    assert row.compare(samples, ["82 - 150", "20 - 24.5"], ["0 - 1"] * 2).difference > 0.9
    assert [result for result, _ in row.grade_answers(samples, ["82 - 150", "none"])] == ["right", "unread"]
    with pytest.raises(DataError, match="has no reference moments"):
        row.score([replace(samples[0], moments=())], [""])


def test_bootstrap_groups_questions_about_one_video(tmp_path):
    made = MAKERS["charades-sta"][1](tmp_path)
    sheet = ScoringTable.from_samples(open_dataset("charades-sta", made.path, **made.options))
    assert sheet.image_keys[0] == sheet.image_keys[1] != sheet.image_keys[2]
    with pytest.raises(DataError, match=r"3MSZA\.mp4"):  # its duration comes from the file, which is not a video
        moment_metrics.build_whole_video_answers(sheet)
