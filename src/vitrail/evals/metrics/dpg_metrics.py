"""DPG-Bench's score: fraction of satisfied questions per image, averaged over images and prompts; and by category.

It reproduces the benchmark's script (ELLA, compute_dpg_bench.py), including details that the paper does not mention:

- Dependencies are resolved in table order, so an unsatisfied question also fails questions further down.
- Category scores count plain answers without dependencies, for the last image of each prompt only.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vitrail.data.question_graphs import QuestionGraph
from vitrail.errors import DataError

DrawingAnswers = Sequence[Sequence[bool]]
"""Whether each question is answered yes, per image of a prompt."""


class DPGScore(NamedTuple):
    """Scores in 0 … 1. Level 1 is the part of a category before the dash."""

    score: float
    level1: dict[str, float]
    level2: dict[str, float]


class CategoryAnswer(NamedTuple):
    """One answer that counts for a category."""

    level1: str
    level2: str
    prompt_index: int  # index of the graph
    is_yes: bool


def count_satisfied(graph: QuestionGraph, answers: Sequence[bool]) -> list[bool]:
    """Which questions of a graph are satisfied: answered yes, like all questions that they depend on."""
    if len(answers) != len(graph.questions):
        raise DataError(
            f"{len(answers)} answers to the {len(graph.questions)} questions of {graph.id!r:.80}",
            "pass one per question",
        )
    satisfied = dict(zip((question.id for question in graph.questions), map(bool, answers), strict=True))
    for question in graph.questions:
        satisfied[question.id] &= all(satisfied[dependency] for dependency in question.dependencies)
    return list(satisfied.values())


def score_prompts(graphs: Sequence[QuestionGraph], answers: Sequence[DrawingAnswers]) -> list[float]:
    """Mean score over the images of each prompt."""
    if len(graphs) != len(answers):
        raise DataError(f"answers for {len(answers):,} prompts but {len(graphs):,} graphs", "pass answers per graph")
    values = []
    for graph, drawings in zip(graphs, answers, strict=True):
        if not drawings:
            raise DataError(f"prompt {graph.id!r:.80} has no image", "generate at least one image per prompt")
        scores = [sum(count_satisfied(graph, yes)) / len(yes) for yes in drawings]
        values.append(sum(scores) / len(scores))
    return values


def iter_category_answers(
    graphs: Sequence[QuestionGraph], answers: Sequence[DrawingAnswers]
) -> Iterator[CategoryAnswer]:
    """Yield the answers that count for categories: plain answers about the last image of each prompt."""
    for row, (graph, drawings) in enumerate(zip(graphs, answers, strict=True)):
        for question, yes in zip(graph.questions, drawings[-1], strict=True):
            yield CategoryAnswer(question.category.split("-")[0].strip(), question.category, row, yes)


def compute_dpg_score(graphs: Sequence[QuestionGraph], answers: Sequence[DrawingAnswers]) -> DPGScore:
    """Compute the benchmark's scores from the answers about each image of each graph."""
    if not graphs:
        raise DataError("there are no prompts to score", "pass at least one prompt")
    score = float(np.mean(score_prompts(graphs, answers)))
    levels: tuple[dict[str, list[float]], dict[str, list[float]]] = {}, {}
    for answer in iter_category_answers(graphs, answers):
        for level, name in zip(levels, (answer.level1, answer.level2), strict=True):
            level.setdefault(name, []).append(float(answer.is_yes))
    level1, level2 = ({name: float(np.mean(values)) for name, values in level.items()} for level in levels)
    return DPGScore(score, level1, level2)
