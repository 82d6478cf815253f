"""Whether a picture is what a prompt asked for, as questions with their answers: how many of each thing, in which
colour, and how they lie. So a model that reads can look over its own drawings (TIFA asks another about them)."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from vitrail.data.scenes.plurals import plural
from vitrail.data.scenes.things import HUNDRED
from vitrail.data.words import english

# Longer phrases first: “to the left of” holds “left of”.
_RELATIONS = (*english.FORMS["relation"][:4], *english.FORMS["side"][:2])
_LIES = re.compile(rf"\b({'|'.join(_RELATIONS)})\b", re.IGNORECASE)
_NUMBERS = {word: n for n, word in enumerate(english.NUMBERS)} | {"a": 1, "an": 1}


class Check(NamedTuple):
    question: str
    answer: str


class _Mention(NamedTuple):
    one: str
    many: str
    number: int | None  # None: several, and it is not said how many
    colour: str
    start: int
    end: int


def checks(prompt: str, names: Sequence[str] = HUNDRED) -> list[Check]:
    """What can be asked about a drawing for this prompt; nothing where it names none of these things."""
    found = _mentions(prompt, names)
    once = {one for one, times in Counter(mention.one for mention in found).items() if times == 1}
    asked = [check for mention in found for check in _of_one(mention, alone=mention.one in once)]
    for one, other in pairwise(found):
        said = _LIES.search(prompt, one.end, other.start)
        if said and {one.one, other.one} <= once and one.number == other.number == 1:
            asked.append(Check(f"Is the {one.one} {said[1].lower()} the {other.one}?", "Yes"))
    return asked


def _of_one(mention: _Mention, alone: bool) -> list[Check]:
    """Of things that are named twice only those of one colour can be counted."""
    hue, number = f"{mention.colour} " if mention.colour else "", mention.number
    if number is None:
        return [Check(f"Is there {english.indefinite(hue + mention.one)}?", "Yes")]
    count = "How many {} are in the picture?"
    asked = [Check(count.format(mention.many), str(number))] if alone else []
    if hue and number == 1 and alone:
        asked.append(Check(f"What colour is the {mention.one}?", mention.colour))
    elif hue:
        asked.append(Check(count.format(hue + mention.many), str(number)))
    return asked


def _mentions(prompt: str, names: Sequence[str]) -> list[_Mention]:
    nouns: dict[str, tuple[str, str]] = {}
    for name in names:
        one, many = english.noun(name, plural(name))
        nouns |= dict.fromkeys((name, one, many), (one, many))  # “bread” as well as “a piece of bread”
    either = "|".join(sorted(map(re.escape, nouns), key=len, reverse=True))
    colours, numbers = "|".join(english.FORMS["colour"]), "|".join(sorted(_NUMBERS, key=len, reverse=True))
    pattern = rf"(?<![\w-])(?:(?P<number>\d+|{numbers})\s+)?(?:(?P<colour>{colours})\s+)?(?P<noun>{either})\b"
    found = []
    for match in re.finditer(pattern, prompt, re.IGNORECASE):
        one, many = nouns[match["noun"].lower()]
        said = (match["number"] or "").lower()
        number = (
            int(said) if said.isdecimal() else _NUMBERS.get(said, None if match["noun"].lower() == many != one else 1)
        )
        if number is not None and number > english.MOST:
            number = None
        found.append(_Mention(one, many, number, (match["colour"] or "").lower(), *match.span()))
    return found
