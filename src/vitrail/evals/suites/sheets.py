"""What answers are scored on, and how their scores get an interval: by drawing pictures anew.

N items, G pictures, K columns
"""

import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.data.formats import Sample
from vitrail.errors import DataError
from vitrail.evals.metrics.resample import Measure, interval, share_of, together
from vitrail.evals.shares import EVERYTHING, Score, Share

Part = dict[str, str | int]


@dataclass(frozen=True)
class Sheet:
    """Samples without their pictures, and which picture each is of, or which text (`notes["about"]`): questions about
    one stand or fall together."""

    samples: list[Sample]
    pictures: list[Hashable]

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> "Sheet":
        kept, pictures = [], []
        for sample in samples:
            kept.append(replace(sample, pictures=()))
            pictures.append(tuple(map(key_of, sample.shown)) or sample.notes.get("about", sample.id))
        if not kept:
            raise DataError("nothing to score", "give at least one sample")
        return cls(kept, pictures)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def truths(self) -> list[tuple[str, ...]]:
        untold = next((sample.id for sample in self.samples if not sample.answers), None)
        if untold is not None:
            raise DataError(f"the answer to {untold!r} is not known", "score a part that people may look at")
        return [sample.answers for sample in self.samples]

    def noted(self, key: str) -> list[Any]:
        return [sample.notes.get(key) for sample in self.samples]


def mean(
    name: str,
    values: Sequence[float],
    pictures: Sequence[Hashable],
    part: Part | None = None,
    most: float = 1.0,
    *,
    binary: bool = False,
) -> Score:
    """Of one value an item: Wilson's interval where each is right or wrong (`binary`) and has a picture of its own."""
    if binary and len(set(pictures)) == len(values):
        share = Share(int(sum(values)), len(values))
        return Score(name, share.value, share.interval, share.of, part=part or EVERYTHING)
    table = torch.tensor([[value, 1.0] for value in values], dtype=torch.float64)
    return measured(name, table, share_of(0, 1), pictures, part, most)


def measured(
    name: str,
    table: Tensor,
    measure: Measure,
    pictures: Sequence[Hashable],
    part: Part | None = None,
    most: float = 1.0,
) -> Score:
    """What `measure` makes of the sums over items (N, K), which is 0 … `most`: so is the interval of one picture."""
    rows = together(table, pictures)
    value, ends = measure(table.double().sum(0)).item(), interval(rows, measure)
    if ends[0] == -math.inf:
        ends = 0.0, most
    elif ends[0] == ends[1] and value in (0.0, most):  # where every draw says the same, a bootstrap sees no doubt
        low, high = Share(round(value / most) * len(rows), len(rows)).interval
        ends = low * most, high * most
    return Score(name, value, ends, len(table), part=part or EVERYTHING)


def parted(
    name: str, values: Sequence[float], sheet: Sheet, key: str, said: Sequence[str | None], *, binary: bool = False
) -> list[Score]:
    """The mean over all, then over each part, in the order they come in."""
    scores = [mean(name, values, sheet.pictures, binary=binary)]
    parts = [part for part in dict.fromkeys(said) if part]
    for part in parts if len(parts) > 1 else ():
        rows = [n for n, at in enumerate(said) if at == part]
        places = [sheet.pictures[n] for n in rows]
        scores.append(mean(name, [values[n] for n in rows], places, {key: part}, binary=binary))
    return scores


def all_right(name: str, right: Sequence[float], groups: Sequence[Hashable], part: Part | None = None) -> Score:
    """The share of groups of which every item is right; items of the group None are left out."""
    whole: dict[Hashable, bool] = {}
    for hit, group in zip(right, groups, strict=True):
        if group is not None:
            whole[group] = whole.get(group, True) and hit == 1
    share = Share(sum(whole.values()), len(whole))
    return Score(name, share.value, share.interval, share.of, part=part or EVERYTHING)


def commonest(answers: Iterable[str]) -> str:
    return Counter(answers).most_common(1)[0][0]


def key_of(picture: Path | bytes) -> str:
    """What tells a picture from others: where its file lies, or what its bytes add up to."""
    return hashlib.sha1(picture).hexdigest() if isinstance(picture, bytes) else str(picture.absolute())
