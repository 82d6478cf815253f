"""Options of a multiple choice where no column is theirs: in a list, in a list written as text, or in the question."""

import ast
import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from vitrail.errors import DataError

_HEADED = re.compile(r"\s*\bOptions:\s*")  # MMStar: "Which? Options: A: a ball, B: a card"
_AFTER_COMMA = re.compile(r"(?:^|[,\n])\s*([A-Z])[:.)]\s+")
_A_LINE_EACH = re.compile(r"^\s*([A-Z])[.)]\s+", re.MULTILINE)  # RealWorldQA: a line "A. left"
_BIDDING = re.compile(r"\s*Please answer directly[^\n]*$")  # which the prompt says in its own words


def listed(value: Any) -> list[str]:
    """A list of texts, or one written out, as MMMU's are; empty where nothing is said."""
    found = value
    if isinstance(value, str) and value.strip():
        try:
            found = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            found = None
    if not value:
        return []
    if not isinstance(found, list | tuple) or not all(isinstance(one, str | int | float) for one in found):
        raise DataError(f"the options {value!r:.80} are no list of texts", "leave that row out")
    return [str(one) for one in found]


def lettered(options: Sequence[str]) -> dict[str, str]:
    if len(options) > len(ascii_uppercase):
        raise DataError(f"{len(options)} options are more than there are letters", "leave that row out")
    return dict(zip(ascii_uppercase, options, strict=False))


def within(question: str) -> tuple[str, dict[str, str]]:
    """A question without the options and the bidding that stand in it, and the options: none unless A and B are there,
    in their order."""
    question = _BIDDING.sub("", question)
    headed = _HEADED.search(question)
    text = question[headed.end() :] if headed else question
    marks = []
    for mark in (_AFTER_COMMA if headed else _A_LINE_EACH).finditer(text):
        if ascii_uppercase[len(marks) :].startswith(mark[1]):  # "A: he said, C: she said" has one mark
            marks.append(mark)
    if len(marks) < 2:
        return question.strip(), {}
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    found = {mark[1]: text[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)}
    asked = question[: headed.start()] if headed else text[: marks[0].start()]
    return asked.strip(), found
