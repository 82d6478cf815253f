"""POPE modes, compared with the three programs on the same answers."""

import pytest

from vitrail.errors import DataError
from vitrail.evals.metrics.yesno_metrics import (
    POPE_MODES,
    pope_measures,
    read_first_letters,
    read_first_sentence,
    read_whole_answer,
    read_words,
    tally_answers,
)

ANSWERS = [
    "Yes", "yes", "No", "no, there is not", "Yes, there is no doubt.", "There is a dog. No cat.", "maybe", "", "NO",
    "Yes.", "no", "I do not know",
]  # fmt: skip
TRUTHS = ["yes", "no", "no", "yes", "yes", "yes", "yes", "no", "no", "yes", "no", "no"]


@pytest.mark.parametrize(
    ("mode", "accuracy", "precision", "recall", "f1", "yes"),
    [  # values of POPE's evaluate.py and of the functions of lmms-eval and VLMEvalKit
        ("pope", 0.583333, 0.571429, 0.666667, 0.615385, 0.583333),
        ("lmms-eval", 0.333333, 0.5, 1.0, 0.666667, 0.5),
        ("vlmevalkit", 0.416667, 0.666667, 0.333333, 0.444444, None),
    ],
)
def test_pope_modes(mode, accuracy, precision, recall, f1, yes):
    table = tally_answers(ANSWERS, TRUTHS, POPE_MODES[mode].read)
    found = {name: measure(table.sum(0)).item() for name, measure in pope_measures(POPE_MODES[mode]).items()}
    neither = found.pop("neither yes nor no")
    expected = [accuracy, precision, recall, f1, 3 / 12 if yes is None else yes]  # VLMEvalKit has no yes rate
    assert list(found.values()) == pytest.approx(expected, abs=1e-6)
    assert neither == pytest.approx(sum(POPE_MODES[mode].read(answer) == "" for answer in ANSWERS) / 12)


def test_parsing_rules():
    assert [read_first_sentence(text) for text in ("No.", "It is not. Yes", "NO", "", "nothing")] == [
        "no",
        "no",
        "yes",
        "yes",
        "yes",
    ]
    assert [read_whole_answer(text) for text in (" YES ", "no", "yes.", "")] == ["yes", "no", "", ""]
    assert [read_words(text) for text in ("Well, yes!", "no way", "yes or no", "not")] == ["yes", "no", "", ""]
    assert [read_first_letters(text) for text in ("Yes, it is", " no", "I say yes", "(no)")] == ["yes", "no", "", "no"]


def test_zero_division_gives_zero():
    table = tally_answers(["no"], ["no"], read_whole_answer)
    found = {name: measure(table.sum(0)).item() for name, measure in pope_measures(POPE_MODES["pope"]).items()}
    assert found["precision"] == found["recall"] == found["F1"] == 0 and found["accuracy"] == 1


def test_mismatched_inputs_raise():
    with pytest.raises(DataError, match="2 answers to 1 questions"):
        tally_answers(["yes", "no"], ["yes"], read_whole_answer)
    with pytest.raises(DataError, match="reference 'maybe'"):
        tally_answers(["yes"], ["maybe"], read_whole_answer)
