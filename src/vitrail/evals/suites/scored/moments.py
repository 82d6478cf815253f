"""When something happens in a video: Charades-STA, QVHighlights, ActivityNet Captions."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from vitrail.data.formats import Sample
from vitrail.data.formats.sample import progress
from vitrail.data.video import open_video
from vitrail.errors import DataError
from vitrail.evals.metrics.moments import overlap, read_span, write_span
from vitrail.evals.shares import Score
from vitrail.evals.suites.scored import Said, Values
from vitrail.evals.suites.sheets import Sheet, commonest, mean

AT = (0.3, 0.5, 0.7)  # of Charades-STA
PARTS = 10  # of a video, in which the commonest span is counted


def overlaps(sheet: Sheet, said: Said) -> Values:
    """The IoU of each answer's span with the moment that it lies on best; 0 without a span."""
    pairs = zip(map(read_span, said), _told(sheet), strict=True)
    return [0.0 if span is None else overlap(span, sample.moments) for span, sample in pairs]


def unread(sheet: Sheet, said: Said) -> list[bool]:
    return [read_span(answer) is None for answer in said]


def localised(sheet: Sheet, said: Said) -> list[Score]:
    """Mean IoU, and the share of answers at or above each threshold: R@1 of one answer a question."""
    each = overlaps(sheet, said)
    return [
        mean("mean IoU", each, sheet.pictures),
        *(
            mean(f"R@1 at IoU {at:.1f}".replace("0.", "."), [float(x >= at) for x in each], sheet.pictures, binary=True)
            for at in AT
        ),
        mean("no span", [float(lost) for lost in unread(sheet, said)], sheet.pictures, binary=True),
    ]


def _told(sheet: Sheet) -> list[Sample]:
    untold = next((sample.id for sample in sheet.samples if not sample.moments), None)
    if untold is not None:
        raise DataError(f"when {untold!r} happens is not known", "score a split whose moments are told")
    return sheet.samples


# ---- what needs no model ----------------------------------------------------------------------------------------


def whole(sheet: Sheet) -> list[str]:
    return _everywhere(sheet, (0.0, 1.0))


def middle_half(sheet: Sheet) -> list[str]:
    return _everywhere(sheet, (0.25, 0.75))


def majority(sheet: Sheet) -> list[str]:
    """The commonest span, in tenths of the videos' lengths."""
    tenths = (
        "{} {}".format(*(round(PARTS * min(time / length(sample), 1.0)) for time in moment))
        for sample in _told(sheet)
        for moment in sample.moments
    )
    start, end = map(int, commonest(tenths).split())
    return _everywhere(sheet, (start / PARTS, end / PARTS) if start < end else _around(start))


def _around(tenth: int) -> tuple[float, float]:
    """Moments much shorter than a tenth begin and end at one mark."""
    return max(0.0, (tenth - 0.5) / PARTS), min(1.0, (tenth + 0.5) / PARTS)


def _everywhere(sheet: Sheet, shares: Sequence[float]) -> list[str]:
    """The same span of every video, in shares of its length."""
    lengths = (length(sample) for sample in progress(sheet.samples, "lengths of videos"))
    return [write_span((shares[0] * seconds, shares[1] * seconds)) for seconds in lengths]


def length(sample: Sample) -> float:
    """Seconds of a sample's video: as its data set says, or as the file has it."""
    told = sample.notes.get("seconds")
    return float(told) if told else _filmed(sample.videos[0])


@cache
def _filmed(video: Path) -> float:
    return open_video(video).duration
