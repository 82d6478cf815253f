"""Metrics of short answers against reference answers, each 0 … 1.

`exact_match` is GQA's metric, `exact_match_with_punctuation` OCR-VQA's, `vqa_accuracy` VQAv2's and TextVQA's, `anls`
DocVQA's, `relaxed_accuracy` ChartQA's, `contains_answer` OCRBench's.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps

from vitrail.errors import DataError
from vitrail.evals.metrics.scoring_table import AnswerTexts, ItemScores, ScoringTable, find_most_common, score_by_subset
from vitrail.evals.scores import Score

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten"
NUMBERS = {word: str(n) for n, word in enumerate(_NUMBER_WORDS.split())} | {"none": "0"}
ARTICLES = {"a", "an", "the"}
_CONTRACTED_WORDS = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've
o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're
there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've
when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't
wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
# Each word without one of its apostrophes. The last entry, which removes one, is from the VQA script too.
CONTRACTIONS = {
    word[:at] + word[at + 1 :]: word for word in _CONTRACTED_WORDS.split() for at, c in enumerate(word) if c == "'"
}
CONTRACTIONS["somebody'd"] = "somebodyd"

_THOUSANDS = re.compile(r"\d,\d")
_FULL_STOP = re.compile(r"\.(?!\d)")


@lru_cache(1 << 16)
def normalize_vqa_answer(text: str) -> str:
    """Normalise an answer as the VQA script does: numbers as digits, no articles, no punctuation."""
    text = re.sub(r"[\n\t]", " ", text).strip()
    original, has_thousands = text, bool(_THOUSANDS.search(text))
    for mark in PUNCTUATION:
        touches_space = f"{mark} " in original or f" {mark}" in original
        text = text.replace(mark, "" if has_thousands or touches_space else " ")
    words = (NUMBERS.get(word, word) for word in _FULL_STOP.sub("", text).lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer equals a reference, ignoring case and a final full stop."""
    return float(_strip_answer(answer) in {_strip_answer(truth) for truth in references})


def exact_match_with_punctuation(answer: str, references: Sequence[str]) -> float:
    """1 if the answer equals a reference, ignoring case only: the rule of VLMEvalKit and Qwen-VL for OCR-VQA."""
    return float(answer.strip().lower() in {truth.strip().lower() for truth in references})


def vqa_accuracy(answer: str, references: Sequence[str], *, as_script: bool = False) -> float:
    """VQA accuracy: min(number of equal references / 3, 1), averaged over all leave-one-out subsets of references.

    The VQA script does not normalise answers if all references are equal: "Yes" is then wrong if all are "yes".
    `as_script` reproduces this.
    """
    if len(references) < 4:
        raise DataError(
            f"{len(references)} reference answers ({', '.join(references):.80})",
            "this metric needs at least 4, usually 10",
        )
    if as_script and len({_strip_whitespace(truth) for truth in references}) == 1:
        num_equal = sum(_strip_whitespace(truth) == _strip_whitespace(answer) for truth in references)
    else:
        answer = normalize_vqa_answer(answer)
        num_equal = sum(normalize_vqa_answer(truth) == answer for truth in references)
    n = len(references)
    return (num_equal * min((num_equal - 1) / 3, 1) + (n - num_equal) * min(num_equal / 3, 1)) / n


def anls(answer: str, references: Sequence[str], *, threshold: float = 0.5) -> float:
    """1 − edit distance / length of the longer text, for the nearest reference; 0 if the distance reaches `threshold`.

    Repeated spaces are collapsed. DocVQA's script counts them in the length.
    """
    distance = min(
        (_edit_fraction(_collapse_spaces(answer), _collapse_spaces(truth)) for truth in references), default=1.0
    )
    return 1 - distance if distance < threshold else 0.0


