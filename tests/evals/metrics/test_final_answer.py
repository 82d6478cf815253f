import pytest

from vitrail.evals.metrics.final_answer import extract_final_answer


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("B", "B"), (" 3 < 4 ", "3 < 4"), ("<think>A, or C?</think>B", "B"), ("<THINK>A\nB</THINK>\n\nC", "C"),
        ("<think>so A", ""), ("<think>A</think><answer> B </answer>", "B"),
        ("<answer>A</answer><answer>B</answer>", "B"),
        ("<think>put it in <answer> tags. A or C?</think>The answer is B", "The answer is B"),
        ("<think>maybe <answer>A</answer>, no</think>B", "B"), ("So it is A… no.</think>\n\nB", "B"),
        ("<think>A</think>B<think>C</think>D", "D"), ("B <think>or C", "B"),
        ("<answer>C", "C"), ("", ""), ("<think>A</think>", ""),
    ],
)  # fmt: skip
def test_reasoning_is_removed(text, output):
    assert extract_final_answer(text) == output
