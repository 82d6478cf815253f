"""Figures of texts: the ledger gives back those that hold, and gives others for those that do not."""

import pytest

from vitrail.lab.told import FIGURES


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.about)
def test_the_ledger_agrees_where_a_figure_holds_and_nowhere_else(figure):
    assert figure.fits() == figure.holds, f"told {figure.told:g}, worked out {figure.worked():g}"


def test_every_figure_has_a_name_of_its_own():
    assert len({figure.about for figure in FIGURES}) == len(FIGURES)
