"""Likelihood scoring of multiple choice: acc and acc_norm of lm-evaluation-harness.

A model's answer is JSON with the log-likelihood of each option by letter. A baseline's answer is a letter.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from vitrail.data.formats import Sample
from vitrail.errors import DataError
from vitrail.evals.metrics.choice_metrics import find_most_likely_choice
from vitrail.evals.metrics.scoring_table import AnswerTexts, ItemScores, ScoringTable, score_by_subset
from vitrail.evals.scores import Score


def format_likelihoods(likelihoods: Mapping[str, float]) -> str:
    """Format log-likelihoods of options as an answer."""
    return json.dumps(likelihoods)


def choose_letter(answer: str, sample: Sample, *, by_length: bool = False) -> str:
    """Letter of the most likely option, the first of equals. `by_length` divides by the number of characters."""
    if answer in sample.choices:
        return answer
    try:
        weights = json.loads(answer)
        values = [float(weights[letter]) for letter in sample.choices]
    except (ValueError, TypeError, KeyError):
        raise DataError(
            f"{answer!r:.80} has no likelihood of each option of {sample.id!r}", "pass answers of this benchmark"
        ) from None
    lengths = [len(text) for text in sample.choices.values()] if by_length else None
    return list(sample.choices)[find_most_likely_choice(values, lengths)]


def choice_correct(table: ScoringTable, answers: AnswerTexts, *, by_length: bool = False) -> ItemScores:
    """1 if the most likely option is correct, else 0."""
    rows = zip(answers, table.samples, table.references, strict=True)
    return [float(choose_letter(answer, sample, by_length=by_length) == truth) for answer, sample, (truth, *_) in rows]


def choice_correct_normalized(table: ScoringTable, answers: AnswerTexts) -> ItemScores:
    """1 if the most likely option by length-normalised likelihood is correct, else 0."""
    return choice_correct(table, answers, by_length=True)


def make_accuracy_scorer(*names: str, part: str = "") -> Callable[..., list[Score]]:
    """Make a scorer of acc or acc_norm over all samples and per value of the metadata key `part`, with chance."""

    def score(sheet: ScoringTable, answer_texts: AnswerTexts) -> list[Score]:
        parts = sheet.get_metadata(part) if part else [None] * len(sheet)
        chances = [1 / len(sample.choices) for sample in sheet.samples]
        scores = []
        for name in names:
            values = choice_correct(sheet, answer_texts, by_length=name == "acc_norm")
            for part_score in score_by_subset(name, values, sheet, part, parts):
                part_chances = [
                    c
                    for c, value in zip(chances, parts, strict=True)
                    if not part_score.subset or value == part_score.subset[part]
                ]
                scores.append(replace(part_score, baselines={"chance": sum(part_chances) / len(part_chances)}))
        return scores

    return score


def majority_answers(table: ScoringTable) -> list[str]:
    """Baseline: the option at the position that is most often correct. ARC names some options by numbers."""
    letters = [list(sample.choices) for sample in table.samples]
    positions = [options.index(truth) for options, (truth, *_) in zip(letters, table.references, strict=True)]
    most_frequent = Counter(positions).most_common(1)[0][0]
    return [options[min(most_frequent, len(options) - 1)] for options in letters]


def longest_answers(table: ScoringTable) -> list[str]:
    """Baseline: the option with the most characters, the first of equals."""
    return [max(sample.choices, key=lambda letter: len(sample.choices[letter])) for sample in table.samples]
