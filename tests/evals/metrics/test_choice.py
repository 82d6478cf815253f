"""Which option an answer means, options turned round, and the likeliest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import DataError
from vitrail.evals.metrics.choice import letter, likeliest, turned

CHOICES = {"A": "red", "B": "dark blue", "C": "blue", "D": "an apple"}


@pytest.mark.parametrize(
    ("said", "meant"),
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
def test_letter(said, meant):
    assert letter(said, CHOICES) == meant


def test_an_option_may_be_about_others():
    choices = {"A": "red", "B": "blue", "C": "A and B", "D": "A, B or something else"}
    for said, meant in (("A and B", "C"), ("C. A and B", "C"), ("A, B or something else", "D"), ("A", "A")):
        assert letter(said, choices) == meant


def test_an_option_within_another_that_was_found_is_not_meant():
    choices = {"A": "red", "B": "blue", "C": "green", "D": "a red car"}
    for said in ("It is a red car", "The answer is a red car.", "A red car", "D) a red car"):
        assert letter(said, choices) == "D"
    assert letter("it is red", choices) == "A" and letter("a red car or blue", choices) is None
    assert letter("a red one", {"A": "red", "B": "red"}) is None  # alike, and neither is within the other


@given(st.integers(2, 6), st.integers(0, 5), st.integers(0, 12))
def test_turned(n, right, by):
    right %= n
    choices = {"ABCDEF"[i]: f"option {i}" for i in range(n)}
    moved, now = turned(choices, "ABCDEF"[right], by)
    assert moved[now] == f"option {right}"  # the same text is right
    assert sorted(moved.values()) == sorted(choices.values()) and list(moved) == list(choices)
    places = {turned(choices, "ABCDEF"[right], turn)[1] for turn in range(n)}
    assert places == set(choices)  # in every place once


def test_likeliest():
    assert likeliest([-4.0, -3.0, -9.0]) == 1
    assert likeliest([-4.0, -3.0, -9.0], [4, 1, 10]) == 2
    assert likeliest([-1.0, -1.0]) == 0
    with pytest.raises(DataError, match="2 likelihoods"):
        likeliest([-1.0, -2.0], [1])
    with pytest.raises(DataError, match="'E' is none of"):
        turned(CHOICES, "E", 1)
