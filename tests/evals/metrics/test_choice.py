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
    ],
)  # fmt: skip
def test_letter(said, meant):
    assert letter(said, CHOICES) == meant


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