def relaxed_accuracy(answer: str, references: Sequence[str], *, tolerance: float = 0.05) -> float:
    """1 if a number is within 5 % of a reference, or the text is equal ignoring case. 5% is 0.05; 1,000 is text."""
    return float(any(_is_near(answer.strip(), truth.strip(), tolerance) for truth in references))


def contains_answer(answer: str, references: Sequence[str], *, formula: bool = False) -> float:
    """1 if a reference occurs in the answer, ignoring case; for formulas ignoring spaces but not case."""
    prepare = _strip_formula if formula else _join_lines
    return float(any(prepare(truth) in prepare(answer) for truth in references))


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance of two texts."""
    row = list(range(len(b) + 1))
    for i, c in enumerate(a, start=1):
        corner, row[0] = row[0], i
        for j, d in enumerate(b, start=1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (c != d))
    return row[-1]


def _strip_answer(text: str) -> str:
    return text.strip().rstrip(".").rstrip().lower()


def _strip_whitespace(text: str) -> str:
    return re.sub(r"[\n\t]", " ", text).strip()


def _collapse_spaces(text: str) -> str:
    return " ".join(text.lower().split())


def _edit_fraction(a: str, b: str) -> float:
    longer = max(len(a), len(b))
    return edit_distance(a, b) / longer if longer else 0.0


def _is_near(answer: str, truth: str, within: float) -> bool:
    a, b = _parse_number(answer), _parse_number(truth)
    if a is not None and b:  # a reference of 0 has no relative error
        return abs(a - b) / abs(b) <= within
    return answer.lower() == truth.lower()


def _parse_number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def _join_lines(text: str) -> str:
    return text.lower().strip().replace("\n", " ")


def _strip_formula(text: str) -> str:
    return "".join(text.split())


# ---- scores of benchmarks --------------------------------------------------------------------------------------------


def _score_each(metric: Callable[[str, Sequence[str]], float]) -> Callable[[ScoringTable, AnswerTexts], ItemScores]:
    """Make an item scorer from a metric of an answer and its references."""

    def score(table: ScoringTable, answers: AnswerTexts) -> ItemScores:
        return [metric(answer, truths) for answer, truths in zip(answers, table.references, strict=True)]

    return score


exact_scores = _score_each(exact_match)
verbatim_scores = _score_each(exact_match_with_punctuation)
anls_scores = _score_each(anls)
relaxed_scores = _score_each(relaxed_accuracy)


def vqa_scores(table: ScoringTable, answers: AnswerTexts, *, as_script: bool = False) -> ItemScores:
    """VQA accuracy of each answer.

    as_script  do not normalise answers if all references are equal, like the original script
    """
    pairs = zip(answers, table.references, strict=True)
    return [vqa_accuracy(answer, truths, as_script=as_script) for answer, truths in pairs]


def containment_scores(table: ScoringTable, answers: AnswerTexts) -> ItemScores:
    formulas = (dataset == "HME100k" for dataset in table.get_metadata("dataset"))
    rows = zip(answers, table.references, formulas, strict=True)
    return [contains_answer(answer, truths, formula=formula) for answer, truths, formula in rows]


def make_mean_scorer(
    name: str, score_items: Callable[..., ItemScores], subset_key: str = "", note: str = "", *, binary: bool = False
) -> Callable[..., list[Score]]:
    """Make a scorer of the mean over all items and per value of the metadata key `note`.

    `binary` says that item scores are 0 or 1.
    """

    @wraps(score_items)
    def score(sheet: ScoringTable, answer_texts: AnswerTexts, **options: bool) -> list[Score]:
        parts = sheet.get_metadata(note) if note else [None] * len(sheet)
        return score_by_subset(
            name, score_items(sheet, answer_texts, **options), sheet, subset_key, parts, binary=binary
        )

    return score


def majority_answers(table: ScoringTable) -> list[str]:
    """Baseline: the most common reference answer for all questions."""
    return [find_most_common(find_most_common(truths) for truths in table.references)] * len(table)
