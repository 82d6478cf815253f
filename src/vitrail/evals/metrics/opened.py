"""Open answers by MMMU's rules: what may be meant by an answer is its tails, and the numbers in them."""

import re
from collections.abc import Sequence

_LEADS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)


def opened(answer: str, truths: Sequence[str]) -> float:
    """1 where a text that is right occurs in what may be meant, or a number is among it, to two places."""
    right = {form for truth in truths for form in _forms(truth)}
    texts = [truth for truth in right if isinstance(truth, str)]
    for meant in _meant(answer):
        if meant in right if isinstance(meant, float) else any(text in meant for text in texts):
            return 1.0
    return 0.0


def _meant(answer: str) -> set[str | float]:
    lines = answer.strip().strip(".").lower().split("\n")
    tails = [*(_tail(line, _LEADS) for line in lines[:-1]), _tail(lines[-1], (*_LEADS, "="))]
    tails = [tail for tail in tails if tail and tail not in list(":,.!?;'")] or ["\n".join(lines)]
    numbers = [number for tail in tails for kind in _NUMBERS for number in kind.findall(tail)]
    return {form for text in (*tails, *numbers) for form in _forms(text)}


def _tail(line: str, leads: Sequence[str]) -> str:
    """The shortest of what stands behind words that lead to an answer; nothing, if nothing stands behind the last."""
    best = ""
    for lead in leads:
        if lead in line:
            tail = line.rpartition(lead)[2].strip()
            best = tail if not best or len(tail) < len(best) else best
    return best


def _forms(text: str) -> list[str | float]:
    """A number, to two places, or a text in small letters; one letter must stand beside a space."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        small = text.lower()
        return [f" {small}", f"{small} "] if len(small) == 1 else [small]
