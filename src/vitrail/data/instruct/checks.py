"""The filter: what of a text model's pairs may become instruction data, and why the rest may not."""

import re
from collections.abc import Collection
from random import Random

from vitrail.data.instruct.parse import Pair
from vitrail.data.instruct.prompts import ECHOES, KINDS

LETTERS = "ABCD"
ASKED = (3, 40)  # words of a question
RUN, REPEATED = 4, 0.5  # of all runs of four words, at most this share may be repeats
_SOURCE = re.compile(
    r"\bcaptions?\b|\bbounding\b|\bcoordinates?\b|\bannotations?\b|\b(?:the|this) description\b|(?<!\d)[01]\.\d\d",
    re.IGNORECASE,
)
_OPEN = re.compile(r"<\s*(?:image|video)\s*>|\.\.\.\s*$", re.IGNORECASE)
_MARKS = re.compile(
    r"<\|?/?\w[^<>]*>|\[/?(?i:img|inst)\]|\b(?:USER|ASSISTANT|User|Assistant|Human|Question|Answer|Options)\s*:"
)
_CHATTER = re.compile(
    r"\bI hope (?:this|that|it) helps\b|\blet me know\b|\bI (?:cannot|can't) see the (?:picture|image)\b", re.IGNORECASE
)
_OTHERS = re.compile(r"(?i:\bthe above\b)|\b[A-D](?:,|,?\s+(?:and|or|nor|&))\s*[A-D]\b")  # an option about options
_LETTER = re.compile(r"^\(?([A-D])\)?(?:[.):]\s*|\s+|$)(.*)$")


def refuse(kind: str, pair: Pair, names: Collection[str] = ()) -> str | None:
    """Why a pair of a kind may not be used; None if it may. The first reason counts. `names` are of things on the
    picture: an answer to a question of ours, which any prose would pass for, names one of them."""
    row = KINDS[kind]
    texts = (pair.question, pair.answer, *(text for _, text in pair.options))
    if not pair.question or not pair.answer:
        return "a question without an answer" if pair.question else "an answer without a question"
    if any(_OPEN.search(text) for text in texts):
        return "a place left open"
    if any(_MARKS.search(text) for text in texts):
        return "marks of a chat or a prompt"
    if not any(letter.isalnum() for letter in pair.answer):
        return "an answer without words"
    if _CHATTER.search(pair.answer):
        return "chatter"
    if not row.given and not pair.question.endswith("?"):
        return "no question"
    if any(echo in text.lower() for text in texts for echo in ECHOES):
        return "repeats the prompt"
    if any(_SOURCE.search(text) for text in texts):
        return "speaks of captions or boxes"
    if not row.given and not ASKED[0] <= len(pair.question.split()) <= ASKED[1]:
        return "a question too short or too long"
    if kind == "choice":
        return _refuse_choice(pair)
    if pair.options:
        return "options nobody asked for"
    if kind == "yesno":
        return None if _yes_or_no(pair.answer) else "neither yes nor no"
    words = pair.answer.split()
    if len(words) < row.words[0]:
        return "too short"
    if len(words) > row.words[1]:
        return "too long"
    names = [name for name in names if name.strip()]
    if row.given and names and not any(_named(name, pair.answer) for name in names):
        return "names nothing on the picture"
    return "repeats itself" if _repeats(words) else None


def _named(name: str, text: str) -> bool:
    """Whether a text names a thing, by the last word of its name: of "a red fire engine" the engine."""
    return re.search(rf"\b{re.escape(name.split()[-1])}(?:e?s)?\b", text, re.IGNORECASE) is not None


def _refuse_choice(pair: Pair) -> str | None:
    texts = [_bare(text) for _, text in pair.options]
    if "".join(letter for letter, _ in pair.options) != LETTERS or not all(texts) or len(set(texts)) < len(LETTERS):
        return "not four options A to D"
    if any(_OTHERS.search(text) for _, text in pair.options):
        return "an option about other options"
    return None if _letter(pair) else "an answer that is no option"


def _yes_or_no(answer: str) -> str:
    word = answer.strip(" .!").lower()
    return word if word in ("yes", "no") else ""


def _bare(text: str) -> str:
    return text.strip(" .").lower()


def _letter(pair: Pair) -> str:
    """The letter that an answer means: a letter, one with its option's text behind it, or that text alone. A letter
    that is an option's text too means its own option."""
    known, answer = {letter: _bare(text) for letter, text in pair.options}, pair.answer.strip(" .")
    if answer in known:
        return answer
    for letter, text in known.items():
        if text == _bare(answer):
            return letter
    if not (found := _LETTER.match(answer)):
        return ""
    letter, rest = found[1], _bare(found[2])
    return letter if not rest or rest == known[letter] else ""


def _repeats(words: list[str]) -> bool:
    runs = [tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)]
    return len(runs) > RUN and len(set(runs)) < (1 - REPEATED) * len(runs)


def settle(kind: str, pair: Pair, chance: str) -> Pair:
    """A pair that passed, in its final form. Options are laid out anew by chance: text models like some letters
    better, and a reader of such data would learn that."""
    if kind == "yesno":
        return pair._replace(answer=_yes_or_no(pair.answer))
    if kind != "choice":
        return pair
    right = dict(pair.options)[_letter(pair)]
    texts = Random(chance).sample([text for _, text in pair.options], len(pair.options))
    return pair._replace(options=tuple(zip(LETTERS, texts, strict=True)), answer=LETTERS[texts.index(right)])
