"""Parsing of question-answer pairs from free text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.instruct import QAPair, format_pairs, parse_pairs

# Labels only count at the start of a line.
some = st.sampled_from(["the", "dog's", "é?", "12,", "A.", "(B)", "Answer:", "question", "no:"])
words = st.lists(some, min_size=1, max_size=5).map(" ".join)
options = st.lists(words, min_size=4, max_size=4).map(lambda texts: tuple(zip("ABCD", texts, strict=True)))
pairs = st.lists(st.builds(QAPair, words, words, st.one_of(st.just(()), options)), max_size=5)


@settings(max_examples=40)
@given(pairs)
def test_format_and_parse_round_trip(pairs):
    assert parse_pairs(format_pairs(pairs)) == pairs


@settings(max_examples=40)
@given(pairs, st.sampled_from(["Sure! Here are two:", "A. dog is here.", "An answer: yes", ""]))
def test_preface_and_blank_lines_are_ignored(pairs, preface):
    assert parse_pairs(f"{preface}\n\n" + format_pairs(pairs).replace("\n", "\n\n")) == pairs


@settings(max_examples=40)
@given(st.text() | st.lists(st.sampled_from(["Question:", "Answer:", "A. x", "(B) y", "\n", "z", "**"])).map("\n".join))
def test_any_text_is_accepted(text):
    for pair in parse_pairs(text):
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
def test_decorations_of_text_models(text):
    assert parse_pairs(text) == [QAPair("Is it red?", "yes")]


def test_options_in_brackets_and_with_dots():
    text = "Question: Which?\n(A) a dog\nB) a cat\nC: an owl\n- D. a fish\nAnswer: B"
    assert parse_pairs(text) == [
        QAPair("Which?", "B", (("A", "a dog"), ("B", "a cat"), ("C", "an owl"), ("D", "a fish")))
    ]


def test_missing_fields_are_empty():
    assert parse_pairs("Question: One?\nQuestion: Two?\nAnswer: 2\nAnswer: 3") == [
        QAPair("One?", ""),
        QAPair("Two?", "2"),
        QAPair("", "3"),
    ]
    assert parse_pairs("There was a dog.") == parse_pairs("") == []


def test_answer_ends_at_a_blank_line_without_paragraphs():
    text = "Question: One?\nAnswer:\n\n1\nor so\n\nI hope this helps!\nQuestion: Two?\nAnswer: 2"
    assert parse_pairs(text) == [QAPair("One?", "1 or so"), QAPair("Two?", "2")]
    assert parse_pairs(text, allow_paragraphs=True) == [
        QAPair("One?", "1 or so I hope this helps!"),
        QAPair("Two?", "2"),
    ]
