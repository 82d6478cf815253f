"""Caption metrics of COCO's evaluation: BLEU, ROUGE-L and CIDEr-D.

All take tokenized texts from `tokenize_caption` or `java_metrics.tokenize_ptb`: one candidate and several references
per image.

N images
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError, suggest_name
from vitrail.evals.metrics.clip_score import MAX_SCORES, ClipCaptionScorer
from vitrail.evals.metrics.java_metrics import meteor_scores as java_meteor
from vitrail.evals.metrics.java_metrics import tokenize_ptb
from vitrail.evals.metrics.scoring_table import AnswerTexts, ItemScores, ScoringTable, score_from_sums, score_mean
from vitrail.evals.scores import Score

Words = Sequence[str]
MAX_NGRAM_ORDER = 4  # n-grams of 1 … 4 words
CIDER_SIGMA = 6.0  # of CIDEr-D's length penalty
ROUGE_BETA = 1.2  # weight of recall against precision in ROUGE-L

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
_SPLIT_WORDS = {"cannot": ("can", "not"), "gonna": ("gon", "na"), "wanna": ("wan", "na"), "gotta": ("got", "ta")}


def tokenize_caption(text: str) -> list[str]:
    """Tokenize a caption in Penn Treebank style: lower case, no punctuation, split clitics: a man 's dog is n't here.

    It replaces COCO's tokenizer (`tokenize_ptb`), which needs Java. Both agree on plain captions, but not on
    abbreviations (St.), addresses and brackets.
    """
    words = _TOKEN.findall(text.lower().replace("’", "'"))
    return [part for word in words for part in _SPLIT_WORDS.get(word, (word,))]


# ---- BLEU -------------------------------------------------------------------------------------------------------


def count_bleu_ngrams(candidates: Sequence[Words], references: Sequence[Sequence[Words]]) -> Tensor:
    """Count BLEU n-grams: (N, 2 + 2 · 4).

    Columns: number of words, number of words of the reference nearest in length; then per order the n-grams that occur
    in a reference, and all n-grams. `bleu_from_counts` takes sums over images.
    """
    rows = []
    for candidate, image_references in _check_pairs(candidates, references):
        nearest_length = min((abs(len(reference) - len(candidate)), len(reference)) for reference in image_references)[
            1
        ]
        row = [len(candidate), nearest_length]
        for n in range(1, MAX_NGRAM_ORDER + 1):
            reference_grams: Counter[tuple[str, ...]] = Counter()
            for reference in image_references:
                reference_grams |= _count_ngrams(reference, n)
            row += [(_count_ngrams(candidate, n) & reference_grams).total(), max(0, len(candidate) - n + 1)]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def bleu_from_counts(counts: Tensor, order: int = MAX_NGRAM_ORDER) -> Tensor:
    """BLEU up to n-gram `order` from summed counts (…, 10): geometric mean precision times the brevity penalty."""
    length, reference_length = counts[..., 0] + 1e-15, counts[..., 1] + 1e-9
    matches, totals = counts[..., 2 : 2 + 2 * order : 2], counts[..., 3 : 3 + 2 * order : 2]
    precision = ((matches + 1e-15) / (totals + 1e-9)).log().mean(-1).exp()
    return precision * (1 - reference_length / length).clamp(max=0).exp()


# ---- ROUGE-L ----------------------------------------------------------------------------------------------------


def rouge_l(candidates: Sequence[Words], references: Sequence[Sequence[Words]]) -> Tensor:
    """ROUGE-L (N,): F-measure of the longest common subsequence, with the best precision and recall over references."""
    values = []
    for candidate, image_references in _check_pairs(candidates, references):
        common = [_longest_common_subsequence(candidate, reference) for reference in image_references]
        precision = max(common) / max(1, len(candidate))
        recall = max(n / max(1, len(reference)) for n, reference in zip(common, image_references, strict=True))
        denominator = recall + ROUGE_BETA**2 * precision
        values.append((1 + ROUGE_BETA**2) * precision * recall / denominator if denominator else 0.0)
    return torch.tensor(values, dtype=torch.float64)


def _longest_common_subsequence(a: Words, b: Words) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        corner = 0
        for j, y in enumerate(b, start=1):
            corner, row[j] = row[j], corner + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


# ---- CIDEr ------------------------------------------------------------------------------------------------------


def cider(candidates: Sequence[Words], references: Sequence[Sequence[Words]]) -> Tensor:
    """CIDEr-D (N,), 0 … 10: TF-IDF similarity of n-grams to those of each reference.

    Document frequencies come from the given references, so values of few images mean little; for one image they are 0.
    """
    pairs = _check_pairs(candidates, references)
    document_frequency: Counter[tuple[str, ...]] = Counter()
    for _, image_references in pairs:
        document_frequency.update(
            {
                gram
                for reference in image_references
                for n in range(1, MAX_NGRAM_ORDER + 1)
                for gram in _count_ngrams(reference, n)
            }
        )
    log_images = math.log(max(1, len(pairs)))

    def tf_idf(words: Words, n: int) -> dict[tuple[str, ...], float]:
        return {
            gram: k * (log_images - math.log(max(1, document_frequency[gram])))
            for gram, k in _count_ngrams(words, n).items()
        }

    values = []
    for candidate, image_references in pairs:
        total = 0.0
        for n in range(1, MAX_NGRAM_ORDER + 1):
            x = tf_idf(candidate, n)
            for reference in image_references:
                y = tf_idf(reference, n)
                similarity = sum(min(w, y[gram]) * y[gram] for gram, w in x.items() if gram in y)
                norms = math.hypot(*x.values()) * math.hypot(*y.values())
                # The COCO script counts lengths in bigrams.
                length_difference = max(0, len(candidate) - 1) - max(0, len(reference) - 1)
                total += similarity / (norms or 1.0) * math.exp(-(length_difference**2) / (2 * CIDER_SIGMA**2))
        values.append(10 * total / (MAX_NGRAM_ORDER * len(image_references)))
    return torch.tensor(values, dtype=torch.float64)


def _count_ngrams(language: Words, n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(language[i:] for i in range(n)), strict=False))


def _check_pairs(
    candidates: Sequence[Words], references: Sequence[Sequence[Words]]
) -> list[tuple[Words, Sequence[Words]]]:
    if len(candidates) != len(references) or not len(candidates):
        raise DataError(
            f"{len(candidates):,} captions but references for {len(references):,} images", "pass one caption per image"
        )
    missing = next((n for n, image_references in enumerate(references) if not image_references), None)
    if missing is not None:
        raise DataError(f"image {missing} has no reference", "remove it")
    return list(zip(candidates, references, strict=True))


# ---- scores of benchmarks --------------------------------------------------------------------------------------------


def caption_ciders(table: ScoringTable, answers: AnswerTexts, *, tokenizer: str = "plain") -> ItemScores:
    """CIDEr score of each caption."""
    words, references = _tokenize(table, answers, tokenizer)
    return cider(words, references).tolist()


def score_captions(
    table: ScoringTable,
    answers: AnswerTexts,
    *,
    tokenizer: str = "plain",
    meteor: bool = False,
    clip: ClipCaptionScorer | None = None,
) -> list[Score]:
    words, references = _tokenize(table, answers, tokenizer)
    counts = count_bleu_ngrams(words, references)
    scores = [
        score_from_sums(f"BLEU-{n}", counts, lambda sums, n=n: bleu_from_counts(sums, n), table.image_keys)
        for n in range(1, MAX_NGRAM_ORDER + 1)
    ]
    metrics = {"ROUGE-L": rouge_l, "CIDEr": cider} | ({"METEOR": java_meteor} if meteor else {})
    for name, measure in metrics.items():
        values = measure(words, references).tolist()
        scores.append(score_mean(name, values, table.image_keys, max_value=10.0 if name == "CIDEr" else 1.0))
    for name, values in ({} if clip is None else clip.score_captions(table, answers)).items():
        scores.append(score_mean(name, values, table.image_keys, max_value=MAX_SCORES[name]))
    return scores


def next_image_captions(table: ScoringTable) -> list[str]:
    """Baseline: a reference caption of the next image."""
    first = [sample.captions[0] for sample in table.samples]
    return [*first[1:], first[0]]


CAPTION_TOKENIZERS: dict[str, Callable[[list[str]], list[list[str]]]] = {
    "plain": lambda texts: [tokenize_caption(text) for text in texts],
    "ptb": tokenize_ptb,
}


def _tokenize(
    table: ScoringTable, answers: AnswerTexts, tokenizer: str
) -> tuple[list[list[str]], list[list[list[str]]]]:
    if tokenizer not in CAPTION_TOKENIZERS:
        raise ConfigError(f"unknown caption tokenizer {tokenizer!r}", suggest_name(tokenizer, CAPTION_TOKENIZERS))
    missing = next((sample.id for sample in table.samples if not sample.captions), None)
    if missing is not None:
        raise DataError(f"image {missing!r} has no reference caption", "remove it from the file")
    texts = [*answers, *(caption for sample in table.samples for caption in sample.captions)]
    words = iter(CAPTION_TOKENIZERS[tokenizer](texts))
    return [next(words) for _ in answers], [[next(words) for _ in sample.captions] for sample in table.samples]
