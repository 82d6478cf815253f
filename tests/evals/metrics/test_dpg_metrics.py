"""DPG-Bench's scores, compared with the benchmark's script.

The script (TencentQQGYLab/ELLA, dpg_bench/compute_dpg_bench.py) was run on the table below, with these answers
instead of mPLUG's about a grid of 2 × 2 images, with --pic-num 1, 2 and 4. The script skips the first row of a table,
so a dummy row preceded these.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.test_question_graphs import graphs
from vitrail.data.question_graphs import GraphQuestion, QuestionGraph
from vitrail.errors import DataError
from vitrail.evals.metrics.dpg_metrics import compute_dpg_score, count_satisfied, score_prompts

WHOLE, PART, COLOUR, SIZE = "entity - whole", "entity - part", "attribute - color", "attribute - size"
SPATIAL, COUNT = "relation - spatial", "other - count"


def graph(name, *rows):
    return QuestionGraph(
        name, name, tuple(GraphQuestion(n, category, "?", on) for n, (category, on) in enumerate(rows, 1))
    )


BOATS = graph(
    "partiprompts7", (WHOLE, ()), (COUNT, (1,)), (COLOUR, (1,)), (PART, (1,)), ("attribute - state", (4,)),
    (WHOLE, ()), (SPATIAL, (1, 6)), ("global -", ()),
)  # fmt: skip
CUP = graph(
    "12", (WHOLE, ()), (SIZE, (1,)), ("attribute - texture", (1,)), (SPATIAL, (1, 5)), (WHOLE, ()), (SIZE, (5,)),
    (COLOUR, (6,)),
)  # fmt: skip
SIGN = graph("drawtext3", (WHOLE, ()), ("other - text", (1,)), ("global", ()))
GRAPHS = [BOATS, SIGN, CUP]  # order of images in the script
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
def test_scores_match_the_script(drawings):
    output = [[[letter == "y" for letter in one] for one in each[:drawings]] for each in SAID]
    score, each, level1, level2 = PRINTED[drawings]
    found = compute_dpg_score(GRAPHS, output)
    assert found.score * 100 == score
    assert score_prompts(GRAPHS, output) == each
    assert {name: share * 100 for name, share in found.level1.items()} == level1
    assert {name: share * 100 for name, share in found.level2.items()} == level2


@given(graphs(), st.data())
def test_dependencies_in_order(asked, data):
    """Questions after their dependencies count if they and all transitive dependencies are answered yes."""
    asked = sorted(asked, key=lambda one: one.id)  # dependencies have smaller ids
    yes = data.draw(st.lists(st.booleans(), min_size=len(asked), max_size=len(asked)))

    def holds(number):
        return yes[number - 1] and all(holds(on) for on in asked[number - 1].dependencies)

    assert count_satisfied(QuestionGraph("a", "a", tuple(asked)), yes) == [holds(one.id) for one in asked]


def test_dependencies_out_of_order():
    """The script resolves dependencies row by row: rows further down still have their plain answer."""
    later = QuestionGraph(
        "a", "a", (GraphQuestion(1, WHOLE, "?", (2,)), GraphQuestion(2, WHOLE, "?", (3,)), GraphQuestion(3, WHOLE, "?"))
    )
    assert count_satisfied(later, [True, True, False]) == [True, False, False]


def test_missing_answers_raise():
    with pytest.raises(DataError, match="2 answers to the 3 questions of 'drawtext3'"):
        compute_dpg_score([SIGN], [[[True, False]]])
    with pytest.raises(DataError, match="answers for 1 prompts but 2 graphs"):
        compute_dpg_score([SIGN, CUP], [[[True] * 3]])
    with pytest.raises(DataError, match="'drawtext3' has no image"):
        compute_dpg_score([SIGN], [[]])
    with pytest.raises(DataError, match="no prompts to score"):
        compute_dpg_score([], [])
