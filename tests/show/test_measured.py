"""Results as a page shows them: what is no better than not looking is said as plainly as what is."""

import pytest

from show.test_page import Page
from vitrail.errors import ConfigError
from vitrail.show.measured import KINDS, Measured
from vitrail.show.page import page


def score(value: float, **more) -> dict:
    return {"value": value, "interval": [value - 0.1, value + 0.1], "of": 1000, **more}


def questions(**settings) -> dict:
    beside = {"majority": 0.4, "blind": 0.5}
    kinds = {"colour": score(0.8, beside=beside), "relation": score(0.55, beside=beside), "refused": score(0.02)}
    return {"command": "vitrail eval out/x questions", "scores": kinds} | settings


DRAWN = {
    "command": "vitrail eval out/x drawing",
    "scores": [{"name": name, **score(value)} for name, value in (("single", 0.9), ("two", 0.3), ("all", 0.6))],
}


def test_the_strong_and_the_weak_are_named():
    found = Measured("x.json", {"evals": {"asked": questions(), "drawn": DRAWN}})
    assert found.glance() == [
        "Asked — best: a thing's colour, 80%; worst: how two things lie, 55%; "
        "no better than without looking: how two things lie.",
        "Drawn — 60% of 1,000 in all; best: one thing, 90%; worst: two things, 30%.",
    ]
    assert found.share("drawing", "two") == "30%" and found.share("questions", "colour") == "80%"
    assert found.share("drawing", "position") == found.share("naming", "named") == "not measured"


def test_marks_are_for_what_looking_adds_and_other_settings_are_folded():
    evals = {"asked": questions(), "asked again": questions(), "kept": questions(command="vitrail codec compare")}
    found = Page(page("t", [], [Measured("x.json", {"evals": evals}).section()]))
    assert found.under("h3") == ["asked", "kept"] and found.under("summary") == ["asked again"]
    marks = [span["class"] for span in found.of("span") if span.get("class")]
    assert marks == ["right", "wrong"] * 2
    assert {"2.0% [-8.0%, 12.0%] of 1,000", "majority 40.0%, blind 50.0%", "0.8 of 1,000"} <= set(found.under("td"))


@pytest.mark.parametrize("found", [{}, {"evals": []}, {"evals": {"a": {}}}, {"evals": {"a": {"command": "x"}}}])
def test_other_files_are_refused(found):
    with pytest.raises(ConfigError, match=r"x\.json"):
        Measured("x.json", found)
    with pytest.raises(ConfigError, match=r"x\.json"):
        Measured("x.json", {"evals": {"a": questions(command="vitrail eval mini")}})


def test_kinds_are_those_that_are_asked_for():
    from vitrail.data.words.templates import DRAWINGS, QUESTIONS

    assert KINDS["drawing"].keys() == DRAWINGS.keys() and KINDS["questions"].keys() <= QUESTIONS.keys()
