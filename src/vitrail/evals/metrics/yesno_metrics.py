"""Yes/no answers: parsing, and the metrics of POPE.

Three programs publish POPE scores and differ in parsing and counting. `POPE_MODES` has all three:

    pope        the benchmark's script: "no" if the first sentence has the word No, no or not, otherwise "yes"
    lmms-eval   the whole answer must be yes or no; other answers are wrong and excluded from the recall; the yes rate
                is that of the references; the three splits are pooled
    vlmevalkit  yes or no must occur as a word, but not both; other answers are wrong and count as no in the recall

N answers
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError, suggest_name
from vitrail.evals.metrics.resampling import SumsMeasure, ratio_of_columns, sum_by_group
from vitrail.evals.metrics.scoring_table import (
    AnswerTexts,
    ItemScores,
    ScoringTable,
    score_all_correct,
    score_from_sums,
    score_mean,
)
from vitrail.evals.metrics.short_answer_metrics import PUNCTUATION
from vitrail.evals.scores import Score

YesNo = Literal["yes", "no", ""]
"""A parsed answer; "" if it is neither yes nor no."""

# Columns of a tally: confusion matrix, unparsed answers by reference, and all answers.
TP, FP, TN, FN, UNPARSED_YES, UNPARSED_NO, ALL = range(7)


def read_first_sentence(answer: str) -> YesNo:
    """Parse as POPE does: an answer without a negation in its first sentence is yes."""
    words = answer.split(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "no", "not"} & set(words) else "yes"


def read_whole_answer(answer: str) -> YesNo:
    """Parse an answer that is only yes or no, ignoring case."""
    text = answer.strip().lower()
    return text if text in ("yes", "no") else ""  # type: ignore[return-value]


def read_words(answer: str) -> YesNo:
    """Parse an answer that contains the word yes or no, but not both."""
    text = answer.lower()
    for mark in PUNCTUATION + ".":
        text = text.replace(mark, " ")
    found = {"yes", "no"} & set(text.split())
    return found.pop() if len(found) == 1 else ""  # type: ignore[return-value]


def read_first_letters(answer: str) -> YesNo:
    """Parse as MME does: yes or no within the first four characters."""
    start = answer.strip().lower()[:4]
    return "yes" if "yes" in start else "no" if "no" in start else ""


class PopeMode(NamedTuple):
    """Parsing and counting rules of a POPE program."""

    read: Callable[[str], YesNo]
    unparsed_is_no: bool = False  # in the recall
    yes_rate_of_references: bool = False
    pools_splits: bool = False  # splits as one


POPE_MODES = {
    "pope": PopeMode(read_first_sentence),
    "lmms-eval": PopeMode(read_whole_answer, yes_rate_of_references=True, pools_splits=True),
    "vlmevalkit": PopeMode(read_words, unparsed_is_no=True),
}


def tally_answers(answers: Sequence[str], references: Sequence[str], read: Callable[[str], YesNo]) -> Tensor:
    """Tally (N, 7): 1 in the outcome column of each answer, and in the last column."""
    if len(answers) != len(references):
        raise DataError(f"{len(answers):,} answers to {len(references):,} questions", "pass one answer per question")
    table = torch.zeros(len(answers), 7, dtype=torch.float64)
    column = {
        ("yes", "yes"): TP, ("yes", "no"): FP, ("no", "no"): TN, ("no", "yes"): FN, ("", "yes"): UNPARSED_YES,
        ("", "no"): UNPARSED_NO,
    }  # fmt: skip
    for row, answer, truth in zip(table, answers, references, strict=True):
        if truth not in ("yes", "no"):
            raise DataError(f"reference {truth!r:.80} is neither yes nor no", "use yes or no")
        row[[column[read(answer), truth], ALL]] = 1.0
    return table


def pope_measures(mode: PopeMode) -> dict[str, SumsMeasure]:
    """POPE's metrics as functions of tally sums. Division by zero gives 0, as in all three programs."""
    precision = _sum_ratio((TP,), (TP, FP))
    recall = _sum_ratio((TP,), (TP, FN, UNPARSED_YES) if mode.unparsed_is_no else (TP, FN))

    def f1(sums: Tensor) -> Tensor:
        p, r = precision(sums), recall(sums)
        return torch.where(p + r > 0, 2 * p * r / (p + r).clamp(min=1e-300), 0.0)

    yes = (TP, FN, UNPARSED_YES) if mode.yes_rate_of_references else (TP, FP)
    return {
        "accuracy": _sum_ratio((TP, TN), (ALL,)),
        "precision": precision,
        "recall": recall,
        "F1": f1,
        "yes": _sum_ratio(yes, (ALL,)),
        "neither yes nor no": _sum_ratio((UNPARSED_YES, UNPARSED_NO), (ALL,)),
    }


def _sum_ratio(parts: Sequence[int], of: Sequence[int]) -> SumsMeasure:
    share = ratio_of_columns(0, 1)
    return lambda sums: share(torch.stack([sums[..., list(parts)].sum(-1), sums[..., list(of)].sum(-1)], -1))


# ---- scores of benchmarks --------------------------------------------------------------------------------------------


