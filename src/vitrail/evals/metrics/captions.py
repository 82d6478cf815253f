"""Captions beside people's: BLEU, ROUGE-L and CIDEr-D, as COCO's evaluation has them.

All take words, as `words_of` or `java.ptb` make them of a text: of each picture one candidate and several references.

N pictures
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.errors import DataError

Words = Sequence[str]
ORDERS = 4  # n-grams of 1 … 4 words
SIGMA = 6.0  # of CIDEr-D's penalty for another length
BETA = 1.2  # how much more recall counts than precision in ROUGE-L

_TOKEN = re.compile(
    r"""
    (?:[a-z]\.){2,}                             # U.S., a.m.
    | \d+(?:[.,:/]\d+)*(?![-\w])                # 1,000, 10:30
    | \w+?(?=n't\b) | n't\b                     # is n't
    | o'clock | '(?:s|m|d|re|ve|ll)\b           # man 's
    | [^\W_]+(?:[-/][^\W_]+)*                   # black-and-white
    | [$%&\#@*+=]
    """,
    re.VERBOSE,
)
_PARTED = {"cannot": ("can", "not"), "gonna": ("gon", "na"), "wanna": ("wan", "na"), "gotta": ("got", "ta")}


def words_of(text: str) -> list[str]:
    """Small letters, no punctuation, clitics apart, as the Penn treebank has them: a man 's dog is n't here.

    Stands for COCO's tokenizer (`java.ptb`), which needs Java, and agrees with it on plain captions; abbreviations
    (St.), addresses and brackets are told differently.
    """
    found = _TOKEN.findall(text.lower().replace("’", "'"))
    return [part for word in found for part in _PARTED.get(word, (word,))]


# ---- BLEU -------------------------------------------------------------------------------------------------------


def bleu_counts(candidates: Sequence[Words], references: Sequence[Sequence[Words]]) -> Tensor:
    """(N, 2 + 2 · 4): words, words of the reference nearest in length; then, for each order, n-grams that a reference
    has too, and n-grams. Sums over pictures are what `bleu` is a function of."""
    rows = []
    for said, truths in _pairs(candidates, references):
        near = min((abs(len(truth) - len(said)), len(truth)) for truth in truths)[1]
        row = [len(said), near]
        for n in range(1, ORDERS + 1):
            known: Counter[tuple[str, ...]] = Counter()
            for truth in truths:
                known |= _grams(truth, n)
            row += [(_grams(said, n) & known).total(), max(0, len(said) - n + 1)]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def bleu(counts: Tensor, order: int = ORDERS) -> Tensor:
    """Sums of counts (…, 10) → BLEU of n-grams up to `order`: their mean precision (geometric), times e^(1 − longer)
    for what is shorter than the references."""
    said, near = counts[..., 0] + 1e-15, counts[..., 1] + 1e-9
    shared, all_of = counts[..., 2 : 2 + 2 * order : 2], counts[..., 3 : 3 + 2 * order : 2]
    precision = ((shared + 1e-15) / (all_of + 1e-9)).log().mean(-1).exp()
    return precision * (1 - near / said).clamp(max=0).exp()


# ---- ROUGE-L ----------------------------------------------------------------------------------------------------


def rouge_l(candidates: Sequence[Words], references: Sequence[Sequence[Words]]) -> Tensor:
    """(N,): the longest common subsequence as a share of the candidate and of the reference, the best of each over the
    references, as an F-measure."""
    values = []
    for said, truths in _pairs(candidates, references):
        common = [_common(said, truth) for truth in truths]
        precision = max(common) / max(1, len(said))
        recall = max(n / max(1, len(truth)) for n, truth in zip(common, truths, strict=True))
        both = recall + BETA**2 * precision
        values.append((1 + BETA**2) * precision * recall / both if both else 0.0)
    return torch.tensor(values, dtype=torch.float64)


def _common(a: Words, b: Words) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        corner = 0
        for j, y in enumerate(b, start=1):
            corner, row[j] = row[j], corner + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


# ---- CIDEr ------------------------------------------------------------------------------------------------------


def cider(candidates: Sequence[Words], references: Sequence[Sequence[Words]]) -> Tensor:
    """CIDEr-D (N,), 0 … 10: how alike n-grams are to each reference's, weighed by how few pictures have them.

    What is rare is taken from the references given, so values of few pictures say little: of one picture they are 0.
    """
    pairs = _pairs(candidates, references)
    seen: Counter[tuple[str, ...]] = Counter()
    for _, truths in pairs:
        seen.update({gram for truth in truths for n in range(1, ORDERS + 1) for gram in _grams(truth, n)})
    pictures = math.log(max(1, len(pairs)))

    def weighed(words: Words, n: int) -> dict[tuple[str, ...], float]:
        return {gram: k * (pictures - math.log(max(1, seen[gram]))) for gram, k in _grams(words, n).items()}

    values = []
    for said, truths in pairs:
        total = 0.0
        for n in range(1, ORDERS + 1):
            x = weighed(said, n)
            for truth in truths:
                y = weighed(truth, n)
                alike = sum(min(w, y[gram]) * y[gram] for gram, w in x.items() if gram in y)
                long = math.hypot(*x.values()) * math.hypot(*y.values())
                # The script counts lengths in pairs of words.
                further = max(0, len(said) - 1) - max(0, len(truth) - 1)
                total += alike / (long or 1.0) * math.exp(-(further**2) / (2 * SIGMA**2))
        values.append(10 * total / (ORDERS * len(truths)))
    return torch.tensor(values, dtype=torch.float64)


def _grams(words: Words, n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[i:] for i in range(n)), strict=False))


def _pairs(candidates: Sequence[Words], references: Sequence[Sequence[Words]]) -> list[tuple[Words, Sequence[Words]]]:
    if len(candidates) != len(references) or not len(candidates):
        raise DataError(
            f"{len(candidates):,} captions beside references of {len(references):,} pictures", "give one for each"
        )
    bare = next((n for n, truths in enumerate(references) if not truths), None)
    if bare is not None:
        raise DataError(f"picture {bare} has no reference", "leave it out")
    return list(zip(candidates, references, strict=True))
