"""MMMU's metric of open answers on worked examples."""

import pytest

from vitrail.evals.metrics.open_answer_metrics import open_answer_accuracy


@pytest.mark.parametrize(
    ("output", "truths", "right"),
    [
        ("5.75", ["5.75"], 1), ("5.754", ["5.75"], 1), ("5.76", ["5.75"], 0), ("1,234", ["1234"], 1),
        ("The result is 4e3", ["4000"], 1), ("x = 12", ["12"], 1), ("12 or so = 13", ["12"], 0),
        ("It is 3, so the answer is 4", ["3"], 0),  # only the shortest tail counts
        ("First it is 3\nThen it is 4", ["3"], 1),  # one tail per line
        ("so = 12\nand nothing else", ["= 12"], 1), ("Dark Blue.", ["blue"], 1), ("blue", ["dark blue"], 0),
        ("a", ["a"], 1), ("I say a b", ["a"], 1), ("banana", ["a"], 0), ("", ["a"], 0), ("5", ["five", "5.0"], 1),
        ("-3", ["3"], 0), ("nan", ["5"], 0),
    ],
)  # fmt: skip
def test_open_answers(output, truths, right):
    assert open_answer_accuracy(output, truths) == right
