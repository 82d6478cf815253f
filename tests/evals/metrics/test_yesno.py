"""POPE's three ways of scoring, each beside what its program gives for the same answers."""

import pytest

from vitrail.errors import DataError
from vitrail.evals.metrics.yesno import MODES, among_words, first_letters, first_sentence, measures, tally, whole

ANSWERS = [
    "Yes", "yes", "No", "no, there is not", "Yes, there is no doubt.", "There is a dog. No cat.", "maybe", "", "NO",
    "Yes.", "no", "I do not know",
]  # fmt: skip
TRUTHS = ["yes", "no", "no", "yes", "yes", "yes", "yes", "no", "no", "yes", "no", "no"]


@pytest.mark.parametrize(
    ("mode", "accuracy", "precision", "recall", "f1", "yes"),
    [  # what POPE's evaluate.py, lmms-eval's and VLMEvalKit's functions give
        ("pope", 0.583333, 0.571429, 0.666667, 0.615385, 0.583333),
        ("lmms-eval", 0.333333, 0.5, 1.0, 0.666667, 0.5),
        ("vlmevalkit", 0.416667, 0.666667, 0.333333, 0.444444, None),
    ],
)
def test_three_ways(mode, accuracy, precision, recall, f1, yes):
    table = tally(ANSWERS, TRUTHS, MODES[mode].read)
    found = {name: measure(table.sum(0)).item() for name, measure in measures(MODES[mode]).items()}
    neither = found.pop("neither yes nor no")
    expected = [accuracy, precision, recall, f1, 3 / 12 if yes is None else yes]  # VLMEvalKit tells no share of yes
    assert list(found.values()) == pytest.approx(expected, abs=1e-6)
    assert neither == pytest.approx(sum(MODES[mode].read(answer) == "" for answer in ANSWERS) / 12)


def test_readings():
    assert [first_sentence(text) for text in ("No.", "It is not. Yes", "NO", "", "nothing")] == [
        "no",
        "no",
        "yes",
        "yes",
        "yes",
    ]
    assert [whole(text) for text in (" YES ", "no", "yes.", "")] == ["yes", "no", "", ""]
    assert [among_words(text) for text in ("Well, yes!", "no way", "yes or no", "not")] == ["yes", "no", "", ""]
    assert [first_letters(text) for text in ("Yes, it is", " no", "I say yes", "(no)")] == ["yes", "no", "", "no"]


def test_nothing_divided_by_nothing_is_zero():
    table = tally(["no"], ["no"], whole)
    found = {name: measure(table.sum(0)).item() for name, measure in measures(MODES["pope"]).items()}
    assert found["precision"] == found["recall"] == found["F1"] == 0 and found["accuracy"] == 1


def test_what_does_not_fit_is_said():
    with pytest.raises(DataError, match="2 answers to 1 questions"):
        tally(["yes", "no"], ["yes"], whole)
    with pytest.raises(DataError, match="a truth 'maybe'"):
        tally(["yes"], ["maybe"], whole)
