"""Multiple choice: MMBench and its like, Winoground, ARO."""

from dataclasses import replace

import torch

from vitrail.evals.metrics.choice import letter
from vitrail.evals.shares import Score
from vitrail.evals.suites.scored import Said, Values
from vitrail.evals.suites.sheets import Sheet, all_right, mean, measured, parted


def chosen(sheet: Sheet, said: Said) -> Values:
    """An answer that means no option is wrong."""
    rows = zip(said, sheet.samples, sheet.truths, strict=True)
    return [float(letter(answer, sample.choices) == truth) for answer, sample, (truth, *_) in rows]


def choices(sheet: Sheet, said: Said) -> list[Score]:
    """The share of right options and, where the file or `circular` asks a question in several orders, of questions that
    are right in all; then how often no option could be read."""
    right, circles = chosen(sheet, said), sheet.noted("circle")
    chances = [1 / len(sample.choices) for sample in sheet.samples]
    whole, *rest = parted("accuracy", right, sheet, "category", sheet.noted("category"))
    scores = [replace(whole, beside={"chance": sum(chances) / len(chances)}), *rest]
    if len(set(circles)) < len(circles):
        of: dict[str, float] = {}
        for circle, chance in zip(circles, chances, strict=True):
            of[circle] = of.get(circle, 1.0) * chance
        lucky = {"chance": sum(of.values()) / len(of)}
        scores.insert(0, replace(all_right("circular accuracy", right, circles), beside=lucky))
    unread = [float(letter(answer, sample.choices) is None) for answer, sample in zip(said, sheet.samples, strict=True)]
    return [*scores, mean("no option", unread, sheet.pictures)]


def pairs(sheet: Sheet, said: Said) -> list[Score]:
    """Winoground's: for both pictures the right caption, for both captions the right picture, and both."""
    right, examples = chosen(sheet, said), sheet.noted("example")
    scores = []
    for name, sides, chance in (("text", "text", 1 / 4), ("image", "image", 1 / 4), ("group", "text image", 1 / 16)):
        groups = [
            example if side in sides.split() else None
            for example, side in zip(examples, sheet.noted("side"), strict=True)
        ]
        scores.append(replace(all_right(name, right, groups), beside={"chance": chance}))
    return scores


def kinds(sheet: Sheet, said: Said) -> list[Score]:
    """ARO's: the share of true captions, and its mean over the kinds of relation or attribute."""
    right, of = chosen(sheet, said), [str(kind) for kind in sheet.noted("kind")]
    names = list(dict.fromkeys(of))
    table = torch.zeros(len(right), 2 * len(names), dtype=torch.float64)
    for row, hit, kind in zip(table, right, of, strict=True):
        at = 2 * names.index(kind)
        row[at], row[at + 1] = hit, 1.0

    def over_kinds(sums: torch.Tensor) -> torch.Tensor:  # of those that a draw has
        hits, counts = sums[..., ::2], sums[..., 1::2]
        return (hits / counts.clamp(min=1)).sum(-1) / (counts > 0).sum(-1)

    return [mean("accuracy", right, sheet.pictures), measured("mean over kinds", table, over_kinds, sheet.pictures)]
