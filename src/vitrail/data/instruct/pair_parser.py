"""Parses question-answer pairs from the output of a text model. Nothing is judged here, and nothing raises."""

import re
from collections.abc import Iterable
from typing import NamedTuple

_DECORATION = r"[\s*_#>\-]*"
_LABEL = re.compile(
    rf"^{_DECORATION}(?:\d+[.)]\s*)?{_DECORATION}(question|answer)(?:\s+\d+)?\s*[*_]*:[*_]*(.*)$", re.IGNORECASE
)
_OPTION = re.compile(rf"^{_DECORATION}(?:\(([A-D])\)|([A-D])[.):])\s+(.*)$")


class QAPair(NamedTuple):
    """A question, its answer and its options. Missing fields are empty."""

    question: str
    answer: str
    options: tuple[tuple[str, str], ...] = ()  # letter, text


class _PairBuilder:
    """A pair under construction, line by line."""

    def __init__(self) -> None:
        self.question: list[str] = []
        self.options: list[tuple[str, list[str]]] = []
        self.answer: list[str] = []
        self.has_answer_label = False
        self.ended = False
        self.current_lines = self.question

    def build(self) -> QAPair:
        options = tuple((letter, _text(lines)) for letter, lines in self.options)
        return QAPair(_text(self.question), _text(self.answer), options)


def parse_pairs(text: str, *, allow_paragraphs: bool = False) -> list[QAPair]:
    """Parse pairs in their order.

    Text before the first label is ignored. Lines without a label continue the last field. An answer ends at a blank
    line unless `allow_paragraphs`; text after it is commentary.
    """
    pairs: list[_PairBuilder] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            is_question = label[1].lower() == "question"
            if not pairs or is_question or pairs[-1].has_answer_label:
                pairs.append(_PairBuilder())
            builder = pairs[-1]
            builder.has_answer_label = not is_question
            builder.current_lines = builder.question if is_question else builder.answer
            builder.current_lines.append(label[2])
        elif pairs and not pairs[-1].has_answer_label and (option := _OPTION.match(line)):
            pairs[-1].current_lines = [option[3]]
            pairs[-1].options.append((option[1] or option[2], pairs[-1].current_lines))
        elif pairs and (allow_paragraphs or not pairs[-1].ended):
            pairs[-1].current_lines.append(line)
            pairs[-1].ended = pairs[-1].has_answer_label and not line.strip() and bool(_text(pairs[-1].answer))
    return [pair.build() for pair in pairs]


def format_pairs(pairs: Iterable[QAPair]) -> str:
    """Format pairs as a text model is asked to write them; `parse_pairs` reads this format."""
    lines = []
    for question, answer, options in pairs:
        lines += [f"Question: {question}", *(f"{letter}. {text}" for letter, text in options), f"Answer: {answer}"]
    return "\n".join(lines)


def _text(lines: Iterable[str]) -> str:
    return " ".join(" ".join(lines).split())
