"""Multiple choice: MMBench and its like, MMMU and RealWorldQA with open answers among them, Winoground."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from vitrail.evals.metrics.choice import letter
from vitrail.evals.shares import Score
from vitrail.evals.suites.scored import Said, Values
from vitrail.evals.suites.sheets import Sheet, all_right, mean, parted

Rule = Callable[[str, Sequence[str]], float]


def chosen_or(rule: Rule) -> Callable[[Sheet, Said], Values]:
    """Whether the option that an answer means is the right one; of questions without options, what a rule says."""

    def each(sheet: Sheet, said: Said) -> Values:
        rows = zip(said, sheet.samples, sheet.truths, strict=True)
        return [
            float(letter(answer, sample.choices) == truths[0]) if sample.choices else rule(answer, truths)
            for answer, sample, truths in rows
        ]

    return each


def chosen(sheet: Sheet, said: Said) -> Values:
    """An answer that means no option is wrong."""
    return chosen_or(lambda answer, truths: 0.0)(sheet, said)


def choices(sheet: Sheet, said: Said) -> list[Score]:
    """The share of right options and, where the file or `circular` asks a question in several orders, of questions that
    are right in all; then how often no option could be read."""
    return _scored(sheet, said, chosen(sheet, said))


def choices_or(rule: Rule) -> Callable[[Sheet, Said], list[Score]]:
    def score(sheet: Sheet, said: Said) -> list[Score]:
        return _scored(sheet, said, chosen_or(rule)(sheet, said))

    return score


def _scored(sheet: Sheet, said: Said, right: Values) -> list[Score]:
    circles = sheet.noted("circle")
    chances = [1 / len(sample.choices) if sample.choices else 0.0 for sample in sheet.samples]
    whole, *rest = parted("accuracy", right, sheet, "category", sheet.noted("category"), binary=True)
    scores = [replace(whole, beside={"chance": sum(chances) / len(chances)}), *rest]
    if len(set(circles)) < len(circles):
        of: dict[str, float] = {}
        for circle, chance in zip(circles, chances, strict=True):
            of[circle] = of.get(circle, 1.0) * chance
        lucky = {"chance": sum(of.values()) / len(of)}
        scores.insert(0, replace(all_right("circular accuracy", right, circles), beside=lucky))
    none = [float(lost) for lost in unread(sheet, said)]
    return [*scores, mean("no option", none, sheet.pictures, binary=True)]


def unread(sheet: Sheet, said: Said) -> list[bool]:
    rows = zip(said, sheet.samples, strict=True)
    return [bool(sample.choices) and letter(answer, sample.choices) is None for answer, sample in rows]


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
