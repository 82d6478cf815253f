"""Curves beside each other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError, DataError
from vitrail.lab.curves import clusters, differences, scaled
from vitrail.lab.scores import Column, read_scores

N = (1.0, 8.0, 64.0, 512.0)


def test_tasks_that_grow_alike_are_together():
    shapes = {"up": (0, 1, 2, 3), "down": (3, 2, 1, 0), "hump": (0, 3, 3, 0)}
    rng = np.random.default_rng(0)
    columns = {
        f"{name}-{i}": Column(N, tuple(5 + 3 * i + (i + 1) * (np.array(shape) + rng.normal(0, 0.05, 4))))
        for i in range(4)
        for name, shape in shapes.items()
    }
    found = clusters(columns, 3)
    assert sorted(map(sorted, found)) == sorted(sorted(f"{name}-{i}" for i in range(4)) for name in shapes)


@settings(max_examples=20)
@given(st.integers(1, 18), st.integers(0, 3))
def test_every_task_is_in_one_cluster(count, seed):
    columns = read_scores("paper")
    found = clusters(columns, count, seed)
    assert sorted(task for group in found for task in group) == sorted(columns) and len(found) <= count


def test_scores_that_do_not_move():
    assert scaled(Column(N, (2, 2, 2, 2))) == (0, 0, 0, 0)
    assert scaled(Column(N, (2, 4, 3, 2))) == (0, 1, 0.5, 0)


def test_differences_are_those_of_what_both_were_tested_at():
    ours = {"a": Column((1, 8, 64), (10, 20, 30)), "b": Column((1,), (5,))}
    theirs = {"a": Column((8, 64, 512), (25, 25, 25)), "c": Column((1,), (5,))}
    assert differences(ours, theirs) == {"a": Column((8, 64), (-5, 5))}


def test_captions_do_without_the_question():
    """What the paper sees in its figure 12: nearly all tasks gain by the question, captions lose."""
    gaps = differences(read_scores("paper"), read_scores("paper-tuned"))
    better = {task: sum(value > 0 for value in gap.s) for task, gap in gaps.items()}
    assert all(better[task] <= 1 for task in better if "COCO" in task)
    assert sum(count > 5 for count in better.values()) >= 12


def test_tables_that_do_not_meet():
    with pytest.raises(DataError, match="in common"):
        differences({"a": Column((1,), (2,))}, {"b": Column((1,), (2,))})
    with pytest.raises(DataError, match="same numbers"):
        clusters({"a": Column((1,), (2,)), "b": Column((2,), (2,))}, 1)
    with pytest.raises(ConfigError, match="3 clusters"):
        clusters({"a": Column((1,), (2,))}, 3)
