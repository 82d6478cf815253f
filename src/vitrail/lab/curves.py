"""Score curves beside each other: which tasks grow alike, and what one model has over another.

Axes: T tasks, N numbers of tokens, K clusters.
"""

from collections.abc import Mapping

import numpy as np

from vitrail.errors import ConfigError, DataError
from vitrail.lab.scores import Column

STARTS, ROUNDS = 50, 100


def scaled(column: Column) -> tuple[float, ...]:
    """Scores between the least, 0, and the most, 1; all 0 where they do not move."""
    low, high = min(column.s), max(column.s)
    return tuple((s - low) / ((high - low) or 1.0) for s in column.s)


def clusters(columns: Mapping[str, Column], count: int = 4, seed: int = 0) -> list[list[str]]:
    """Tasks whose scaled curves are alike, by k-means: the best of many starts, in the order of their first tasks."""
    if not 1 <= count <= len(columns):
        raise ConfigError(f"{len(columns)} tasks do not make {count} clusters", "ask for no more than there are tasks")
    if len({column.n for column in columns.values()}) > 1:
        raise DataError("tasks were not all tested at the same numbers of tokens", "fill the empty cells, or drop them")
    x = np.array([scaled(column) for column in columns.values()])  # (T, N)
    rng = np.random.default_rng(seed)
    ids = min(
        (_means(x, x[rng.choice(len(x), count, replace=False)]) for _ in range(STARTS)), key=lambda i: _loss(x, i)
    )
    found = [[task for task, i in zip(columns, ids, strict=True) if i == k] for k in dict.fromkeys(ids.tolist())]
    return [group for group in found if group]


def _means(x: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Ids (T) of the nearest of K centres, moved to the means of their tasks until nothing changes."""
    ids = np.full(len(x), -1)
    for _ in range(ROUNDS):
        before, ids = ids, ((x[:, None] - centres) ** 2).sum(-1).argmin(1)  # (T, K) → (T)
        if (ids == before).all():
            break
        centres = np.stack([x[ids == k].mean(0) if (ids == k).any() else c for k, c in enumerate(centres)])
    return ids


def _loss(x: np.ndarray, ids: np.ndarray) -> float:
    return sum(float(((x[ids == k] - x[ids == k].mean(0)) ** 2).sum()) for k in np.unique(ids))


def differences(ours: Mapping[str, Column], theirs: Mapping[str, Column]) -> dict[str, Column]:
    """Task → ours − theirs, at the numbers of tokens that both were tested at; tasks that both have."""
    found = {}
    for task in (task for task in ours if task in theirs):
        other = dict(zip(*theirs[task], strict=True))
        both = [(n, s - other[n]) for n, s in zip(*ours[task], strict=True) if n in other]
        if both:
            found[task] = Column(tuple(n for n, _ in both), tuple(s for _, s in both))
    if not found:
        raise DataError("the two tables have no task and number of tokens in common", "name tasks alike in both")
    return found
