"""Choices by how likely each option is as a continuation: lm-evaluation-harness' acc and acc_norm.

An answer is the logarithms of the options' probabilities, as JSON by letter; a guess is the letter alone.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from vitrail.data.formats import Sample
from vitrail.errors import DataError
from vitrail.evals.metrics.choice import likeliest
from vitrail.evals.shares import Score
from vitrail.evals.suites.scored import Said, Values
from vitrail.evals.suites.sheets import Sheet, parted


def told(weights: Mapping[str, float]) -> str:
    """The answer of a model that finds options so likely."""
    return json.dumps(weights)


def chosen(answer: str, sample: Sample, *, by_length: bool = False) -> str:
    """The letter of the likeliest option, by the sum over its tokens or, `by_length`, by that over its number of
    characters. Of equals the first."""
    if answer in sample.choices:
        return answer
    try:
        weights = json.loads(answer)
        values = [float(weights[letter]) for letter in sample.choices]
    except (ValueError, TypeError, KeyError):
        raise DataError(
            f"{answer!r:.80} says not how likely each option of {sample.id!r} is", "give answers of this benchmark"
        ) from None
    lengths = [len(text) for text in sample.choices.values()] if by_length else None
    return list(sample.choices)[likeliest(values, lengths)]


def right(sheet: Sheet, said: Said, *, by_length: bool = False) -> Values:
    rows = zip(said, sheet.samples, sheet.truths, strict=True)
    return [float(chosen(answer, sample, by_length=by_length) == truth) for answer, sample, (truth, *_) in rows]


def normed(sheet: Sheet, said: Said) -> Values:
    return right(sheet, said, by_length=True)


def accuracy(*names: str, part: str = "") -> Callable[..., list[Score]]:
    """A scorer of acc, or of acc and acc_norm, over all samples and over each part that a note tells of, beside
    chance."""

    def score(sheet: Sheet, said: Said) -> list[Score]:
        parts = sheet.noted(part) if part else [None] * len(sheet)
        chances = [1 / len(sample.choices) for sample in sheet.samples]
        scores = []
        for name in names:
            values = right(sheet, said, by_length=name == "acc_norm")
            for one in parted(name, values, sheet, part, parts):
                of = [c for c, at in zip(chances, parts, strict=True) if not one.part or at == one.part[part]]
                scores.append(replace(one, beside={"chance": sum(of) / len(of)}))
        return scores

    return score


def majority(sheet: Sheet) -> list[str]:
    """Always the option at the place that is right most often: ARC's letters are numbers in some questions."""
    letters = [list(sample.choices) for sample in sheet.samples]
    places = [own.index(truth) for own, (truth, *_) in zip(letters, sheet.truths, strict=True)]
    common = Counter(places).most_common(1)[0][0]
    return [own[min(common, len(own) - 1)] for own in letters]


def longest(sheet: Sheet) -> list[str]:
    """Always the longest option, by its characters; of equals the first."""
    return [max(sample.choices, key=lambda letter: len(sample.choices[letter])) for sample in sheet.samples]
