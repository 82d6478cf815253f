"""Questions and answers out of what a text model wrote. Nothing is judged here, and nothing raises."""

import re
from collections.abc import Iterable
from typing import NamedTuple

_DECOR = r"[\s*_#>\-]*"
_MARK = re.compile(rf"^{_DECOR}(?:\d+[.)]\s*)?{_DECOR}(question|answer)(?:\s+\d+)?\s*[*_]*:[*_]*(.*)$", re.IGNORECASE)
_OPTION = re.compile(rf"^{_DECOR}(?:\(([A-D])\)|([A-D])[.):])\s+(.*)$")


class Pair(NamedTuple):
    """Fields that were not written are empty."""

    question: str
    answer: str
    options: tuple[tuple[str, str], ...] = ()  # letter, text


class _Open:
    """A pair as its lines come in."""

    def __init__(self) -> None:
        self.question: list[str] = []
        self.options: list[tuple[str, list[str]]] = []
        self.answer: list[str] = []
        self.answered = self.ended = False
        self.last = self.question

    def closed(self) -> Pair:
        options = tuple((letter, _text(lines)) for letter, lines in self.options)
        return Pair(_text(self.question), _text(self.answer), options)


def parse(text: str, *, paragraphs: bool = False) -> list[Pair]:
    """Pairs in their order. What comes before the first mark is a preface; lines without a mark go on with the last. An
    answer ends at a blank line unless it may have `paragraphs`: what follows is what a model says around its pairs."""
    pairs: list[_Open] = []
    for line in text.splitlines():
        if mark := _MARK.match(line):
            asks = mark[1].lower() == "question"
            if not pairs or asks or pairs[-1].answered:
                pairs.append(_Open())
            now = pairs[-1]
            now.answered = not asks
            now.last = now.question if asks else now.answer
            now.last.append(mark[2])
        elif pairs and not pairs[-1].answered and (option := _OPTION.match(line)):
            pairs[-1].last = [option[3]]
            pairs[-1].options.append((option[1] or option[2], pairs[-1].last))
        elif pairs and (paragraphs or not pairs[-1].ended):
            pairs[-1].last.append(line)
            pairs[-1].ended = pairs[-1].answered and not line.strip() and bool(_text(pairs[-1].answer))
    return [pair.closed() for pair in pairs]


def spell(pairs: Iterable[Pair]) -> str:
    """Pairs as a text model is asked to write them: what `parse` reads back."""
    lines = []
    for question, answer, options in pairs:
        lines += [f"Question: {question}", *(f"{letter}. {text}" for letter, text in options), f"Answer: {answer}"]
    return "\n".join(lines)


def _text(lines: Iterable[str]) -> str:
    return " ".join(" ".join(lines).split())
