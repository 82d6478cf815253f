"""A prompt as a graph of yes-no questions (Davidsonian scene graph): each asks for one thing that the prompt says, and
none counts where one that it depends on is answered no."""

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from vitrail.errors import DataError


class Question(NamedTuple):
    id: int  # from 1 on, within its graph
    category: str  # “attribute - color”: level 1, and level 2 behind the dash
    text: str
    depends: tuple[int, ...] = ()  # ids


class Fault(NamedTuple):
    """What is wrong with the question in this place."""

    place: int
    problem: str
    fix: str


@dataclass(frozen=True)
class Graph:
    """A prompt, and what a picture of it is asked, in the order that scores are counted in."""

    id: str
    prompt: str
    questions: tuple[Question, ...]

    def __post_init__(self) -> None:
        if not self.questions:
            raise DataError(f"the graph {self.id!r:.80} has no question", "give it at least one")
        if (found := fault(self.questions)) is not None:
            raise DataError(
                f"question {self.questions[found.place].id} of the graph {self.id!r:.80} {found.problem}", found.fix
            )


def fault(questions: Sequence[Question]) -> Fault | None:
    """The first thing that keeps questions from being a graph: an id twice, a dependency on none of them, a cycle."""
    places: dict[int, int] = {}
    for place, question in enumerate(questions):
        if question.id < 1:
            return Fault(place, f"has the id {question.id}", "count questions from 1: 0 stands for no dependency")
        if places.setdefault(question.id, place) != place:
            return Fault(place, f"has an id that was there before: {question.id}", "give each question its own")
    for place, question in enumerate(questions):
        unknown = [one for one in question.depends if one not in places]
        if unknown:
            fix = f"name some of {', '.join(map(str, places))}, or 0 for none"
            return Fault(place, f"depends on {unknown[0]}, which is no question of this prompt", fix)
    try:
        TopologicalSorter({question.id: question.depends for question in questions}).prepare()
    except CycleError as error:
        circle: list[int] = error.args[1]
        place = min(places[one] for one in circle)
        way = " → ".join(map(str, reversed(circle)))
        return Fault(place, f"depends on itself: {way}", "leave one of these dependencies out")
    return None
