"""The filter: what passes, and what is refused for which reason."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.instruct import KINDS, Pair, refuse
from vitrail.data.instruct.checks import settle

FOUR = (("A", "a dog"), ("B", "a cat"), ("C", "an owl"), ("D", "a fish"))
ASKED = "What sits beside the tree?"


@pytest.mark.parametrize(
    ("kind", "pair", "reason"),
    [
        ("conversation", Pair(ASKED, "A dog."), None),
        ("conversation", Pair(ASKED, ""), "a question without an answer"),
        ("conversation", Pair("", "A dog."), "an answer without a question"),
        ("conversation", Pair("Tell me of the tree.", "It is green."), "no question"),
        ("conversation", Pair("What?", "A dog."), "a question too short or too long"),
        ("conversation", Pair("What " * 50 + "?", "A dog."), "a question too short or too long"),
        ("conversation", Pair(ASKED, "The caption says a dog."), "speaks of captions or boxes"),
        ("conversation", Pair("What are the coordinates of it?", "Left."), "speaks of captions or boxes"),
        ("conversation", Pair(ASKED, "A dog at 0.25, 0.50."), "speaks of captions or boxes"),
        ("conversation", Pair(ASKED, "A box of 10 eggs, 2.50 each."), None),  # a box may be on a picture
        ("conversation", Pair(ASKED, "This is what is known of it: a dog."), "repeats the prompt"),
        ("conversation", Pair(ASKED, "..."), "a place left open"),
        ("conversation", Pair(ASKED, "A <image> dog"), "a place left open"),
        ("conversation", Pair(ASKED, "dog " * 61), "too long"),
        ("conversation", Pair(ASKED, "the dog is here and " * 10), "repeats itself"),
        ("conversation", Pair(ASKED, "A dog.", FOUR), "options nobody asked for"),
        ("reasoning", Pair(ASKED, "It rests."), "too short"),
        ("detail", Pair("Describe it.", "A dog sits under a tall old tree, " + " ".join("abcdefghijklmnopq")), None),
        ("detail", Pair("Describe it.", " ".join("abcdefghijklmnopqrstuvw")), "names nothing on the picture"),
        ("yesno", Pair("Is there a dog?", "Yes."), None),
        ("yesno", Pair("Is there a dog?", "Yes, there is."), "neither yes nor no"),
        ("choice", Pair(ASKED, "B", FOUR), None),
        ("choice", Pair(ASKED, "(B) a cat.", FOUR), None),
        ("choice", Pair(ASKED, "a cat", FOUR), None),
        ("choice", Pair(ASKED, "B. an owl", FOUR), "an answer that is no option"),
        ("choice", Pair(ASKED, "E", FOUR), "an answer that is no option"),
        ("choice", Pair(ASKED, "B", FOUR[:3]), "not four options A to D"),
        ("choice", Pair(ASKED, "B", (*FOUR[:3], ("D", "A dog"))), "not four options A to D"),
        ("choice", Pair(ASKED, "B", (*FOUR[:3], ("D", ""))), "not four options A to D"),
        ("choice", Pair(ASKED, "B", (*FOUR[:3], ("D", "A dog."))), "not four options A to D"),
        ("choice", Pair(ASKED, "B", (*FOUR[:3], ("D", "Both A and B"))), "an option about other options"),
        ("choice", Pair(ASKED, "B", (*FOUR[:3], ("D", "none of A, B, C"))), "an option about other options"),
        ("choice", Pair(ASKED, "B", (*FOUR[:3], ("D", "All of the above"))), "an option about other options"),
        ("choice", Pair(ASKED, "B", (*FOUR[:3], ("D", "a bird above the tree"))), None),
        ("conversation", Pair(ASKED, "A dog.<|im_end|> <|im_start|>user Hi"), "marks of a chat or a prompt"),
        ("conversation", Pair(ASKED, "A dog.</s>"), "marks of a chat or a prompt"),
        ("conversation", Pair(ASKED, "A dog [/INST]"), "marks of a chat or a prompt"),
        ("conversation", Pair(ASKED, "A dog. USER: what? ASSISTANT: cat"), "marks of a chat or a prompt"),
        ("conversation", Pair("Is it red? Answer: no. Is it?", "Yes."), "marks of a chat or a prompt"),
        ("conversation", Pair(ASKED, "3 dogs, so 2 < 3 and 5 > 4."), None),
        ("conversation", Pair(ASKED, "???"), "an answer without words"),
        ("conversation", Pair(ASKED, "A dog. I hope this helps!"), "chatter"),
        ("conversation", Pair(ASKED, "I cannot see the picture."), "chatter"),
    ],
)
def test_reasons(kind, pair, reason):
    assert refuse(kind, pair, ["brown dog"]) == reason


def test_names_that_are_empty_name_nothing():
    assert refuse("detail", Pair("Describe it.", " ".join("abcdefghijklmnopqrstuvw")), ["", " "]) is None


def test_a_letter_means_its_own_option_and_not_one_that_is_called_so():
    grades = Pair(ASKED, "C", tuple(zip("ABCD", "CDAB", strict=True)))
    settled = settle("choice", grades, "x")
    assert dict(settled.options)[settled.answer] == "A"


@settings(max_examples=40)
@given(st.sampled_from(list(KINDS)), st.builds(Pair, st.text(), st.text()))
def test_nothing_raises(kind, pair):
    assert refuse(kind, pair) is None or isinstance(refuse(kind, pair), str)


@settings(max_examples=40)
@given(st.permutations(["a dog", "a cat", "an owl", "a fish"]), st.sampled_from("ABCD"), st.integers(0, 99))
def test_options_are_laid_out_anew_and_the_right_one_stays_right(texts, letter, chance):
    pair = Pair(ASKED, f"{letter}.", tuple(zip("ABCD", texts, strict=True)))
    settled = settle("choice", pair, str(chance))
    assert dict(settled.options)[settled.answer] == dict(pair.options)[letter]
    assert [x for x, _ in settled.options] == list("ABCD") and sorted(x for _, x in settled.options) == sorted(texts)
    assert refuse("choice", settled) is None and settle("choice", pair, str(chance)) == settled


def test_every_letter_becomes_the_right_one():
    pair = Pair(ASKED, "A", FOUR)
    assert {settle("choice", pair, str(chance)).answer for chance in range(40)} == set("ABCD")
