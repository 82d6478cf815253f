"""Multiple choice: which option an answer means, options turned round, and choosing by likelihood.

C options
"""

import re
from collections.abc import Mapping, Sequence

from vitrail.errors import DataError

_LEADS = [
    re.compile(rf"{lead}(?:\s+is)?\s*:?\s*[(\[*]*([A-Z])\b(?![’'])([)\].*]*)", re.IGNORECASE)
    for lead in ("answer", "(?:option|choice)")
]
_OPTION = r"(?:(?:option|choice)\s+)?[(\[*]*[A-Z]\b(?![’'])[)\]*]*"
_RUN = rf"{_OPTION}(?:\s+(?:and|or|nor)\s+{_OPTION})*"
_DENIED = re.compile(rf"\bnot\s+{_RUN}|(?<![\w’']){_RUN}\s+(?:is|are)\s+(?:not|wrong|incorrect)\b")
_MORE = rf"(?:\s*,\s*{_OPTION})*"
_JOINED = re.compile(  # A or B; A, B and C; A/B; A, B and no more
    rf"(?<![\w’']){_OPTION}(?:{_MORE},?\s+(?:and|or)\s+{_OPTION}|\s*[/&]\s*{_OPTION}|{_MORE}\s*,\s*{_OPTION}(?=\s*(?:[.!?]|$)))"
)
_CLAUSE = re.compile(r"\s+(?:is|are|was|were|being|would|do|does)\b")  # what goes on about them is another matter


def letter(answer: str, choices: Mapping[str, str]) -> str | None:
    """The letter of the option that an answer means, or None if it cannot be told. In this order: the letter alone or
    before a mark (B, (B), B. red), "the answer is B", "option B", the text of an option, one letter among the words,
    the text of one option within the answer, and within no other that is. "Not B" and "B is wrong" are passed over,
    and letters that are joined ("A or B", "A, B and C") mean none."""
    text = _DENIED.sub(" ", answer.strip().strip("*")).strip()
    plain, said = {name: _plain(option) for name, option in choices.items()}, _plain(text)
    same = [name for name, option in plain.items() if option == said]
    if len(same) == 1 and " " in said:  # an option may be about others, "A and B"
        return same[0]
    runs = [found for found in _JOINED.finditer(text) if len(set(_letters(found[0])) & set(choices)) > 1]
    joined = [run.span() for run in runs if not _CLAUSE.match(text, run.end())]
    start = re.match(r"[(\[]?([A-Z])(?:[)\].:,]|\s*$)", text)
    if start and start[1] in choices and not _among(start.start(1), joined):
        return start[1]
    if re.fullmatch(r"[(\[]?[a-z][)\].:]?", text) and (small := text.strip("()[].:").upper()) in choices:
        return small
    for led in filter(None, (lead.search(text) for lead in _LEADS)):
        # A small a may be an article: it counts only in brackets, or where nothing follows.
        alone = led[1].isupper() or led[2].startswith((")", "]")) or led.end() == len(text)
        if alone and led[1].upper() in choices and not _among(led.start(1), joined):
            return led[1].upper()
    if len(same) == 1:
        return same[0]
    if joined:
        return None
    words = re.findall(r"[^\s.()\[\],:;!*#{}]+", text)
    # A is also an article: it counts only where no word follows.
    single = {w for n, w in enumerate(words) if w in choices and (w not in "AI" or n == len(words) - 1)}
    if len(single) == 1 and not runs:
        return single.pop()
    within = [name for name, option in plain.items() if option and _holds(said, option)]
    within = [name for name in within if not any(_within(plain[name], plain[other]) for other in within)]
    return within[0] if len(within) == 1 else None


def turned(choices: Mapping[str, str], right: str, by: int) -> tuple[dict[str, str], str]:
    """The options moved on by so many letters, and the letter that is right then."""
    letters, texts = list(choices), list(choices.values())
    if right not in choices:
        raise DataError(f"the answer {right!r} is none of {', '.join(letters)}", "mend the file")
    by %= len(letters)
    moved = dict(zip(letters, texts[-by:] + texts[:-by] if by else texts, strict=True))
    return moved, letters[(letters.index(right) + by) % len(letters)]


def likeliest(logprobs: Sequence[float], lengths: Sequence[int] | None = None) -> int:
    """The number of the option whose words the model finds likeliest: by their summed log-probability, or by its mean
    over `lengths` (tokens, or characters as lm-eval's acc_norm has it). The first of equals."""
    if not logprobs or (lengths is not None and (len(lengths) != len(logprobs) or min(lengths) < 1)):
        raise DataError(f"{len(logprobs)} likelihoods of options of lengths {lengths}", "give one of each option")
    values = logprobs if lengths is None else [p / n for p, n in zip(logprobs, lengths, strict=True)]
    return max(range(len(values)), key=values.__getitem__)


def _letters(text: str) -> list[str]:
    return re.findall(r"\b[A-Z]\b", text)


def _among(place: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(start <= place < end for start, end in spans)


def _holds(text: str, words: str) -> bool:
    return f" {words} " in f" {text} "


def _within(words: str, others: str) -> bool:
    return words != others and _holds(others, words)


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+", text.lower()))
