"""Scoring tables of answers, and scores with bootstrap intervals over images.

N items, G images, K columns
"""

import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitrail.data.formats import Sample
from vitrail.errors import DataError
from vitrail.evals.metrics.resampling import SumsMeasure, bootstrap_interval, ratio_of_columns, sum_by_group
from vitrail.evals.scores import NO_SUBSET, Proportion, Score

Subset = dict[str, str | int]
AnswerTexts = Sequence[str]
ItemScores = list[float]


@dataclass(frozen=True)
class ScoringTable:
    """Samples without images, and the image of each, or its text (`metadata["about"]`).

    Questions about the same image or text are dependent and form one group of the bootstrap.
    """

    samples: list[Sample]
    image_keys: list[Hashable]

    @classmethod
    def from_samples(cls, samples: Iterable[Sample]) -> "ScoringTable":
        stripped, keys = [], []
        for sample in samples:
            stripped.append(replace(sample, images=()))
            keys.append(tuple(map(image_key, sample.media)) or sample.metadata.get("about", sample.id))
        if not stripped:
            raise DataError("there are no samples to score", "pass at least one sample")
        return cls(stripped, keys)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def references(self) -> list[tuple[str, ...]]:
        missing = next((sample.id for sample in self.samples if not sample.answers), None)
        if missing is not None:
            raise DataError(f"sample {missing!r} has no reference answer", "score a split with public answers")
        return [sample.answers for sample in self.samples]

    def get_metadata(self, key: str) -> list[Any]:
        return [sample.metadata.get(key) for sample in self.samples]


def score_mean(
    name: str,
    values: Sequence[float],
    groups: Sequence[Hashable],
    subset: Subset | None = None,
    max_value: float = 1.0,
    *,
    binary: bool = False,
) -> Score:
    """Score the mean of one value per item. Binary values with one item per group get Wilson's interval."""
    if binary and len(set(groups)) == len(values):
        proportion = Proportion(int(sum(values)), len(values))
        return Score(name, proportion.value, proportion.interval, proportion.total, subset=subset or NO_SUBSET)
    table = torch.tensor([[value, 1.0] for value in values], dtype=torch.float64)
    return score_from_sums(name, table, ratio_of_columns(0, 1), groups, subset, max_value)


def score_from_sums(
    name: str,
    item_sums: Tensor,
    measure: SumsMeasure,
    groups: Sequence[Hashable],
    subset: Subset | None = None,
    max_value: float = 1.0,
) -> Score:
    """Score a metric of the sums over items (N, K), with values in 0 … `max_value`."""
    rows = sum_by_group(item_sums, groups)
    value, bounds = measure(item_sums.double().sum(0)).item(), bootstrap_interval(rows, measure)
    if bounds[0] == -math.inf:
        bounds = 0.0, max_value
    elif bounds[0] == bounds[1] and value in (0.0, max_value):  # all draws are equal, so the bootstrap has no width
        low, high = Proportion(round(value / max_value) * len(rows), len(rows)).interval
        bounds = low * max_value, high * max_value
    return Score(name, value, bounds, len(item_sums), subset=subset or NO_SUBSET)


def score_by_subset(
    name: str,
    values: Sequence[float],
    table: ScoringTable,
    subset_key: str,
    subset_values: Sequence[str | None],
    *,
    binary: bool = False,
) -> list[Score]:
    """Score the mean over all items, then over each subset in order of occurrence."""
    scores = [score_mean(name, values, table.image_keys, binary=binary)]
    parts = [part for part in dict.fromkeys(subset_values) if part]
    for part in parts if len(parts) > 1 else ():
        rows = [n for n, subset_value in enumerate(subset_values) if subset_value == part]
        groups = [table.image_keys[n] for n in rows]
        scores.append(score_mean(name, [values[n] for n in rows], groups, {subset_key: part}, binary=binary))
    return scores


def score_all_correct(
    name: str, correct: Sequence[float], groups: Sequence[Hashable], subset: Subset | None = None
) -> Score:
    """Score the fraction of groups with all items correct; items of group None are excluded."""
    group_correct: dict[Hashable, bool] = {}
    for hit, group in zip(correct, groups, strict=True):
        if group is not None:
            group_correct[group] = group_correct.get(group, True) and hit == 1
    proportion = Proportion(sum(group_correct.values()), len(group_correct))
    return Score(name, proportion.value, proportion.interval, proportion.total, subset=subset or NO_SUBSET)


def find_most_common(answers: Iterable[str]) -> str:
    return Counter(answers).most_common(1)[0][0]


def image_key(image: Path | bytes | Image.Image) -> str:
    """Key of an image: its absolute path, or the hash of its bytes."""
    if isinstance(image, Path):
        return str(image.absolute())
    return hashlib.sha1(image if isinstance(image, bytes) else image.tobytes()).hexdigest()
