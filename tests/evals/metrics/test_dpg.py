"""DPG-Bench's figures, as the benchmark's own script prints them.

The script (TencentQQGYLab/ELLA, dpg_bench/compute_dpg_bench.py) was run on the table below, with these answers in place
of mPLUG's to a picture of 2 × 2 drawings, with --pic-num 1, 2 and 4. It passes over the first row of a table, so one
that counts for nothing stood before these.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.test_graphs import graphs
from vitrail.data.graphs import Graph, Question
from vitrail.errors import DataError
from vitrail.evals.metrics.dpg import counts, dpg, pictures

WHOLE, PART, COLOUR, SIZE = "entity - whole", "entity - part", "attribute - color", "attribute - size"
SPATIAL, COUNT = "relation - spatial", "other - count"


def graph(name, *rows):
    return Graph(name, name, tuple(Question(n, category, "?", on) for n, (category, on) in enumerate(rows, 1)))


BOATS = graph(
    "partiprompts7", (WHOLE, ()), (COUNT, (1,)), (COLOUR, (1,)), (PART, (1,)), ("attribute - state", (4,)),
    (WHOLE, ()), (SPATIAL, (1, 6)), ("global -", ()),
)  # fmt: skip
CUP = graph(
    "12", (WHOLE, ()), (SIZE, (1,)), ("attribute - texture", (1,)), (SPATIAL, (1, 5)), (WHOLE, ()), (SIZE, (5,)),
    (COLOUR, (6,)),
)  # fmt: skip
SIGN = graph("drawtext3", (WHOLE, ()), ("other - text", (1,)), ("global", ()))
GRAPHS = [BOATS, SIGN, CUP]  # the order that the script came on the pictures in
SAID = [
    ["yyyyynyy", "ynnyyyyn", "nyyyyyyy", "yynnyyyy"],
    ["yyn", "nyy", "yny", "yyy"],
    ["yyynnyy", "nyyyyyy", "yynyyny", "yyyyyyn"],
]
PRINTED = {
    1: (
        61.5079365079365,
        [0.75, 0.6666666666666666, 0.42857142857142855],
        {"global": 50.0, "attribute": 100.0, "entity": 66.66666666666666, "other": 100.0, "relation": 50.0},
        {
            COLOUR: 100.0, SIZE: 100.0, "attribute - state": 100.0, "attribute - texture": 100.0, PART: 100.0,
            WHOLE: 60.0, "global": 0.0, "global -": 100.0, COUNT: 100.0, "other - text": 100.0, SPATIAL: 50.0,
        },
    ),
    2: (
        53.86904761904761,
        [0.6875, 0.5, 0.42857142857142855],
        {"global": 50.0, "attribute": 83.33333333333334, "entity": 66.66666666666666, "other": 50.0, "relation": 100.0},
        {
            COLOUR: 50.0, SIZE: 100.0, "attribute - state": 100.0, "attribute - texture": 100.0, PART: 100.0,
            WHOLE: 60.0, "global": 100.0, "global -": 0.0, COUNT: 0.0, "other - text": 100.0, SPATIAL: 100.0,
        },
    ),
    4: (
        60.019841269841265,
        [0.5625, 0.6666666666666666, 0.5714285714285714],
        {"global": 100.0, "attribute": 66.66666666666666, "entity": 83.33333333333334, "other": 100.0, "relation": 100},
        {
            COLOUR: 0.0, SIZE: 100.0, "attribute - state": 100.0, "attribute - texture": 100.0, PART: 0.0,
            WHOLE: 100.0, "global": 100.0, "global -": 100.0, COUNT: 100.0, "other - text": 100.0, SPATIAL: 100.0,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("drawings", PRINTED)
def test_the_figures_are_those_that_the_script_prints(drawings):
    said = [[[letter == "y" for letter in one] for one in each[:drawings]] for each in SAID]
    score, each, level1, level2 = PRINTED[drawings]
    found = dpg(GRAPHS, said)
    assert found.score * 100 == score
    assert pictures(GRAPHS, said) == each
    assert {name: share * 100 for name, share in found.level1.items()} == level1
    assert {name: share * 100 for name, share in found.level2.items()} == level2


@given(graphs(), st.data())
def test_told_in_order_a_question_counts_if_all_before_it_do(asked, data):
    """Of questions behind those they depend on: a yes, and a yes to everything it rests on, however far back."""
    asked = sorted(asked, key=lambda one: one.id)  # each depends on smaller ids alone
    yes = data.draw(st.lists(st.booleans(), min_size=len(asked), max_size=len(asked)))

    def holds(number):
        return yes[number - 1] and all(holds(on) for on in asked[number - 1].depends)

    assert counts(Graph("a", "a", tuple(asked)), yes) == [holds(one.id) for one in asked]


def test_what_comes_before_its_condition_sees_its_plain_answer():
    """The script looks up dependencies row by row: what lost its yes further down has not lost it yet."""
    later = Graph("a", "a", (Question(1, WHOLE, "?", (2,)), Question(2, WHOLE, "?", (3,)), Question(3, WHOLE, "?")))
    assert counts(later, [True, True, False]) == [True, False, False]


def test_answers_are_those_of_every_question_and_prompt():
    with pytest.raises(DataError, match="2 answers to the 3 questions of 'drawtext3'"):
        dpg([SIGN], [[[True, False]]])
    with pytest.raises(DataError, match="answers about 1 prompts for 2 graphs"):
        dpg([SIGN, CUP], [[[True] * 3]])
    with pytest.raises(DataError, match="no drawing of 'drawtext3'"):
        dpg([SIGN], [[]])
    with pytest.raises(DataError, match="nothing to score"):
        dpg([], [])
