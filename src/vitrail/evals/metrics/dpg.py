"""DPG-Bench's score: a picture's share of questions that count, averaged over its drawings and over prompts; and the
share of yes by category.

The arithmetic is that of the benchmark's own script (ELLA, compute_dpg_bench.py), with what it does beyond its paper:
dependencies are looked up in the order of the table, so that what lost its own yes takes it from questions further
down; shares by category count plain answers, whatever they depend on; and those of the last drawing of a prompt alone.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vitrail.data.graphs import Graph
from vitrail.errors import DataError

Drawings = Sequence[Sequence[bool]]
"""whether each question is answered yes, drawing by drawing"""


class Dpg(NamedTuple):
    """Shares of 0 … 1. Level 1 is what stands before a category's dash."""

    score: float
    level1: dict[str, float]
    level2: dict[str, float]


class Told(NamedTuple):
    """One answer that counts for its category."""

    level1: str
    level2: str
    prompt: int  # row of the graphs
    yes: bool


def counts(graph: Graph, yes: Sequence[bool]) -> list[bool]:
    """Which of a graph's questions count: answered yes, as is all that they depend on."""
    if len(yes) != len(graph.questions):
        raise DataError(
            f"{len(yes)} answers to the {len(graph.questions)} questions of {graph.id!r:.80}", "give one to each"
        )
    left = dict(zip((question.id for question in graph.questions), map(bool, yes), strict=True))
    for question in graph.questions:
        left[question.id] &= all(left[one] for one in question.depends)
    return list(left.values())


def pictures(graphs: Sequence[Graph], answers: Sequence[Drawings]) -> list[float]:
    """Of each prompt the mean over its drawings."""
    if len(graphs) != len(answers):
        raise DataError(f"answers about {len(answers):,} prompts for {len(graphs):,} graphs", "give those of each")
    values = []
    for graph, drawings in zip(graphs, answers, strict=True):
        if not drawings:
            raise DataError(f"no drawing of {graph.id!r:.80}", "draw each prompt at least once")
        shares = [sum(counts(graph, yes)) / len(yes) for yes in drawings]
        values.append(sum(shares) / len(shares))
    return values


def told(graphs: Sequence[Graph], answers: Sequence[Drawings]) -> Iterator[Told]:
    """The answers that count by category: plain ones, about the last drawing of each prompt."""
    for row, (graph, drawings) in enumerate(zip(graphs, answers, strict=True)):
        for question, yes in zip(graph.questions, drawings[-1], strict=True):
            yield Told(question.category.split("-")[0].strip(), question.category, row, yes)


def dpg(graphs: Sequence[Graph], answers: Sequence[Drawings]) -> Dpg:
    """The benchmark's figures, of answers to the questions of each graph about each of its drawings."""
    if not graphs:
        raise DataError("nothing to score", "give at least one prompt")
    score = float(np.mean(pictures(graphs, answers)))
    levels: tuple[dict[str, list[float]], dict[str, list[float]]] = {}, {}
    for one in told(graphs, answers):
        for level, name in zip(levels, (one.level1, one.level2), strict=True):
            level.setdefault(name, []).append(float(one.yes))
    level1, level2 = ({name: float(np.mean(values)) for name, values in level.items()} for level in levels)
    return Dpg(score, level1, level2)
