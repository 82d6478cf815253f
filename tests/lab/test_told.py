"""Figures of texts: our own agree with those that hold, and differ from those that do not."""

from pathlib import Path

import pytest

from vitrail.lab.ledger import PRESETS
from vitrail.lab.systems import WHOLE
from vitrail.lab.told import ABOUT, FIGURES, number, rows
from vitrail.lab.worked import whole_qformer

RIGHT = {
    "LLaVA-1.5's patches": 576,
    "the same with CLS": 577,
    "HD-9's tokens": 1450,
    "GAIA-1's context": 15_860,
    "GAIA-1, times fewer bits": 472.6,
    "BSQ-ViT and QLIP-B/16, 28 bits": 219.4,
    "training GAIA-1's world model": 9.4e21,
    "Table 7, one more query, by its rows of 1 and 384": 6.945e9,
}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.about)
def test_ours_agrees_where_a_figure_holds_and_nowhere_else(figure):
    assert figure.fits() == figure.holds, f"told {figure.told:g}, worked out {figure.worked():g}"


def test_one_rule_for_what_is_printed_as_about():
    about = [figure for figure in FIGURES if figure.printed.startswith("~")]
    assert len(about) > 5 and {figure.within for figure in about} == {ABOUT}


def test_a_qformer_with_its_half_for_texts():
    assert whole_qformer() == pytest.approx(185.7e6, rel=1e-3)


def test_every_figure_has_a_name_of_its_own_a_source_and_what_shows_it():
    assert len({figure.about for figure in FIGURES}) == len(FIGURES)
    assert all(figure.source and figure.printed and figure.by for figure in FIGURES)


def test_commands_name_what_the_ledger_knows():
    for figure in FIGURES:
        if "vitrail ledger" in figure.by:
            name, *options = figure.by.partition("vitrail ledger ")[2].split()
            assert name in (WHOLE if "--all" in options else PRESETS)


def test_the_figures_that_must_hold_are_there():
    held = {figure.about: figure.told for figure in FIGURES if figure.holds}
    assert {about: held.get(about) for about in RIGHT} == RIGHT


def test_the_docs_list_every_figure_that_does_not_hold():
    text = Path(__file__).parents[2].joinpath("docs", "ledger.md").read_text(encoding="utf-8")
    for cells in rows(holding=False):
        assert f"| {' | '.join(cells)} |" in text


def test_numbers_are_written_short():
    assert [number(x) for x in (0, 16.0, 15_860, 472.6154, 0.00917, 1.19e13, 2e15)] == [
        "0", "16", "15,860", "472.6", "0.00917", "1.190e13", "2.000e15",
    ]  # fmt: skip
