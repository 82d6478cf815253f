"""Parses time spans from model answers and computes their IoU. Spans are (start, end) in seconds.

The rules combine those of TimeChat, Time-R1 and lmms-eval. Only the text in <answer> … </answer> counts. A span is two
clock times, else the first range ("3.0 - 5.5", "3 to 5"), else the first two numbers.
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from vitrail.data.formats import Sample
from vitrail.data.formats.sample import show_progress
from vitrail.data.video_file import open_video
from vitrail.errors import DataError
from vitrail.evals.metrics.final_answer import extract_final_answer
from vitrail.evals.metrics.scoring_table import AnswerTexts, ItemScores, ScoringTable, find_most_common, score_mean
from vitrail.evals.scores import Score

TimeSpan = tuple[float, float]

_CLOCK = r"(?<![\d.:])(?:\d{1,2}:)?\d{1,2}:\d{2}(?:\.\d+)?(?![\d:])"  # 1:02:03.5, 02:03
_NUMBER = r"(?<![\d.:])\d{1,9}(?:\.\d+)?(?![\d:])"
_TIME = rf"({_CLOCK}|{_NUMBER})"
_UNIT = r"\s*(?:s|secs?|seconds?)?\s*>?"  # <3.0 seconds>: Qwen3-VL's timestamps
_CLOCKS, _TIMES = re.compile(_CLOCK, re.ASCII), re.compile(_TIME, re.ASCII)
_RANGE = re.compile(rf"{_TIME}{_UNIT}\s*(?:-|–|—|~|to|and|until|,)\s*<?{_TIME}", re.ASCII | re.IGNORECASE)


def parse_span(text: str) -> TimeSpan | None:
    """Parse the span of an answer, earlier time first; None if there are no two times."""
    final_answer = extract_final_answer(text)
    clocks = _CLOCKS.findall(final_answer)
    range_match = _RANGE.search(final_answer)
    times = clocks if len(clocks) > 1 else list(range_match.groups()) if range_match else _TIMES.findall(final_answer)
    if len(times) < 2:
        return None
    first, second = map(_to_seconds, times[:2])
    return min(first, second), max(first, second)


def format_span(span: TimeSpan) -> str:
    """Format a span as answer text, with hundredths of a second."""
    return f"{span[0]:.2f} - {span[1]:.2f} seconds"


def temporal_iou(span: TimeSpan, moments: Sequence[TimeSpan]) -> float:
    """Largest IoU of a span with one of several reference moments; 0 if both have no length."""
    return max((_span_iou(span, moment) for moment in moments), default=0.0)


def _span_iou(a: TimeSpan, b: TimeSpan) -> float:
    union = max(a[1], b[1]) - min(a[0], b[0])
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0])) / union if union > 0 else 0.0


def _to_seconds(time: str) -> float:
    seconds = 0.0
    for part in time.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds


# ---- scores of benchmarks --------------------------------------------------------------------------------------------


IOU_THRESHOLDS = (0.3, 0.5, 0.7)  # as in Charades-STA
NUM_TENTHS = 10  # a majority baseline counts spans in tenths of the video length


def span_ious(table: ScoringTable, answers: AnswerTexts) -> ItemScores:
    """Largest IoU of each answer's span with a reference moment; 0 without a span."""
    pairs = zip(map(parse_span, answers), _samples_with_moments(table), strict=True)
    return [0.0 if span is None else temporal_iou(span, sample.moments) for span, sample in pairs]


def find_missing_spans(table: ScoringTable, answers: AnswerTexts) -> list[bool]:
    """Whether each answer has no span."""
    return [parse_span(answer) is None for answer in answers]


def score_moments(table: ScoringTable, answers: AnswerTexts) -> list[Score]:
    """Score mean IoU, R@1 at each IoU threshold, and answers without a span."""
    ious = span_ious(table, answers)
    return [
        score_mean("mean IoU", ious, table.image_keys),
        *(
            score_mean(
                f"R@1 at IoU {at:.1f}".replace("0.", "."), [float(x >= at) for x in ious], table.image_keys, binary=True
            )
            for at in IOU_THRESHOLDS
        ),
        score_mean(
            "no span", [float(lost) for lost in find_missing_spans(table, answers)], table.image_keys, binary=True
        ),
    ]


def _samples_with_moments(table: ScoringTable) -> list[Sample]:
    missing = next((sample.id for sample in table.samples if not sample.moments), None)
    if missing is not None:
        raise DataError(f"sample {missing!r} has no reference moments", "score a split with annotated moments")
    return table.samples


# ---- baselines --------------------------------------------------------------------------------------------------


def build_whole_video_answers(table: ScoringTable) -> list[str]:
    """Baseline: the whole video."""
    return _relative_span_answers(table, (0.0, 1.0))


def middle_half_answers(table: ScoringTable) -> list[str]:
    """Baseline: the middle half of the video."""
    return _relative_span_answers(table, (0.25, 0.75))


def majority_answers(table: ScoringTable) -> list[str]:
    """Baseline: the most common span, in tenths of the video length."""
    tenths = (
        "{} {}".format(*(round(NUM_TENTHS * min(time / video_seconds(sample), 1.0)) for time in moment))
        for sample in _samples_with_moments(table)
        for moment in sample.moments
    )
    start, end = map(int, find_most_common(tenths).split())
    return _relative_span_answers(table, (start / NUM_TENTHS, end / NUM_TENTHS) if start < end else _around_mark(start))


def _around_mark(tenth: int) -> tuple[float, float]:
    """Widen a moment that starts and ends at the same tenth."""
    return max(0.0, (tenth - 0.5) / NUM_TENTHS), min(1.0, (tenth + 0.5) / NUM_TENTHS)


def _relative_span_answers(table: ScoringTable, fractions: Sequence[float]) -> list[str]:
    """The same span for every video, in fractions of its length."""
    lengths = (video_seconds(sample) for sample in show_progress(table.samples, "lengths of videos"))
    return [format_span((fractions[0] * seconds, fractions[1] * seconds)) for seconds in lengths]


def video_seconds(sample: Sample) -> float:
    """Duration of a sample's video in seconds, from the dataset or from the file."""
    seconds = sample.metadata.get("seconds")
    return float(seconds) if seconds else _video_duration(sample.videos[0])


@cache
def _video_duration(video: Path) -> float:
    return open_video(video).duration
