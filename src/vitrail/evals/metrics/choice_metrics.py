"""Multiple choice: parse the chosen option, rotate options, and choose by likelihood.

C options
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vitrail.errors import DataError
from vitrail.evals.metrics.scoring_table import (
    AnswerTexts,
    ItemScores,
    ScoringTable,
    score_all_correct,
    score_by_subset,
    score_mean,
)
from vitrail.evals.scores import Score

_ANSWER_PATTERNS = [
    re.compile(rf"{lead}(?:\s+is)?\s*:?\s*[(\[*]*([A-Z])\b(?![’'])([)\].*]*)", re.IGNORECASE)
    for lead in ("answer", "(?:option|choice)")
]
_OPTION = r"(?:(?:option|choice)\s+)?[(\[*]*[A-Z]\b(?![’'])[)\]*]*"
_OPTION_RUN = rf"{_OPTION}(?:\s+(?:and|or|nor)\s+{_OPTION})*"
_NEGATED_OPTIONS = re.compile(
    rf"\bnot\s+{_OPTION_RUN}|(?<![\w’']){_OPTION_RUN}\s+(?:is|are)\s+(?:not|wrong|incorrect)\b"
)
_MORE_OPTIONS = rf"(?:\s*,\s*{_OPTION})*"
_JOINED_OPTIONS = re.compile(  # A or B; A, B and C; A/B; A, B and no more
    rf"(?<![\w’']){_OPTION}(?:{_MORE_OPTIONS},?\s+(?:and|or)\s+{_OPTION}|\s*[/&]\s*{_OPTION}|{_MORE_OPTIONS}\s*,\s*{_OPTION}(?=\s*(?:[.!?]|$)))"
)
# A clause about several options, not a joint answer.
_VERB_CLAUSE = re.compile(r"\s+(?:is|are|was|were|being|would|do|does)\b")


def parse_choice(answer: str, choices: Mapping[str, str]) -> str | None:
    """Parse the letter of the chosen option from an answer; None if it is not clear.

    Rules in order: the letter alone or before a mark (B, (B), B. red); "the answer is B"; "option B"; the text of an
    option; a single letter among the words; the text of exactly one option within the answer. Negated options
    ("not B", "B is wrong") are ignored, and joined letters ("A or B", "A, B and C") mean no option.
    """
    text = _NEGATED_OPTIONS.sub(" ", answer.strip().strip("*")).strip()
    plain, normalized = {name: _normalize_words(option) for name, option in choices.items()}, _normalize_words(text)
    equal = [name for name, option in plain.items() if option == normalized]
    if len(equal) == 1 and " " in normalized:  # an option may name others: "A and B"
        return equal[0]
    runs = [
        found for found in _JOINED_OPTIONS.finditer(text) if len(set(_capital_letters(found[0])) & set(choices)) > 1
    ]
    joined = [run.span() for run in runs if not _VERB_CLAUSE.match(text, run.end())]
    first = re.match(r"[(\[]?([A-Z])(?:[)\].:,]|\s*$)", text)
    if first and first[1] in choices and not _is_within_spans(first.start(1), joined):
        return first[1]
    if re.fullmatch(r"[(\[]?[a-z][)\].:]?", text) and (upper := text.strip("()[].:").upper()) in choices:
        return upper
    for match in filter(None, (lead.search(text) for lead in _ANSWER_PATTERNS)):
        # A lower-case a may be an article: it counts only in brackets or at the end.
        is_letter = match[1].isupper() or match[2].startswith((")", "]")) or match.end() == len(text)
        if is_letter and match[1].upper() in choices and not _is_within_spans(match.start(1), joined):
            return match[1].upper()
    if len(equal) == 1:
        return equal[0]
    if joined:
        return None
    words = re.findall(r"[^\s.()\[\],:;!*#{}]+", text)
    # A and I are also words: they count only as the last word.
    letters = {w for n, w in enumerate(words) if w in choices and (w not in "AI" or n == len(words) - 1)}
    if len(letters) == 1 and not runs:
        return letters.pop()
    contained = [name for name, option in plain.items() if option and _contains_words(normalized, option)]
    contained = [name for name in contained if not any(_is_part_of(plain[name], plain[other]) for other in contained)]
    return contained[0] if len(contained) == 1 else None


def rotate_choices(choices: Mapping[str, str], answer: str, offset: int) -> tuple[dict[str, str], str]:
    """Rotate the options by `offset` letters; return them with the new letter of the answer."""
    letters, texts = list(choices), list(choices.values())
    if answer not in choices:
        raise DataError(f"the answer {answer!r} is not one of {', '.join(letters)}", "correct the file")
    offset %= len(letters)
    rotated = dict(zip(letters, texts[-offset:] + texts[:-offset] if offset else texts, strict=True))
    return rotated, letters[(letters.index(answer) + offset) % len(letters)]


def find_most_likely_choice(logprobs: Sequence[float], lengths: Sequence[int] | None = None) -> int:
    """Index of the option with the largest log-probability, the first of equals.

    With `lengths`, log-probabilities are divided by them: tokens, or characters as in lm-eval's acc_norm.
    """
    if not logprobs or (lengths is not None and (len(lengths) != len(logprobs) or min(lengths) < 1)):
        raise DataError(
            f"{len(logprobs)} log-probabilities for options of lengths {lengths}", "pass one of each per option"
        )
    values = logprobs if lengths is None else [p / n for p, n in zip(logprobs, lengths, strict=True)]
    return max(range(len(values)), key=values.__getitem__)


def _capital_letters(text: str) -> list[str]:
    return re.findall(r"\b[A-Z]\b", text)


def _is_within_spans(place: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(start <= place < end for start, end in spans)


def _contains_words(text: str, words: str) -> bool:
    return f" {words} " in f" {text} "


def _is_part_of(words: str, others: str) -> bool:
    return words != others and _contains_words(others, words)


def _normalize_words(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


# ---- scores of benchmarks --------------------------------------------------------------------------------------------


AnswerRule = Callable[[str, Sequence[str]], float]


def make_choice_scorer(rule: AnswerRule) -> Callable[[ScoringTable, AnswerTexts], ItemScores]:
    """Make an item scorer: 1 if the chosen option is correct; questions without options are scored by `rule`."""

    def each(sheet: ScoringTable, answer_texts: AnswerTexts) -> ItemScores:
        rows = zip(answer_texts, sheet.samples, sheet.references, strict=True)
        return [
            float(parse_choice(answer, sample.choices) == truths[0]) if sample.choices else rule(answer, truths)
            for answer, sample, truths in rows
        ]

    return each


def choice_correct(table: ScoringTable, answers: AnswerTexts) -> ItemScores:
    """1 if the chosen option is correct, else 0. An answer without an option is wrong."""
    return make_choice_scorer(lambda _answer, _truths: 0.0)(table, answers)


def score_choices(table: ScoringTable, answers: AnswerTexts) -> list[Score]:
    """Score accuracy, circular accuracy (questions that are correct in all option orders), and unparsed answers."""
    return _score_correct(table, answers, choice_correct(table, answers))


def make_mixed_scorer(rule: AnswerRule) -> Callable[[ScoringTable, AnswerTexts], list[Score]]:
    """Make a scorer of multiple choice that scores questions without options by `rule`."""

    def score(sheet: ScoringTable, answer_texts: AnswerTexts) -> list[Score]:
        return _score_correct(sheet, answer_texts, make_choice_scorer(rule)(sheet, answer_texts))

    return score


def _score_correct(table: ScoringTable, answers: AnswerTexts, correct: ItemScores) -> list[Score]:
    circle_keys = table.get_metadata("circle")
    chances = [1 / len(sample.choices) if sample.choices else 0.0 for sample in table.samples]
    overall, *rest = score_by_subset(
        "accuracy", correct, table, "category", table.get_metadata("category"), binary=True
    )
    scores = [replace(overall, baselines={"chance": sum(chances) / len(chances)}), *rest]
    if len(set(circle_keys)) < len(circle_keys):
        chance_of: dict[str, float] = {}
        for circle, chance in zip(circle_keys, chances, strict=True):
            chance_of[circle] = chance_of.get(circle, 1.0) * chance
        chance_baseline = {"chance": sum(chance_of.values()) / len(chance_of)}
        scores.insert(
            0, replace(score_all_correct("circular accuracy", correct, circle_keys), baselines=chance_baseline)
        )
    no_option = [float(lost) for lost in find_unparsed_choices(table, answers)]
    return [*scores, score_mean("no option", no_option, table.image_keys, binary=True)]


def find_unparsed_choices(table: ScoringTable, answers: AnswerTexts) -> list[bool]:
    """Whether no option can be parsed from each answer."""
    rows = zip(answers, table.samples, strict=True)
    return [bool(sample.choices) and parse_choice(answer, sample.choices) is None for answer, sample in rows]


def score_winoground_choices(table: ScoringTable, answers: AnswerTexts) -> list[Score]:
    """Score Winoground from choices: correct captions for both images, correct images for both captions, and both."""
    correct, examples = choice_correct(table, answers), table.get_metadata("example")
    scores = []
    for name, sides, chance in (("text", "text", 1 / 4), ("image", "image", 1 / 4), ("group", "text image", 1 / 16)):
        groups = [
            example if side in sides.split() else None
            for example, side in zip(examples, table.get_metadata("side"), strict=True)
        ]
        scores.append(replace(score_all_correct(name, correct, groups), baselines={"chance": chance}))
    return scores
