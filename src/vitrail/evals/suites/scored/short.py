"""Short answers: VQAv2, TextVQA, GQA, DocVQA, ChartQA, OCRBench, OCR-VQA."""

from collections.abc import Callable
from functools import wraps

from vitrail.evals.metrics import answers as short
from vitrail.evals.shares import Score
from vitrail.evals.suites.scored import Said, Values
from vitrail.evals.suites.sheets import Sheet, commonest, parted


def exactly(sheet: Sheet, said: Said) -> Values:
    return [short.exact(answer, truths) for answer, truths in zip(said, sheet.truths, strict=True)]


def verbatim(sheet: Sheet, said: Said) -> Values:
    return [short.verbatim(answer, truths) for answer, truths in zip(said, sheet.truths, strict=True)]


def softly(sheet: Sheet, said: Said, *, as_script: bool = False) -> Values:
    pairs = zip(said, sheet.truths, strict=True)
    return [short.soft(answer, truths, as_script=as_script) for answer, truths in pairs]


def by_edits(sheet: Sheet, said: Said) -> Values:
    return [short.anls(answer, truths) for answer, truths in zip(said, sheet.truths, strict=True)]


def relaxedly(sheet: Sheet, said: Said) -> Values:
    return [short.relaxed(answer, truths) for answer, truths in zip(said, sheet.truths, strict=True)]


def holding(sheet: Sheet, said: Said) -> Values:
    formulas = (dataset == "HME100k" for dataset in sheet.noted("dataset"))
    rows = zip(said, sheet.truths, formulas, strict=True)
    return [short.holds(answer, truths, formula=formula) for answer, truths, formula in rows]


def averaged(
    name: str, each: Callable[..., Values], key: str = "", note: str = "", *, binary: bool = False
) -> Callable[..., list[Score]]:
    """A scorer of the mean over all items, and over those of each kind that the notes tell of; `binary` where an item
    is right or wrong and nothing between."""

    @wraps(each)
    def score(sheet: Sheet, said: Said, **how: bool) -> list[Score]:
        parts = sheet.noted(note) if note else [None] * len(sheet)
        return parted(name, each(sheet, said, **how), sheet, key, parts, binary=binary)

    return score


def majority(sheet: Sheet) -> list[str]:
    """The one answer that is right most often."""
    return [commonest(commonest(truths) for truths in sheet.truths)] * len(sheet)
