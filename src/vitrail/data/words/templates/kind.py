"""A kind of question or sentence: how it is worded in training, and how in tests."""

from typing import NamedTuple


class Kind(NamedTuple):
    train: tuple[str, ...]
    test: tuple[str, ...]
    answers: tuple[str, ...] = ()
    answers_test: tuple[str, ...] = ()  # where answers are paraphrases of each other, and drawn like questions
