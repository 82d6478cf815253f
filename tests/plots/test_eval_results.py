"""Evaluation results as a section of a page."""

import pytest

from plots.test_html_page import Page
from vitrail.errors import ConfigError
from vitrail.plots.eval_results import SCORE_LABELS, EvalResults
from vitrail.plots.html_page import render_page


def score(value: float, **more) -> dict:
    return {"value": value, "interval": [value - 0.1, value + 0.1], "count": 1000, **more}


def questions(**settings) -> dict:
    baselines = {"majority": 0.4, "blind": 0.5}
    kinds = {
        "colour": score(0.8, baselines=baselines),
        "relation": score(0.55, baselines=baselines),
        "refused": score(0.02),
    }
    return {"command": "vitrail eval out/x questions", "scores": kinds} | settings


DRAWN = {
    "command": "vitrail eval out/x drawing",
    "scores": [{"name": name, **score(value)} for name, value in (("single", 0.9), ("two", 0.3), ("all", 0.6))],
}


def test_summary_names_best_worst_and_blind_scores():
    found = EvalResults("x.json", {"evals": {"asked": questions(), "drawn": DRAWN}})
    assert found.summarize() == [
        "Asked — best: a thing's colour, 80%; worst: how two things relate, 55%; "
        "not better than without the image: how two things relate.",
        "Drawn — 60% of 1,000 in all; best: one thing, 90%; worst: two things, 30%.",
    ]
    assert found.format_score("drawing", "two") == "30%" and found.format_score("questions", "colour") == "80%"
    assert found.format_score("drawing", "position") == found.format_score("naming", "named") == "not measured"


def test_verdicts_compare_with_baselines_and_repeated_suites_are_collapsed():
    evals = {"asked": questions(), "asked again": questions(), "kept": questions(command="vitrail codec compare")}
    found = Page(render_page("t", [], [EvalResults("x.json", {"evals": evals}).to_section()]))
    assert found.under("h3") == ["asked", "kept"] and found.under("summary") == ["asked again"]
    marks = [span["class"] for span in found.of("span") if span.get("class")]
    assert marks == ["right", "wrong"] * 2
    assert {"2.0% [-8.0%, 12.0%] of 1,000", "majority 40.0%, blind 50.0%", "0.8 of 1,000"} <= set(found.under("td"))


def test_a_frechet_distance_is_no_percentage_and_lower_is_better():
    distance = {"value": 328.7, "interval": [311.4, 345.9], "count": 300, "unit": "distance"}
    evals = {
        name: {"command": "vitrail eval mini fidelity", "scores": {name: distance | {"baselines": {"true": baseline}}}}
        for name, baseline in (("FD-worse", 276.0), ("FD-better", 400.0))
    }
    results = EvalResults("x.json", {"evals": evals})
    assert results.summarize() == ["FD-worse — FD-worse 328.7 (true 276.0)."]
    text = render_page("t", [], [results.to_section()])
    assert [span["class"] for span in Page(text).of("span") if span.get("class")] == ["wrong", "right"]
    assert text.count("328.7 [311.4, 345.9] of 300") == 2 and "32870" not in text


@pytest.mark.parametrize("found", [{}, {"evals": []}, {"evals": {"a": {}}}, {"evals": {"a": {"command": "x"}}}])
def test_invalid_files_raise(found):
    with pytest.raises(ConfigError, match=r"x\.json"):
        EvalResults("x.json", found)
    with pytest.raises(ConfigError, match=r"x\.json"):
        EvalResults("x.json", {"evals": {"a": questions(command="vitrail eval mini")}})


def test_labels_cover_all_kinds():
    from vitrail.data.language.templates import DRAWING_PROMPT_KINDS, QUESTION_KINDS

    assert (
        SCORE_LABELS["drawing"].keys() == DRAWING_PROMPT_KINDS.keys()
        and SCORE_LABELS["questions"].keys() <= QUESTION_KINDS.keys()
    )
