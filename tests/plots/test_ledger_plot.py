"""The chart of decoding time and memory."""

import pytest

from vitrail.plots.ledger_plot import LedgerSeries, draw_ledger
from vitrail.plots.number_format import format_si, format_token_count


def test_curves_and_bars_show_the_series():
    models = {"a": LedgerSeries(10e9, {1024: 1e9, 2048: 2e9}, {1024: 0.01, 2048: 0.02})}
    models["b"] = LedgerSeries(5e9, {1024: 3e9}, {1024: 0.005, 2048: 0.006})
    times, bars = draw_ledger(models, device="h200", memory=141e9).axes
    assert [list(line.get_ydata()) for line in times.lines] == [[0.01, 0.02], [0.005, 0.006]]
    widths = [patch.get_width() for patch in bars.patches]
    assert widths == [10e9, 1e9, 10e9, 2e9, 5e9, 3e9]
    assert [label.get_text() for label in bars.get_yticklabels()] == ["a, 1k", "a, 2k", "b, 1k"]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1_234_567, "1.23 MB"), (999.9, "1.00 kB"), (0.0123, "12.3 mB"), (12, "12.0 B")]
)
def test_si_has_three_digits(value, text):
    assert format_si(value, "B") == text


def test_token_counts_are_short():
    assert [format_token_count(n) for n in (1000, 8192, 2**21)] == ["1,000", "8k", "2M"]
