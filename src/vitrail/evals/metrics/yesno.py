"""Answers that should be yes or no: how they are read, and what POPE makes of them.

Three programs publish figures called POPE, and read and count differently. `MODES` has each by its name:

    pope        the benchmark's own: of the first sentence, no if a word of it is No, no or not, otherwise yes
    lmms-eval   the whole answer is yes or no, or else it is wrong and left out of the recall; its share of yes is that
                of the truths; the three splits are one
    vlmevalkit  yes or no among the words and not both, or else it is wrong, and counts as no in the recall

N answers
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.metrics.answers import PUNCTUATION
from vitrail.evals.metrics.resample import Measure, share_of

Read = Literal["yes", "no", ""]
"""what an answer says; nothing if it cannot be told"""

# Columns of a tally: told from its truth, yes and no; told wrongly; and not told at all.
TP, FP, TN, FN, LOST_YES, LOST_NO, ALL = range(7)


def first_sentence(answer: str) -> Read:
    """POPE's reading: whatever denies nothing is a yes."""
    words = answer.split(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "no", "not"} & set(words) else "yes"


def whole(answer: str) -> Read:
    """Nothing but yes or no, whatever the case."""
    said = answer.strip().lower()
    return said if said in ("yes", "no") else ""  # type: ignore[return-value]


def among_words(answer: str) -> Read:
    """Yes or no among the words, and not both."""
    text = answer.lower()
    for mark in PUNCTUATION + ".":
        text = text.replace(mark, " ")
    said = {"yes", "no"} & set(text.split())
    return said.pop() if len(said) == 1 else ""  # type: ignore[return-value]


def first_letters(answer: str) -> Read:
    """MME's reading: yes or no within the first four letters."""
    start = answer.strip().lower()[:4]
    return "yes" if "yes" in start else "no" if "no" in start else ""


class Mode(NamedTuple):
    read: Callable[[str], Read]
    unread_is_no: bool = False  # in the recall
    yes_of_truths: bool = False
    pooled: bool = False  # splits as one


MODES = {
    "pope": Mode(first_sentence),
    "lmms-eval": Mode(whole, yes_of_truths=True, pooled=True),
    "vlmevalkit": Mode(among_words, unread_is_no=True),
}


def tally(answers: Sequence[str], truths: Sequence[str], read: Callable[[str], Read]) -> Tensor:
    """(N, 7): a one in the column of what each answer is, and in the last"""
    if len(answers) != len(truths):
        raise DataError(f"{len(answers):,} answers to {len(truths):,} questions", "give one to each")
    table = torch.zeros(len(answers), 7, dtype=torch.float64)
    column = {
        ("yes", "yes"): TP, ("yes", "no"): FP, ("no", "no"): TN, ("no", "yes"): FN, ("", "yes"): LOST_YES,
        ("", "no"): LOST_NO,
    }  # fmt: skip
    for row, answer, truth in zip(table, answers, truths, strict=True):
        if truth not in ("yes", "no"):
            raise DataError(f"a truth {truth!r:.80}", "only yes and no are possible here")
        row[[column[read(answer), truth], ALL]] = 1.0
    return table


def measures(mode: Mode) -> dict[str, Measure]:
    """POPE's five, as functions of sums of a tally. What is divided by nothing is 0, as in all three programs."""
    precision = _over((TP,), (TP, FP))
    recall = _over((TP,), (TP, FN, LOST_YES) if mode.unread_is_no else (TP, FN))

    def f1(sums: Tensor) -> Tensor:
        p, r = precision(sums), recall(sums)
        return torch.where(p + r > 0, 2 * p * r / (p + r).clamp(min=1e-300), 0.0)

    yes = (TP, FN, LOST_YES) if mode.yes_of_truths else (TP, FP)
    return {
        "accuracy": _over((TP, TN), (ALL,)),
        "precision": precision,
        "recall": recall,
        "F1": f1,
        "yes": _over(yes, (ALL,)),
        "neither yes nor no": _over((LOST_YES, LOST_NO), (ALL,)),
    }


def _over(parts: Sequence[int], of: Sequence[int]) -> Measure:
    share = share_of(0, 1)
    return lambda sums: share(torch.stack([sums[..., list(parts)].sum(-1), sums[..., list(of)].sum(-1)], -1))
