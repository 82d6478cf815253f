"""Convert drawing prompts to questions with expected answers, about counts, colours and relations.

A model can use them to verify its own images. (TIFA uses another model.)
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from vitrail.data.language import english
from vitrail.data.scenes.plurals import pluralize
from vitrail.data.scenes.thing_names import HUNDRED_THINGS

# Longer phrases first: “to the left of” contains “left of”.
_RELATIONS = (*english.PHRASE_FORMS["relation"][:4], *english.PHRASE_FORMS["side"][:2])
_RELATION_PATTERN = re.compile(rf"\b({'|'.join(_RELATIONS)})\b", re.IGNORECASE)
_NUMBERS = {word: n for n, word in enumerate(english.NUMBER_WORDS)} | {"a": 1, "an": 1}


class PromptCheck(NamedTuple):
    question: str
    answer: str


class _Mention(NamedTuple):
    one: str
    many: str
    number: int | None  # None: an unspecified plural
    colour: str
    start: int
    end: int


def build_prompt_checks(prompt: str, thing_names: Sequence[str] = HUNDRED_THINGS) -> list[PromptCheck]:
    """Build the checks of an image for this prompt. The list is empty if the prompt names none of the things."""
    found = _find_mentions(prompt, thing_names)
    once = {one for one, times in Counter(mention.one for mention in found).items() if times == 1}
    result = [check for mention in found for check in _check_mention(mention, is_only_mention=mention.one in once)]
    for one, other in pairwise(found):
        match_text = _RELATION_PATTERN.search(prompt, one.end, other.start)
        if match_text and {one.one, other.one} <= once and one.number == other.number == 1:
            result.append(PromptCheck(f"Is the {one.one} {match_text[1].lower()} the {other.one}?", "Yes"))
    return result


def _check_mention(mention: _Mention, is_only_mention: bool) -> list[PromptCheck]:
    """Build the checks of one mention. If a thing is mentioned twice, only its coloured mentions can be counted."""
    hue, number = f"{mention.colour} " if mention.colour else "", mention.number
    if number is None:
        return [PromptCheck(f"Is there {english.with_indefinite_article(hue + mention.one)}?", "Yes")]
    count = "How many {} are in the picture?"
    result = [PromptCheck(count.format(mention.many), str(number))] if is_only_mention else []
    if hue and number == 1 and is_only_mention:
        result.append(PromptCheck(f"What colour is the {mention.one}?", mention.colour))
    elif hue:
        result.append(PromptCheck(count.format(hue + mention.many), str(number)))
    return result


def _find_mentions(prompt: str, names: Sequence[str]) -> list[_Mention]:
    nouns: dict[str, tuple[str, str]] = {}
    for name in names:
        one, many = english.countable_noun(name, pluralize(name))
        nouns |= dict.fromkeys((name, one, many), (one, many))  # “bread” as well as “a piece of bread”
    either = "|".join(sorted(map(re.escape, nouns), key=len, reverse=True))
    colours, numbers = "|".join(english.PHRASE_FORMS["colour"]), "|".join(sorted(_NUMBERS, key=len, reverse=True))
    pattern = rf"(?<![\w-])(?:(?P<number>\d+|{numbers})\s+)?(?:(?P<colour>{colours})\s+)?(?P<noun>{either})\b"
    found = []
    for match in re.finditer(pattern, prompt, re.IGNORECASE):
        one, many = nouns[match["noun"].lower()]
        match_text = (match["number"] or "").lower()
        number = (
            int(match_text)
            if match_text.isdecimal()
            else _NUMBERS.get(match_text, None if match["noun"].lower() == many != one else 1)
        )
        if number is not None and number > english.MAX_COUNT:
            number = None
        found.append(_Mention(one, many, number, (match["colour"] or "").lower(), *match.span()))
    return found
