"""Questions and answers out of free text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.instruct import Pair, parse, spell

# Marks are marks at the start of a line alone.
some = st.sampled_from(["the", "dog's", "é?", "12,", "A.", "(B)", "Answer:", "question", "no:"])
words = st.lists(some, min_size=1, max_size=5).map(" ".join)
options = st.lists(words, min_size=4, max_size=4).map(lambda texts: tuple(zip("ABCD", texts, strict=True)))
pairs = st.lists(st.builds(Pair, words, words, st.one_of(st.just(()), options)), max_size=5)


@settings(max_examples=40)
@given(pairs)
def test_what_is_spelt_is_read_back(pairs):
    assert parse(spell(pairs)) == pairs


@settings(max_examples=40)
@given(pairs, st.sampled_from(["Sure! Here are two:", "A. dog is here.", "An answer: yes", ""]))
def test_a_preface_and_blank_lines_change_nothing(pairs, preface):
    assert parse(f"{preface}\n\n" + spell(pairs).replace("\n", "\n\n")) == pairs


@settings(max_examples=40)
@given(st.text() | st.lists(st.sampled_from(["Question:", "Answer:", "A. x", "(B) y", "\n", "z", "**"])).map("\n".join))
def test_no_text_is_too_strange(text):
    for pair in parse(text):
        assert "\n" not in pair.question + pair.answer
        assert {letter for letter, _ in pair.options} <= set("ABCD")


@pytest.mark.parametrize(
    "text",
    [
        "Question: Is it red?\nAnswer: yes",
        "**Question:** Is it red?\n**Answer:** yes",
        "1. Question: Is it red?\n   Answer: yes",
        "### Question 1: Is it red?\n\nanswer 1: yes",
        "Sure! Here you are.\nQUESTION: Is it\nred?\nAnswer:\nyes",
        "- **Question**: Is it red?\n- **Answer**: yes",
    ],
)
def test_how_text_models_dress_it_up(text):
    assert parse(text) == [Pair("Is it red?", "yes")]


def test_options_in_brackets_and_with_dots():
    text = "Question: Which?\n(A) a dog\nB) a cat\nC: an owl\n- D. a fish\nAnswer: B"
    assert parse(text) == [Pair("Which?", "B", (("A", "a dog"), ("B", "a cat"), ("C", "an owl"), ("D", "a fish")))]


def test_what_is_missing_is_empty():
    assert parse("Question: One?\nQuestion: Two?\nAnswer: 2\nAnswer: 3") == [
        Pair("One?", ""),
        Pair("Two?", "2"),
        Pair("", "3"),
    ]
    assert parse("There was a dog.") == parse("") == []


def test_an_answer_ends_at_a_blank_line_unless_it_may_have_paragraphs():
    text = "Question: One?\nAnswer:\n\n1\nor so\n\nI hope this helps!\nQuestion: Two?\nAnswer: 2"
    assert parse(text) == [Pair("One?", "1 or so"), Pair("Two?", "2")]
    assert parse(text, paragraphs=True) == [Pair("One?", "1 or so I hope this helps!"), Pair("Two?", "2")]
