"""Yes or no: POPE, HallusionBench, MME."""

from itertools import product

import torch

from vitrail.errors import ConfigError, DataError, nearest
from vitrail.evals.metrics.resample import Measure, share_of, together
from vitrail.evals.metrics.yesno import MODES, Mode, among_words, first_letters, measures, tally
from vitrail.evals.shares import Score
from vitrail.evals.suites.scored import Said, Values
from vitrail.evals.suites.sheets import Sheet, all_right, mean, measured


def always_yes(sheet: Sheet) -> list[str]:
    return ["yes"] * len(sheet)


def yes_or_no(sheet: Sheet, said: Said, *, mode: str = "pope") -> Values:
    read = _mode(mode).read
    return [float(read(answer) == truth) for answer, (truth, *_) in zip(said, sheet.truths, strict=True)]


def untold(sheet: Sheet, said: Said, *, mode: str = "pope") -> list[bool]:
    return [not _mode(mode).read(answer) for answer in said]


def pope(sheet: Sheet, said: Said, *, mode: str = "pope") -> list[Score]:
    """POPE's measures of each split, or of all as one where the mode has it so."""
    chosen = _mode(mode)
    table = tally(said, [truth for truth, *_ in sheet.truths], chosen.read)
    splits = ["" if chosen.pooled else split or "" for split in sheet.noted("split")]
    scores = []
    for split, (name, measure) in product(dict.fromkeys(splits), measures(chosen).items()):
        rows = [n for n, at in enumerate(splits) if at == split]
        part = {"split": split} if split else None
        scores.append(measured(name, table[rows], measure, [sheet.pictures[n] for n in rows], part))
    return scores


def _mode(name: str) -> Mode:
    if name not in MODES:
        raise ConfigError(f"POPE is not scored in a mode {name!r}", nearest(name, MODES))
    return MODES[name]


def told_apart(sheet: Sheet, said: Said) -> Values:
    return [float(among_words(answer) == truth) for answer, (truth, *_) in zip(said, sheet.truths, strict=True)]


def untold_apart(sheet: Sheet, said: Said) -> list[bool]:
    return [not among_words(answer) for answer in said]


def hallusion(sheet: Sheet, said: Said) -> list[Score]:
    """aAcc of questions, fAcc of figures with all questions right, qAcc of questions right over all their figures."""
    right = told_apart(sheet, said)
    return [
        mean("aAcc", right, sheet.pictures, binary=True),
        all_right("fAcc", right, sheet.noted("figure")),
        all_right("qAcc", right, sheet.noted("question")),
    ]


PERCEPTION = ("existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR")
COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")


def at_once(sheet: Sheet, said: Said) -> Values:
    return [float(first_letters(answer) == truth) for answer, (truth, *_) in zip(said, sheet.truths, strict=True)]


def untold_at_once(sheet: Sheet, said: Said) -> list[bool]:
    return [not first_letters(answer) for answer in said]


def mme(sheet: Sheet, said: Said) -> list[Score]:
    """Of each category acc, and acc+ of pictures with both questions right; of both kinds the sum of these in points,
    100 each, over the categories there are."""
    right, of = at_once(sheet, said), [str(category) for category in sheet.noted("category")]
    unknown = next((name for name in of if name not in PERCEPTION + COGNITION), None)
    if unknown is not None:
        raise DataError(f"MME has no category {unknown!r}", nearest(unknown, PERCEPTION + COGNITION))
    scores, sums = [], []
    for kind, names in (("perception", PERCEPTION), ("cognition", COGNITION)):
        present = [name for name in names if name in of]
        columns, pictures, rows = 4 * len(present), [], []
        for k, category in enumerate(present):
            here = [n for n, at in enumerate(of) if at == category]
            hits, places = [right[n] for n in here], [sheet.pictures[n] for n in here]
            scores.append(mean("acc", hits, places, {"category": category}, binary=True))
            scores.append(all_right("acc+", hits, places, {"category": category}))
            both = together(torch.tensor([[hit, 1.0] for hit in hits]), places)
            for hit, count in both.tolist():
                row = [0.0] * columns
                row[4 * k : 4 * k + 4] = hit, count, float(hit == count), 1.0
                rows.append(row)
                pictures.append(len(pictures))
        if present:
            total = measured(
                kind, torch.tensor(rows, dtype=torch.float64), _points(len(present)), pictures, most=200 * len(present)
            )
            sums.append(Score(total.name, total.value, total.interval, total.of, points=True))
    return [*sums, *scores]


def _points(categories: int) -> Measure:
    shares = [share_of(at, at + 1) for at in range(0, 4 * categories, 2)]
    return lambda sums: 100 * torch.stack([share(sums) for share in shares]).sum(0)
