"""Graphs of questions: invalid graphs are refused, and the question with the problem is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.question_graphs import GraphQuestion, QuestionGraph, find_problem
from vitrail.errors import DataError


def questions(*depends):
    return [GraphQuestion(n, "entity - whole", f"Is there a {n}?", tuple(on)) for n, on in enumerate(depends, 1)]


@st.composite
def graphs(draw, most=8):
    """Questions that depend on some of the earlier ones, in any order."""
    count = draw(st.integers(1, most))
    depends = [draw(st.sets(st.integers(1, n), max_size=3)) if n else set() for n in range(count)]
    return draw(st.permutations(questions(*map(sorted, depends))))


@given(graphs())
def test_acyclic_questions_are_a_graph(asked):
    assert find_problem(asked) is None
    assert QuestionGraph("a", "some", tuple(asked)).questions == tuple(asked)


@given(graphs(), st.data())
def test_cycles_are_found(asked, data):
    """Make the first question of a chain depend on its last."""
    by_id = {question.id: question for question in asked}
    last = data.draw(st.sampled_from(asked))
    chain = [last]
    while chain[-1].dependencies:
        chain.append(by_id[data.draw(st.sampled_from(chain[-1].dependencies))])
    first = chain[-1]
    cyclic = [
        question_._replace(dependencies=(*question_.dependencies, last.id)) if question_.id == first.id else question_
        for question_ in asked
    ]
    problem = find_problem(cyclic)
    assert problem is not None and "depends on itself" in problem.problem
    assert str(cyclic[problem.position].id) in problem.problem


@pytest.mark.parametrize(
    ("asked", "place", "message"),
    [
        (questions((), (3,)), 1, "depends on 3, which is not a question"),
        (questions((1,)), 0, "depends on itself: 1 → 1"),
        (questions((), (3,), (2,)), 1, "depends on itself: 2 → 3 → 2|depends on itself: 3 → 2 → 3"),
        ([*questions(()), *questions(())], 1, "a duplicate id: 1"),
        ([GraphQuestion(0, "global", "Is it?")], 0, "has the id 0"),
    ],
)
def test_invalid_graphs_are_refused(asked, place, message):
    problem = find_problem(asked)
    assert problem is not None and problem.position == place
    with pytest.raises(DataError, match=message):
        QuestionGraph("a", "some", tuple(asked))


def test_empty_graph_is_refused():
    with pytest.raises(DataError, match="has no question"):
        QuestionGraph("a", "some", ())
