"""Compare score curves: cluster tasks of similar growth, and subtract two models.

Shapes: T tasks, N numbers of tokens, K clusters.
"""

from collections.abc import Mapping

import numpy as np

from vitrail.errors import ConfigError, DataError
from vitrail.lab.score_tables import ScoreColumn

NUM_STARTS, MAX_ROUNDS = 50, 100


def rescale_scores(column: ScoreColumn) -> tuple[float, ...]:
    """Rescale scores to 0…1; all 0 if they are constant."""
    low, high = min(column.s), max(column.s)
    return tuple((s - low) / ((high - low) or 1.0) for s in column.s)


def cluster_curves(columns: Mapping[str, ScoreColumn], num_clusters: int = 4, seed: int = 0) -> list[list[str]]:
    """Cluster tasks by their rescaled curves with k-means (best of many starts), ordered by first task."""
    if not 1 <= num_clusters <= len(columns):
        raise ConfigError(f"{num_clusters} clusters of {len(columns)} tasks", "use between 1 and the number of tasks")
    if len({column.n for column in columns.values()}) > 1:
        raise DataError("tasks have scores at different numbers of tokens", "fill the empty cells or drop those rows")
    x = np.array([rescale_scores(column) for column in columns.values()])  # (T, N)
    rng = np.random.default_rng(seed)
    ids = min(
        (_run_kmeans(x, x[rng.choice(len(x), num_clusters, replace=False)]) for _ in range(NUM_STARTS)),
        key=lambda i: _compute_clustering_loss(x, i),
    )
    found = [[task for task, i in zip(columns, ids, strict=True) if i == k] for k in dict.fromkeys(ids.tolist())]
    return [group for group in found if group]


def _run_kmeans(x: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Run k-means from K centres; return cluster ids (T)."""
    ids = np.full(len(x), -1)
    for _ in range(MAX_ROUNDS):
        before, ids = ids, ((x[:, None] - centres) ** 2).sum(-1).argmin(1)  # (T, K) → (T)
        if (ids == before).all():
            break
        centres = np.stack([x[ids == k].mean(0) if (ids == k).any() else c for k, c in enumerate(centres)])
    return ids


def _compute_clustering_loss(x: np.ndarray, ids: np.ndarray) -> float:
    return sum(float(((x[ids == k] - x[ids == k].mean(0)) ** 2).sum()) for k in np.unique(ids))


def compute_differences(first: Mapping[str, ScoreColumn], second: Mapping[str, ScoreColumn]) -> dict[str, ScoreColumn]:
    """Subtract the second table from the first, at common tasks and numbers of tokens."""
    found = {}
    for task in (task for task in first if task in second):
        other = dict(zip(*second[task], strict=True))
        both = [(n, s - other[n]) for n, s in zip(*first[task], strict=True) if n in other]
        if both:
            found[task] = ScoreColumn(tuple(n for n, _ in both), tuple(s for _, s in both))
    if not found:
        raise DataError("the two tables have no common task and number of tokens", "use the same task names in both")
    return found