def always_yes_answers(table: ScoringTable) -> list[str]:
    return ["yes"] * len(table)


def yesno_scores(table: ScoringTable, answers: AnswerTexts, *, mode: str = "pope") -> ItemScores:
    read = _get_mode(mode).read
    return [float(read(answer) == truth) for answer, (truth, *_) in zip(answers, table.references, strict=True)]


def find_unparsed_yesno(table: ScoringTable, answers: AnswerTexts, *, mode: str = "pope") -> list[bool]:
    return [not _get_mode(mode).read(answer) for answer in answers]


def score_pope(table: ScoringTable, answers: AnswerTexts, *, mode: str = "pope") -> list[Score]:
    """Score POPE's metrics per split, or over all splits if the mode pools them."""
    pope_mode = _get_mode(mode)
    tallies = tally_answers(answers, [truth for truth, *_ in table.references], pope_mode.read)
    splits = ["" if pope_mode.pools_splits else split or "" for split in table.get_metadata("split")]
    scores = []
    for split, (name, measure) in product(dict.fromkeys(splits), pope_measures(pope_mode).items()):
        rows = [n for n, item_split in enumerate(splits) if item_split == split]
        part = {"split": split} if split else None
        scores.append(score_from_sums(name, tallies[rows], measure, [table.image_keys[n] for n in rows], part))
    return scores


def _get_mode(name: str) -> PopeMode:
    if name not in POPE_MODES:
        raise ConfigError(f"unknown POPE mode {name!r}", suggest_name(name, POPE_MODES))
    return POPE_MODES[name]


def hallusion_scores(table: ScoringTable, answers: AnswerTexts) -> ItemScores:
    return [float(read_words(answer) == truth) for answer, (truth, *_) in zip(answers, table.references, strict=True)]


def find_unparsed_hallusion(table: ScoringTable, answers: AnswerTexts) -> list[bool]:
    return [not read_words(answer) for answer in answers]


def score_hallusion(table: ScoringTable, answers: AnswerTexts) -> list[Score]:
    """Score aAcc (questions), fAcc (figures with all questions correct) and qAcc (questions correct on all figures)."""
    correct = hallusion_scores(table, answers)
    return [
        score_mean("aAcc", correct, table.image_keys, binary=True),
        score_all_correct("fAcc", correct, table.get_metadata("figure")),
        score_all_correct("qAcc", correct, table.get_metadata("question")),
    ]


PERCEPTION_CATEGORIES = (
    "existence",
    "count",
    "position",
    "color",
    "posters",
    "celebrity",
    "scene",
    "landmark",
    "artwork",
    "OCR",
)
COGNITION_CATEGORIES = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")


def mme_scores(table: ScoringTable, answers: AnswerTexts) -> ItemScores:
    return [
        float(read_first_letters(answer) == truth)
        for answer, (truth, *_) in zip(answers, table.references, strict=True)
    ]


def find_unparsed_mme(table: ScoringTable, answers: AnswerTexts) -> list[bool]:
    return [not read_first_letters(answer) for answer in answers]


def score_mme(table: ScoringTable, answers: AnswerTexts) -> list[Score]:
    """Score MME: acc and acc+ (both questions of an image correct) per category, and points of both kinds.

    Points are the sum of acc and acc+ over the available categories, 100 each.
    """
    correct = mme_scores(table, answers)
    item_categories = [str(category) for category in table.get_metadata("category")]
    unknown = next((name for name in item_categories if name not in PERCEPTION_CATEGORIES + COGNITION_CATEGORIES), None)
    if unknown is not None:
        raise DataError(
            f"MME has no category {unknown!r}", suggest_name(unknown, PERCEPTION_CATEGORIES + COGNITION_CATEGORIES)
        )
    scores, totals = [], []
    for kind, names in (("perception", PERCEPTION_CATEGORIES), ("cognition", COGNITION_CATEGORIES)):
        present = [name for name in names if name in item_categories]
        columns, pictures, rows = 4 * len(present), [], []
        for k, category in enumerate(present):
            items = [n for n, item_category in enumerate(item_categories) if item_category == category]
            hits, item_images = [correct[n] for n in items], [table.image_keys[n] for n in items]
            scores.append(score_mean("acc", hits, item_images, {"category": category}, binary=True))
            scores.append(score_all_correct("acc+", hits, item_images, {"category": category}))
            both = sum_by_group(torch.tensor([[hit, 1.0] for hit in hits]), item_images)
            for hit, count in both.tolist():
                row = [0.0] * columns
                row[4 * k : 4 * k + 4] = hit, count, float(hit == count), 1.0
                rows.append(row)
                pictures.append(len(pictures))
        if present:
            total = score_from_sums(
                kind,
                torch.tensor(rows, dtype=torch.float64),
                _sum_points(len(present)),
                pictures,
                max_value=200 * len(present),
            )
            totals.append(Score(total.name, total.value, total.interval, total.count, unit="points"))
    return [*totals, *scores]


def _sum_points(categories: int) -> SumsMeasure:
    ratios = [ratio_of_columns(at, at + 1) for at in range(0, 4 * categories, 2)]
    return lambda sums: 100 * torch.stack([share(sums) for share in ratios]).sum(0)
