"""Comparison of score curves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError, DataError
from vitrail.lab.score_curves import cluster_curves, compute_differences, rescale_scores
from vitrail.lab.score_tables import ScoreColumn, read_score_table

N = (1.0, 8.0, 64.0, 512.0)


def test_similar_curves_are_in_one_cluster():
    shapes = {"up": (0, 1, 2, 3), "down": (3, 2, 1, 0), "hump": (0, 3, 3, 0)}
    rng = np.random.default_rng(0)
    columns = {
        f"{name}-{i}": ScoreColumn(N, tuple(5 + 3 * i + (i + 1) * (np.array(shape) + rng.normal(0, 0.05, 4))))
        for i in range(4)
        for name, shape in shapes.items()
    }
    found = cluster_curves(columns, 3)
    assert sorted(map(sorted, found)) == sorted(sorted(f"{name}-{i}" for i in range(4)) for name in shapes)


@settings(max_examples=20)
@given(st.integers(1, 18), st.integers(0, 3))
def test_every_task_is_in_one_cluster(count, seed):
    columns = read_score_table("paper")
    found = cluster_curves(columns, count, seed)
    assert sorted(task for group in found for task in group) == sorted(columns) and len(found) <= count


def test_constant_scores_are_rescaled_to_zero():
    assert rescale_scores(ScoreColumn(N, (2, 2, 2, 2))) == (0, 0, 0, 0)
    assert rescale_scores(ScoreColumn(N, (2, 4, 3, 2))) == (0, 1, 0.5, 0)


def test_differences_cover_common_tasks_and_counts():
    ours = {"a": ScoreColumn((1, 8, 64), (10, 20, 30)), "b": ScoreColumn((1,), (5,))}
    theirs = {"a": ScoreColumn((8, 64, 512), (25, 25, 25)), "c": ScoreColumn((1,), (5,))}
    assert compute_differences(ours, theirs) == {"a": ScoreColumn((8, 64), (-5, 5))}


def test_question_helps_most_tasks_except_captions():
    """Figure 12 of the paper: nearly all tasks gain from the question, captions lose."""
    gaps = compute_differences(read_score_table("paper"), read_score_table("paper-tuned"))
    better = {task: sum(value > 0 for value in gap.s) for task, gap in gaps.items()}
    assert all(better[task] <= 1 for task in better if "COCO" in task)
    assert sum(count > 5 for count in better.values()) >= 12


def test_incompatible_tables_raise():
    with pytest.raises(DataError, match="common task"):
        compute_differences({"a": ScoreColumn((1,), (2,))}, {"b": ScoreColumn((1,), (2,))})
    with pytest.raises(DataError, match="different numbers"):
        cluster_curves({"a": ScoreColumn((1,), (2,)), "b": ScoreColumn((2,), (2,))}, 1)
    with pytest.raises(ConfigError, match="3 clusters"):
        cluster_curves({"a": ScoreColumn((1,), (2,))}, 3)
