"""Filters the question-answer pairs that a text model wrote."""

import re
from collections.abc import Collection
from random import Random

from vitrail.data.instruct.instruction_prompts import INSTRUCTION_KINDS, PROMPT_PHRASES
from vitrail.data.instruct.pair_parser import QAPair

OPTION_LETTERS = "ABCD"
QUESTION_WORDS = (3, 40)  # least and most words of a question
RUN, REPEATED = 4, 0.5  # length of word runs, and the largest fraction of repeated runs
_SOURCE_WORDS = re.compile(
    r"\bcaptions?\b|\bbounding\b|\bcoordinates?\b|\bannotations?\b|\b(?:the|this) description\b|(?<!\d)[01]\.\d\d",
    re.IGNORECASE,
)
_UNFILLED = re.compile(r"<\s*(?:image|video)\s*>|\.\.\.\s*$", re.IGNORECASE)
_CHAT_MARKUP = re.compile(
    r"<\|?/?\w[^<>]*>|\[/?(?i:img|inst)\]|\b(?:USER|ASSISTANT|User|Assistant|Human|Question|Answer|Options)\s*:"
)
_CHATTER = re.compile(
    r"\bI hope (?:this|that|it) helps\b|\blet me know\b|\bI (?:cannot|can't) see the (?:picture|image)\b", re.IGNORECASE
)
# an option that refers to other options
_OTHER_OPTIONS = re.compile(r"(?i:\bthe above\b)|\b[A-D](?:,|,?\s+(?:and|or|nor|&))\s*[A-D]\b")
_LETTER_ANSWER = re.compile(r"^\(?([A-D])\)?(?:[.):]\s*|\s+|$)(.*)$")


def find_rejection_reason(kind: str, pair: QAPair, names: Collection[str] = ()) -> str | None:
    """Return why a pair of a kind is rejected, or None if it passes. The first reason counts.

    `names` are objects in the image. An answer to a fixed question must mention one of them, since any prose would pass
    the other checks.
    """
    kind_spec = INSTRUCTION_KINDS[kind]
    texts = (pair.question, pair.answer, *(text for _, text in pair.options))
    if not pair.question or not pair.answer:
        return "question without answer" if pair.question else "answer without question"
    if any(_UNFILLED.search(text) for text in texts):
        return "unfilled placeholder"
    if any(_CHAT_MARKUP.search(text) for text in texts):
        return "chat or prompt markup"
    if not any(letter.isalnum() for letter in pair.answer):
        return "answer without words"
    if _CHATTER.search(pair.answer):
        return "chatter"
    if not kind_spec.fixed_questions and not pair.question.endswith("?"):
        return "question without question mark"
    if any(echo in text.lower() for text in texts for echo in PROMPT_PHRASES):
        return "repeats the prompt"
    if any(_SOURCE_WORDS.search(text) for text in texts):
        return "mentions captions or boxes"
    if not kind_spec.fixed_questions and not QUESTION_WORDS[0] <= len(pair.question.split()) <= QUESTION_WORDS[1]:
        return "question too short or too long"
    if kind == "choice":
        return _find_choice_problem(pair)
    if pair.options:
        return "unexpected options"
    if kind == "yesno":
        return None if _parse_yes_no(pair.answer) else "neither yes nor no"
    words = pair.answer.split()
    if len(words) < kind_spec.answer_words[0]:
        return "answer too short"
    if len(words) > kind_spec.answer_words[1]:
        return "answer too long"
    names = [name for name in names if name.strip()]
    if kind_spec.fixed_questions and names and not any(_mentions(name, pair.answer) for name in names):
        return "mentions no object of the image"
    return "repetitive answer" if _is_repetitive(words) else None


def _mentions(name: str, text: str) -> bool:
    """Whether a text mentions an object, by the last word of its name: "engine" for "a red fire engine"."""
    return re.search(rf"\b{re.escape(name.split()[-1])}(?:e?s)?\b", text, re.IGNORECASE) is not None


def _find_choice_problem(pair: QAPair) -> str | None:
    """Return why a multiple-choice pair is rejected."""
    texts = [_normalize(text) for _, text in pair.options]
    if (
        "".join(letter for letter, _ in pair.options) != OPTION_LETTERS
        or not all(texts)
        or len(set(texts)) < len(OPTION_LETTERS)
    ):
        return "options are not A to D"
    if any(_OTHER_OPTIONS.search(text) for _, text in pair.options):
        return "option refers to other options"
    return None if _answer_letter(pair) else "answer is not an option"


def _parse_yes_no(answer: str) -> str:
    word = answer.strip(" .!").lower()
    return word if word in ("yes", "no") else ""


def _normalize(text: str) -> str:
    return text.strip(" .").lower()


def _answer_letter(pair: QAPair) -> str:
    """Return the letter that an answer means: a letter, a letter with its option's text, or the text alone.

    If a letter is also the text of an option, it means the option of that letter.
    """
    known, answer = {letter: _normalize(text) for letter, text in pair.options}, pair.answer.strip(" .")
    if answer in known:
        return answer
    for letter, text in known.items():
        if text == _normalize(answer):
            return letter
    if not (found := _LETTER_ANSWER.match(answer)):
        return ""
    letter, rest = found[1], _normalize(found[2])
    return letter if not rest or rest == known[letter] else ""


def _is_repetitive(words: list[str]) -> bool:
    """Whether too many runs of words repeat."""
    runs = [tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)]
    return len(runs) > RUN and len(set(runs)) < (1 - REPEATED) * len(runs)


def finalize_pair(kind: str, pair: QAPair, seed_text: str) -> QAPair:
    """Return a pair that passed in its final form. Options are shuffled, because text models prefer some letters."""
    if kind == "yesno":
        return pair._replace(answer=_parse_yes_no(pair.answer))
    if kind != "choice":
        return pair
    correct_text = dict(pair.options)[_answer_letter(pair)]
    texts = Random(seed_text).sample([text for _, text in pair.options], len(pair.options))
    return pair._replace(
        options=tuple(zip(OPTION_LETTERS, texts, strict=True)), answer=OPTION_LETTERS[texts.index(correct_text)]
    )
