"""Short-answer metrics, compared with the VQA script and with worked examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import DataError
from vitrail.evals.metrics.short_answer_metrics import (
    anls,
    contains_answer,
    edit_distance,
    exact_match,
    exact_match_with_punctuation,
    normalize_vqa_answer,
    relaxed_accuracy,
    vqa_accuracy,
)


@pytest.mark.parametrize(
    ("output", "result"),
    [  # values of VQA's vqaEval.py
        ("The dog.", "dog"),
        ("Two", "2"),
        ("none", "0"),
        ("1,000", "1000"),
        ("1,000 (about)", "1000 about"),
        ("3.5", "3.5"),
        ("5.", "5"),
        ("U.S.", "us"),
        ("x-ray", "x ray"),
        ("left - right", "left right"),
        ("dont know", "don't know"),
        ("couldnt've", "couldn't've"),
        ("it's a cat", "it's cat"),
        ("yes, sir!", "yes sir"),
        ("A/B", "b"),
        ("\tten\nthe  men", "10 men"),
        ("somebody'd", "somebodyd"),
        ("Im here", "im here"),
        ('what\'s "up"?', "what's up"),
        ("10:30", "10:30"),
        ("re-do, now", "re do now"),
        ("ice-cream / cake", "ice cream cake"),
        ("@home", "home"),
    ],
)
def test_normalization_matches_the_vqa_script(output, result):
    assert normalize_vqa_answer(output) == result


@pytest.mark.parametrize(
    ("output", "people", "value"),
    [  # values of VQA's vqaEval.py
        ("yes", {"yes": 10}, 1.0),
        ("Yes", {"yes": 10}, 0.0),
        ("Yes", {"yes": 9, "no": 1}, 1.0),
        ("two", {"2": 3, "3": 7}, 0.9),
        ("2", {"two": 2, "3": 8}, 0.6),
        ("2", {"2": 1, "3": 9}, 0.3),
        ("2", {"2": 4, "3": 6}, 1.0),
        ("a dog", {"dog": 3, "the dog": 2, "cat": 5}, 1.0),
        ("cat", {"dog": 10}, 0.0),
    ],
)
def test_vqa_accuracy_matches_the_script(output, people, value):
    truths = [word for word, count in people.items() for _ in range(count)]
    assert vqa_accuracy(output, truths, as_script=True) == pytest.approx(value)
    if output != "Yes" or len(people) > 1:  # wrong only in the script
        assert vqa_accuracy(output, truths) == pytest.approx(value)


def test_vqa_accuracy_is_a_leave_one_out_mean():
    truths = ["a", "b", "b", "c", "c", "c", "d", "d", "d", "d"]
    for output in "bcd":  # a is an article and is removed
        left = [min(sum(t == output for t in truths[:i] + truths[i + 1 :]) / 3, 1) for i in range(10)]
        assert vqa_accuracy(output, truths) == pytest.approx(sum(left) / 10)
    assert vqa_accuracy("Yes.", ["yes"] * 10) == 1
    with pytest.raises(DataError, match="1 reference answers"):
        vqa_accuracy("yes", ["yes"])


def test_anls():
    assert anls("Hello  World", ["hello world"]) == 1
    assert anls("helo", ["hello", "unlike"]) == pytest.approx(0.8)  # one edit of five characters, nearest reference
    assert anls("abcd", ["abxy"]) == 0  # two of four: 0 from one half on
    assert anls("", ["x"]) == 0 and anls("", [""]) == 1


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_edits(a, b):
    def plain(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(plain(a[1:], b) + 1, plain(a, b[1:]) + 1, plain(a[1:], b[1:]) + (a[0] != b[0]))

    assert edit_distance(a, b) == plain(a, b)


@pytest.mark.parametrize(
    ("output", "truth", "right"),
    [
        ("105", "100", 1), ("105.1", "100", 0), ("95", "100", 1), ("-3", "3", 0), ("5%", "0.05", 1), ("5", "5%", 0),
        ("0", "0", 1), ("0.0", "0", 0), ("Blue", "blue", 1), ("blue", "navy", 0), ("1,000", "1000", 0),
        ("2015", "1999", 1),
    ],
)  # fmt: skip
def test_relaxed_accuracy(output, truth, right):
    assert relaxed_accuracy(output, [truth]) == right


def test_exact_match_and_containment():
    assert (
        exact_match("Yes.", ["yes"]) == 1
        and exact_match("yes it is", ["yes"]) == 0
        and exact_match(" no", ["yes", "No"]) == 1
    )
    assert contains_answer("The sign says: Centre", ["CENTRE"]) == 1 and contains_answer("cent", ["centre"]) == 0
    assert contains_answer("y = x^2", ["x ^ 2"]) == 0 and contains_answer("y = x^2", ["x ^ 2"], formula=True) == 1
    assert contains_answer("X^2", ["x ^ 2"], formula=True) == 0


@pytest.mark.parametrize(
    ("output", "truths", "value"),
    [  # values of process_line(…, method="accuracy") of VLMEvalKit; hit_calculate takes their maximum
        ("Sandra Boynton", ["Sandra Boynton"], 1.0),
        (" sandra boynton\n", ["Sandra Boynton "], 1.0),
        ("Sandra Boynton.", ["Sandra Boynton"], 0.0),
        ("by Sandra Boynton", ["Sandra Boynton"], 0.0),
        ("no", ["No"], 1.0),
        ("2016", ["2016", "the year 2016"], 1.0),
        ("two", ["2"], 0.0),
        ("", ["No"], 0.0),
    ],
)
def test_match_with_punctuation_as_in_vlmevalkit(output, truths, value):
    assert exact_match_with_punctuation(output, truths) == value
    assert exact_match(output, truths) >= value  # ignores a full stop
