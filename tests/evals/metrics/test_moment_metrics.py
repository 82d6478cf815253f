"""Span parsing compared with published scorers, formatting, and temporal IoU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.evals.metrics.moment_metrics import format_span, parse_span, temporal_iou

# Letters name the scorers that parse the same span: lmms-eval (L), TimeLens (T), Time-R1 (R). The others parse none or
# another span: lmms-eval takes 0:05 for 0 and 5, and reasoning for an answer.
SAID = [
    ("The event happens in 24.3 - 30.4 seconds.", (24.3, 30.4)),  # L T
    ("The event 'person turn a light on' happens in the 24.3 - 30.4 seconds", (24.3, 30.4)),  # L T
    ("Start time: 0.8 seconds\nEnd time: 1.1 seconds", (0.8, 1.1)),  # L T
    ("It starts at 00:00:18 and ends at 00:00:23.", (18, 23)),  # T
    ("from 0:05 to 0:09", (5, 9)),  # T
    ("12.54 to 17.83", (12.54, 17.83)),  # L T R
    ("<think>1.0 to 2.0, or 3.0 to 4.0</think><answer>5.00 to 7.50</answer>", (5, 7.5)),  # T R
    ("30.4 - 24.3 seconds", (24.3, 30.4)),  # L
    ("The event starts at 4 seconds and ends at 9.5 seconds.", (4, 9.5)),  # T
    ("<3.0 seconds> - <5.5 seconds>", (3, 5.5)),  # T
    ("from <3.0 seconds> to <5.5 seconds>", (3, 5.5)),  # T
    ("[4.4, 9.2]", (4.4, 9.2)),  # T
    ("between 2 and 6.", (2, 6)),  # T R
    ("2 people enter: 5.0s – 8.0s", (5, 8)),
    ("from 58.5 to 1:03", (58.5, 63)),
    ("1:00:01.5 - 1:00:04", (3601.5, 3604)),
    ("<think>it must be 3 - 4", None),
    ("no idea", None),
    ("at 5 seconds", None),
    ("", None),
]


@pytest.mark.parametrize(("output", "span"), SAID)
def test_span_parsing(output, span):
    assert parse_span(output) == span


seconds = st.integers(0, 359_999).map(lambda hundredths: hundredths / 100)
spans = st.tuples(seconds, seconds).map(lambda pair: (min(pair), max(pair)))


def clock(time: float) -> str:
    return f"{int(time // 60):02d}:{time % 60:05.2f}"


def long_clock(time: float) -> str:
    return f"{int(time // 3600)}:{int(time // 60 % 60):02d}:{time % 60:05.2f}"


@given(spans, st.sampled_from(["-", " - ", "–", " to ", " and ", ", "]))
def test_formatted_spans_are_parsed_back(span, between):
    assert parse_span(format_span(span)) == pytest.approx(span)
    start, end = span
    for write in (str, "{:.2f}".format, "{:.2f}s".format, "<{:.2f} seconds>".format, clock, long_clock):
        text = f"{write(start)}{between}{write(end)}"
        for output in (text, f"The event happens in {text}.", f"<think>9 - 99</think><answer> {text}</answer>"):
            assert parse_span(output) == pytest.approx(span, abs=1e-6), output


@given(st.text(alphabet="0123456789.:-<> atonds", max_size=40))
def test_parsed_spans_are_ordered(output):
    found = parse_span(output)
    assert found is None or 0 <= found[0] <= found[1] < float("inf")


@given(spans, st.lists(spans, min_size=1, max_size=3))
def test_temporal_iou_properties(span, moments):
    value = temporal_iou(span, moments)
    assert 0 <= value <= 1 and value == max(temporal_iou(moment, [span]) for moment in moments)
    assert temporal_iou(span, [*moments, span]) == (1 if span[0] < span[1] else value)


def test_temporal_iou_by_hand():
    assert (
        temporal_iou((0, 10), [(5, 20)]) == 0.25
        and temporal_iou((0, 10), [(20, 30)]) == 0
        and temporal_iou((1, 1), [(1, 1)]) == 0
    )
    assert temporal_iou((0, 10), [(5, 20), (0, 8)]) == 0.8
