"""Published figures: ours agree with those that hold, and differ from those that do not."""

from pathlib import Path

import pytest

from experiments.published_figures.figure_table import (
    APPROXIMATE_TOLERANCE,
    PUBLISHED_FIGURES,
    format_number,
    iter_figures,
)
from experiments.published_figures.published_arithmetic import count_qformer_parameters
from vitrail.lab.cost_ledger import PRESETS
from vitrail.lab.system_specs import SYSTEM_SPECS

RIGHT = {
    "LLaVA-1.5's patches": 576,
    "LLaVA-1.5's patches with CLS": 577,
    "HD-9's tokens": 1450,
    "GAIA-1's context": 15_860,
    "GAIA-1, compression ratio": 472.6,
    "BSQ-ViT and QLIP-B/16, 28 bits": 219.4,
    "training GAIA-1's world model": 9.4e21,
    "Table 7, one more query (rows of 1 and 384)": 6.945e9,
}


@pytest.mark.parametrize("figure", PUBLISHED_FIGURES, ids=lambda figure: figure.quantity)
def test_figures_match_exactly_if_they_hold(figure):
    assert figure.matches() == figure.holds, f"published {figure.value:g}, computed {figure.compute():g}"


def test_approximate_figures_share_one_tolerance():
    approximate = [figure for figure in PUBLISHED_FIGURES if figure.printed.startswith("~")]
    assert len(approximate) > 5 and {figure.tolerance for figure in approximate} == {APPROXIMATE_TOLERANCE}


def test_qformer_parameters_include_the_text_branch():
    assert count_qformer_parameters() == pytest.approx(185.7e6, rel=1e-3)


def test_every_figure_has_a_unique_name_a_source_and_evidence():
    assert len({figure.quantity for figure in PUBLISHED_FIGURES}) == len(PUBLISHED_FIGURES)
    assert all(figure.source and figure.printed and figure.evidence for figure in PUBLISHED_FIGURES)


def test_ledger_commands_name_known_presets():
    for figure in PUBLISHED_FIGURES:
        if "vitrail ledger" in figure.evidence:
            name, *options = figure.evidence.partition("vitrail ledger ")[2].split()
            assert name in (SYSTEM_SPECS if "--all" in options else PRESETS)


def test_required_figures_hold():
    published = {figure.quantity: figure.value for figure in PUBLISHED_FIGURES if figure.holds}
    assert {name: published.get(name) for name in RIGHT} == RIGHT


def test_docs_list_every_figure_that_does_not_hold():
    text = Path(__file__).parents[2].joinpath("docs", "published-figures.md").read_text(encoding="utf-8")
    for cells in iter_figures(holding=False):
        assert f"| {' | '.join(cells)} |" in text


def test_numbers_have_four_digits():
    assert [format_number(x) for x in (0, 16.0, 15_860, 472.6154, 0.00917, 1.19e13, 2e15)] == [
        "0", "16", "15,860", "472.6", "0.00917", "1.190e13", "2.000e15",
    ]  # fmt: skip
