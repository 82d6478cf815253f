"""Spans of time in what models write, and how well they lie: (start, end) in seconds.

The rules are those of TimeChat, Time-R1 and lmms-eval put together: what stands in <answer> … </answer> counts alone;
two times of a clock are a span, else the first range ("3.0 - 5.5", "3 to 5"), else the first two numbers.
"""

import re
from collections.abc import Sequence

from vitrail.evals.metrics.spoken import spoken

Span = tuple[float, float]

_CLOCK = r"(?<![\d.:])(?:\d{1,2}:)?\d{1,2}:\d{2}(?:\.\d+)?(?![\d:])"  # 1:02:03.5, 02:03
_NUMBER = r"(?<![\d.:])\d{1,9}(?:\.\d+)?(?![\d:])"
_TIME = rf"({_CLOCK}|{_NUMBER})"
_UNIT = r"\s*(?:s|secs?|seconds?)?\s*>?"  # <3.0 seconds> as Qwen3-VL is told times
_CLOCKS, _TIMES = re.compile(_CLOCK, re.ASCII), re.compile(_TIME, re.ASCII)
_RANGE = re.compile(rf"{_TIME}{_UNIT}\s*(?:-|–|—|~|to|and|until|,)\s*<?{_TIME}", re.ASCII | re.IGNORECASE)


def read_span(text: str) -> Span | None:
    """The span of an answer, its earlier end first; None where there are no two times."""
    said = spoken(text)
    clocks = _CLOCKS.findall(said)
    found = _RANGE.search(said)
    times = clocks if len(clocks) > 1 else list(found.groups()) if found else _TIMES.findall(said)
    if len(times) < 2:
        return None
    first, second = map(_seconds, times[:2])
    return min(first, second), max(first, second)


def write_span(span: Span) -> str:
    """As an answer says it, to the hundredth of a second."""
    return f"{span[0]:.2f} - {span[1]:.2f} seconds"


def overlap(span: Span, moments: Sequence[Span]) -> float:
    """What a span shares of what it covers together with a moment, as Charades-STA's scripts have it; of several
    moments, as QVHighlights has them, the one that it lies on best. 0 of two without a length."""
    return max((_overlap(span, moment) for moment in moments), default=0.0)


def _overlap(a: Span, b: Span) -> float:
    covered = max(a[1], b[1]) - min(a[0], b[0])
    return max(0.0, min(a[1], b[1]) - max(a[0], b[0])) / covered if covered > 0 else 0.0


def _seconds(time: str) -> float:
    seconds = 0.0
    for part in time.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds
