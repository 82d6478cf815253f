"""The filter of question-answer pairs: which pairs pass, and why others are rejected."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.instruct import INSTRUCTION_KINDS, QAPair, find_rejection_reason
from vitrail.data.instruct.pair_filter import finalize_pair

FOUR = (("A", "a dog"), ("B", "a cat"), ("C", "an owl"), ("D", "a fish"))
QUESTION = "What sits beside the tree?"


@pytest.mark.parametrize(
    ("kind", "pair", "reason"),
    [
        ("conversation", QAPair(QUESTION, "A dog."), None),
        ("conversation", QAPair(QUESTION, ""), "question without answer"),
        ("conversation", QAPair("", "A dog."), "answer without question"),
        ("conversation", QAPair("Tell me of the tree.", "It is green."), "question without question mark"),
        ("conversation", QAPair("What?", "A dog."), "question too short or too long"),
        ("conversation", QAPair("What " * 50 + "?", "A dog."), "question too short or too long"),
        ("conversation", QAPair(QUESTION, "The caption says a dog."), "mentions captions or boxes"),
        ("conversation", QAPair("What are the coordinates of it?", "Left."), "mentions captions or boxes"),
        ("conversation", QAPair(QUESTION, "A dog at 0.25, 0.50."), "mentions captions or boxes"),
        ("conversation", QAPair(QUESTION, "A box of 10 eggs, 2.50 each."), None),  # a box may be in an image
        ("conversation", QAPair(QUESTION, "This is what is known of it: a dog."), "repeats the prompt"),
        ("conversation", QAPair(QUESTION, "..."), "unfilled placeholder"),
        ("conversation", QAPair(QUESTION, "A <image> dog"), "unfilled placeholder"),
        ("conversation", QAPair(QUESTION, "dog " * 61), "answer too long"),
        ("conversation", QAPair(QUESTION, "the dog is here and " * 10), "repetitive answer"),
        ("conversation", QAPair(QUESTION, "A dog.", FOUR), "unexpected options"),
        ("reasoning", QAPair(QUESTION, "It rests."), "answer too short"),
        ("detail", QAPair("Describe it.", "A dog sits under a tall old tree, " + " ".join("abcdefghijklmnopq")), None),
        ("detail", QAPair("Describe it.", " ".join("abcdefghijklmnopqrstuvw")), "mentions no object of the image"),
        ("yesno", QAPair("Is there a dog?", "Yes."), None),
        ("yesno", QAPair("Is there a dog?", "Yes, there is."), "neither yes nor no"),
        ("choice", QAPair(QUESTION, "B", FOUR), None),
        ("choice", QAPair(QUESTION, "(B) a cat.", FOUR), None),
        ("choice", QAPair(QUESTION, "a cat", FOUR), None),
        ("choice", QAPair(QUESTION, "B. an owl", FOUR), "answer is not an option"),
        ("choice", QAPair(QUESTION, "E", FOUR), "answer is not an option"),
        ("choice", QAPair(QUESTION, "B", FOUR[:3]), "options are not A to D"),
        ("choice", QAPair(QUESTION, "B", (*FOUR[:3], ("D", "A dog"))), "options are not A to D"),
        ("choice", QAPair(QUESTION, "B", (*FOUR[:3], ("D", ""))), "options are not A to D"),
        ("choice", QAPair(QUESTION, "B", (*FOUR[:3], ("D", "A dog."))), "options are not A to D"),
        ("choice", QAPair(QUESTION, "B", (*FOUR[:3], ("D", "Both A and B"))), "option refers to other options"),
        ("choice", QAPair(QUESTION, "B", (*FOUR[:3], ("D", "none of A, B, C"))), "option refers to other options"),
        ("choice", QAPair(QUESTION, "B", (*FOUR[:3], ("D", "All of the above"))), "option refers to other options"),
        ("choice", QAPair(QUESTION, "B", (*FOUR[:3], ("D", "a bird above the tree"))), None),
        ("conversation", QAPair(QUESTION, "A dog.<|im_end|> <|im_start|>user Hi"), "chat or prompt markup"),
        ("conversation", QAPair(QUESTION, "A dog.</s>"), "chat or prompt markup"),
        ("conversation", QAPair(QUESTION, "A dog [/INST]"), "chat or prompt markup"),
        ("conversation", QAPair(QUESTION, "A dog. USER: what? ASSISTANT: cat"), "chat or prompt markup"),
        ("conversation", QAPair("Is it red? Answer: no. Is it?", "Yes."), "chat or prompt markup"),
        ("conversation", QAPair(QUESTION, "3 dogs, so 2 < 3 and 5 > 4."), None),
        ("conversation", QAPair(QUESTION, "???"), "answer without words"),
        ("conversation", QAPair(QUESTION, "A dog. I hope this helps!"), "chatter"),
        ("conversation", QAPair(QUESTION, "I cannot see the picture."), "chatter"),
    ],
)
def test_reasons(kind, pair, reason):
    assert find_rejection_reason(kind, pair, ["brown dog"]) == reason


def test_empty_names_are_ignored():
    assert (
        find_rejection_reason("detail", QAPair("Describe it.", " ".join("abcdefghijklmnopqrstuvw")), ["", " "]) is None
    )


def test_letter_answer_means_the_option_of_that_letter():
    grades = QAPair(QUESTION, "C", tuple(zip("ABCD", "CDAB", strict=True)))
    settled = finalize_pair("choice", grades, "x")
    assert dict(settled.options)[settled.answer] == "A"


@settings(max_examples=40)
@given(st.sampled_from(list(INSTRUCTION_KINDS)), st.builds(QAPair, st.text(), st.text()))
def test_no_input_raises(kind, pair):
    assert find_rejection_reason(kind, pair) is None or isinstance(find_rejection_reason(kind, pair), str)


@settings(max_examples=40)
@given(st.permutations(["a dog", "a cat", "an owl", "a fish"]), st.sampled_from("ABCD"), st.integers(0, 99))
def test_shuffled_options_keep_the_correct_answer(texts, letter, seed):
    pair = QAPair(QUESTION, f"{letter}.", tuple(zip("ABCD", texts, strict=True)))
    settled = finalize_pair("choice", pair, str(seed))
    assert dict(settled.options)[settled.answer] == dict(pair.options)[letter]
    assert [x for x, _ in settled.options] == list("ABCD") and sorted(x for _, x in settled.options) == sorted(texts)
    assert find_rejection_reason("choice", settled) is None and finalize_pair("choice", pair, str(seed)) == settled


def test_every_letter_can_be_correct():
    pair = QAPair(QUESTION, "A", FOUR)
    assert {finalize_pair("choice", pair, str(seed)).answer for seed in range(40)} == set("ABCD")
