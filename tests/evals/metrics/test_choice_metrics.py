"""Parsing, rotation and likelihood of multiple choice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import DataError
from vitrail.evals.metrics.choice_metrics import find_most_likely_choice, parse_choice, rotate_choices

CHOICES = {"A": "red", "B": "dark blue", "C": "blue", "D": "an apple"}


@pytest.mark.parametrize(
    ("output", "meant"),
    [
        ("B", "B"), ("(C)", "C"), ("c", "C"), ("b.", "B"), ("D. an apple", "D"), ("A: red", "A"), ("**B**", "B"),
        ("The answer is C", "C"), ("Answer: (B)", "B"), ("the correct option is A.", "A"), ("Red.", "A"),
        ("dark blue", "B"), ("It is blue.", "C"), ("An apple", "D"), ("A dog is there", None),
        ("I think B is right", "B"),
        ("B or C", None), ("", None), ("E", None), ("a red one", "A"), ("none of these", None),
        ("the answer is a cat", None),
        ("option A is wrong, the answer is B", "B"), ("The answer is not B", None), ("It is not B but C", "C"),
        ("Option B is incorrect; option C", "C"), ("Answer: (b)", "B"), ("answer (c).", "C"), ("Answer: b", "B"),
        ("The answer is C. Option B is for others", "C"), ("The answer is option B", "B"),
        ("B\n\nExplanation: C is wrong", "B"), ("the answer is (b) dark blue", "B"), ("a dark blue one", "B"),
        ("The answer is an apple.", "D"), ("It is not an apple, B", "B"),
        ("Both A and B", None), ("A and B", None), ("Either A or C", None), ("A, B, C and D", None), ("A, B.", None),
        ("(B), (A) is red", "B"), ("The answer is C, A and B are wrong", "C"), ("B, D is too small", "B"),
        ("B, C and D are too dark", "B"), ("Option D, A is for apples", "D"), ("Both A and B are right", None),
        ("A or B, it is red", None),
        ("The answer is A or B", None), ("(A) and (C)", None), ("A/B", None), ("option B or option C", None),
        ("Between A and B, the answer is B", "B"), ("A, because B is wrong", "A"), ("C, I think", "C"),
        ("B, and nothing else", "B"), ("A and a half", None), ("The answer is B, not A or C", "B"),
    ],
)  # fmt: skip
def test_parse_choice(output, meant):
    assert parse_choice(output, CHOICES) == meant


def test_options_that_name_other_options():
    choices = {"A": "red", "B": "blue", "C": "A and B", "D": "A, B or something else"}
    for output, meant in (("A and B", "C"), ("C. A and B", "C"), ("A, B or something else", "D"), ("A", "A")):
        assert parse_choice(output, choices) == meant


def test_nested_option_texts():
    choices = {"A": "red", "B": "blue", "C": "green", "D": "a red car"}
    for output in ("It is a red car", "The answer is a red car.", "A red car", "D) a red car"):
        assert parse_choice(output, choices) == "D"
    assert parse_choice("it is red", choices) == "A" and parse_choice("a red car or blue", choices) is None
    assert parse_choice("a red one", {"A": "red", "B": "red"}) is None  # equal, and neither contains the other


@given(st.integers(2, 6), st.integers(0, 5), st.integers(0, 12))
def test_rotate_choices(n, right, by):
    right %= n
    choices = {"ABCDEF"[i]: f"option {i}" for i in range(n)}
    moved, now = rotate_choices(choices, "ABCDEF"[right], by)
    assert moved[now] == f"option {right}"  # the correct text is unchanged
    assert sorted(moved.values()) == sorted(choices.values()) and list(moved) == list(choices)
    places = {rotate_choices(choices, "ABCDEF"[right], turn)[1] for turn in range(n)}
    assert places == set(choices)  # once at every position


def test_most_likely_choice():
    assert find_most_likely_choice([-4.0, -3.0, -9.0]) == 1
    assert find_most_likely_choice([-4.0, -3.0, -9.0], [4, 1, 10]) == 2
    assert find_most_likely_choice([-1.0, -1.0]) == 0
    with pytest.raises(DataError, match="2 log-probabilities"):
        find_most_likely_choice([-1.0, -2.0], [1])
    with pytest.raises(DataError, match="'E' is not one of"):
        rotate_choices(CHOICES, "E", 1)
