"""MMMU's metric of open answers: candidates are the ends of answer lines and the numbers in them."""

import re
from collections.abc import Sequence

_ANSWER_LEADS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)


def open_answer_accuracy(answer: str, references: Sequence[str]) -> float:
    """1 if a reference text occurs in a candidate, or a reference number equals one to two decimals; else 0."""
    accepted = {form for truth in references for form in _normalized_forms(truth)}
    texts = [truth for truth in accepted if isinstance(truth, str)]
    for candidate in _candidate_answers(answer):
        if candidate in accepted if isinstance(candidate, float) else any(text in candidate for text in texts):
            return 1.0
    return 0.0


def _candidate_answers(answer: str) -> set[str | float]:
    lines = answer.strip().strip(".").lower().split("\n")
    tails = [
        *(_shortest_tail(line, _ANSWER_LEADS) for line in lines[:-1]),
        _shortest_tail(lines[-1], (*_ANSWER_LEADS, "=")),
    ]
    tails = [tail for tail in tails if tail and tail not in list(":,.!?;'")] or ["\n".join(lines)]
    numbers = [number for tail in tails for kind in _NUMBERS for number in kind.findall(tail)]
    return {form for text in (*tails, *numbers) for form in _normalized_forms(text)}


def _shortest_tail(line: str, prefixes: Sequence[str]) -> str:
    """The shortest text after a lead such as "answer ", or "" if no text follows."""
    best = ""
    for prefix in prefixes:
        if prefix in line:
            tail = line.rpartition(prefix)[2].strip()
            best = tail if not best or len(tail) < len(best) else best
    return best


def _normalized_forms(text: str) -> list[str | float]:
    """Normalise to a number with two decimals, or to lower-case text; single letters need an adjacent space."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lower = text.lower()
        return [f" {lower}", f"{lower} "] if len(lower) == 1 else [lower]
