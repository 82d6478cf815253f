"""Graphs of questions: what is none is refused, and the question at fault is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.graphs import Graph, Question, fault
from vitrail.errors import DataError


def questions(*depends):
    return [Question(n, "entity - whole", f"Is there a {n}?", tuple(on)) for n, on in enumerate(depends, 1)]


@st.composite
def graphs(draw, most=8):
    """Questions that depend on some of those before them, in any order."""
    many = draw(st.integers(1, most))
    depends = [draw(st.sets(st.integers(1, n), max_size=3)) if n else set() for n in range(many)]
    return draw(st.permutations(questions(*map(sorted, depends))))


@given(graphs())
def test_what_depends_on_no_later_one_is_a_graph_in_any_order(asked):
    assert fault(asked) is None
    assert Graph("a", "some", tuple(asked)).questions == tuple(asked)


@given(graphs(), st.data())
def test_a_way_back_is_a_cycle(asked, data):
    """The first of a chain is made to depend on its last."""
    by_id = {question.id: question for question in asked}
    last = data.draw(st.sampled_from(asked))
    chain = [last]
    while chain[-1].depends:
        chain.append(by_id[data.draw(st.sampled_from(chain[-1].depends))])
    first = chain[-1]
    closed = [one._replace(depends=(*one.depends, last.id)) if one.id == first.id else one for one in asked]
    found = fault(closed)
    assert found is not None and "depends on itself" in found.problem
    assert str(closed[found.place].id) in found.problem


@pytest.mark.parametrize(
    ("asked", "place", "says"),
    [
        (questions((), (3,)), 1, "depends on 3, which is no question"),
        (questions((1,)), 0, "depends on itself: 1 → 1"),
        (questions((), (3,), (2,)), 1, "depends on itself: 2 → 3 → 2|depends on itself: 3 → 2 → 3"),
        ([*questions(()), *questions(())], 1, "an id that was there before: 1"),
        ([Question(0, "global", "Is it?")], 0, "has the id 0"),
    ],
)
def test_what_is_no_graph_is_refused(asked, place, says):
    found = fault(asked)
    assert found is not None and found.place == place
    with pytest.raises(DataError, match=says):
        Graph("a", "some", tuple(asked))


def test_a_graph_asks_something():
    with pytest.raises(DataError, match="has no question"):
        Graph("a", "some", ())
