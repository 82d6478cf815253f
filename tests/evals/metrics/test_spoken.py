import pytest

from vitrail.evals.metrics.spoken import spoken


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("B", "B"), (" 3 < 4 ", "3 < 4"), ("<think>A, or C?</think>B", "B"), ("<THINK>A\nB</THINK>\n\nC", "C"),
        ("<think>so A", ""), ("<think>A</think><answer> B </answer>", "B"),
        ("<answer>A</answer><answer>B</answer>", "B"),
        ("<answer>C", "C"), ("", ""), ("<think>A</think>", ""),
    ],
)  # fmt: skip
def test_thoughts_are_no_answers(text, said):
    assert spoken(text) == said
