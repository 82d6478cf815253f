"""Parses multiple-choice options that have no columns of their own: lists, lists written as text, or options in a
question."""

import ast
import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from vitrail.errors import DataError

_OPTIONS_HEADING = re.compile(r"\s*\bOptions:\s*")  # MMStar: "Which? Options: A: a ball, B: a card"
_INLINE_OPTION = re.compile(r"(?:^|[,\n])\s*([A-Z])[:.)]\s+")
_LINE_OPTION = re.compile(r"^\s*([A-Z])[.)]\s+", re.MULTILINE)  # RealWorldQA: a line "A. left"
_INSTRUCTION = re.compile(r"\s*Please answer directly[^\n]*$")  # the prompt template has its own instruction


def parse_option_list(value: Any) -> list[str]:
    """Parse a list of texts, or its Python literal as in MMMU. Empty if there is none."""
    parsed = value
    if isinstance(value, str) and value.strip():
        try:
            parsed = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            parsed = None
    if not value:
        return []
    if not isinstance(parsed, list | tuple) or not all(isinstance(option, str | int | float) for option in parsed):
        raise DataError(f"the options {value!r:.80} are not a list of texts", "remove that row")
    return [str(option) for option in parsed]


def letter_options(options: Sequence[str]) -> dict[str, str]:
    """Name options by letters from A on."""
    if len(options) > len(ascii_uppercase):
        raise DataError(f"{len(options)} options are more than there are letters", "remove that row")
    return dict(zip(ascii_uppercase, options, strict=False))


def split_inline_options(question: str) -> tuple[str, dict[str, str]]:
    """Split a question into its text and the options in it. There are none unless A and B are present, in order."""
    question = _INSTRUCTION.sub("", question)
    heading = _OPTIONS_HEADING.search(question)
    text = question[heading.end() :] if heading else question
    marks = []
    for mark in (_INLINE_OPTION if heading else _LINE_OPTION).finditer(text):
        if ascii_uppercase[len(marks) :].startswith(mark[1]):  # "A: he said, C: she said" has only one option
            marks.append(mark)
    if len(marks) < 2:
        return question.strip(), {}
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    options = {mark[1]: text[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)}
    question_text = question[: heading.start()] if heading else text[: marks[0].start()]
    return question_text.strip(), options
