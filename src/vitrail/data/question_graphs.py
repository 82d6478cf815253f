"""Prompts as graphs of yes-no questions (Davidsonian scene graphs).

Each question checks one fact of the prompt. A question does not count if one of its dependencies is answered no.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from vitrail.errors import DataError


class GraphQuestion(NamedTuple):
    """One yes-no question of a graph."""

    id: int  # 1, 2, …, unique within the graph
    category: str  # “attribute - color”: level 1, a dash, and level 2
    text: str
    dependencies: tuple[int, ...] = ()  # ids of questions


class GraphProblem(NamedTuple):
    """What is wrong with the question at this position."""

    position: int
    problem: str
    remedy: str


@dataclass(frozen=True)
class QuestionGraph:
    """A prompt and its questions, in the order in which they are scored."""

    id: str
    prompt: str
    questions: tuple[GraphQuestion, ...]

    def __post_init__(self) -> None:
        if not self.questions:
            raise DataError(f"graph {self.id!r:.80} has no question", "add at least one")
        if (problem := find_problem(self.questions)) is not None:
            raise DataError(
                f"graph {self.id!r:.80}: question {self.questions[problem.position].id} {problem.problem}",
                problem.remedy,
            )


def find_problem(questions: Sequence[GraphQuestion]) -> GraphProblem | None:
    """Return the first problem of the questions: a duplicate id, an unknown dependency or a cycle."""
    position_of: dict[int, int] = {}
    for position, question in enumerate(questions):
        if question.id < 1:
            return GraphProblem(position, f"has the id {question.id}", "number questions from 1; 0 means no dependency")
        if position_of.setdefault(question.id, position) != position:
            return GraphProblem(position, f"has a duplicate id: {question.id}", "give each question its own id")
    for position, question in enumerate(questions):
        unknown = [id_ for id_ in question.dependencies if id_ not in position_of]
        if unknown:
            remedy = f"use ids among {', '.join(map(str, position_of))}, or 0 for none"
            return GraphProblem(position, f"depends on {unknown[0]}, which is not a question of this prompt", remedy)
    try:
        TopologicalSorter({question.id: question.dependencies for question in questions}).prepare()
    except CycleError as error:
        cycle: list[int] = error.args[1]
        position = min(position_of[id_] for id_ in cycle)
        path = " → ".join(map(str, reversed(cycle)))
        return GraphProblem(position, f"depends on itself: {path}", "remove one of these dependencies")
    return None
