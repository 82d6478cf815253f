"""Short answers: VQA's rules as its script has them, and the others by worked example."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import DataError
from vitrail.evals.metrics.answers import anls, edits, exact, holds, normal, relaxed, soft, verbatim


@pytest.mark.parametrize(
    ("said", "told"),
    [  # what VQA's vqaEval.py gives
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
def test_normal_as_the_script(said, told):
    assert normal(said) == told


@pytest.mark.parametrize(
    ("said", "people", "value"),
    [  # what VQA's vqaEval.py gives
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
def test_soft_as_the_script(said, people, value):
    truths = [word for word, count in people.items() for _ in range(count)]
    assert soft(said, truths, as_script=True) == pytest.approx(value)
    if said != "Yes" or len(people) > 1:  # which the script alone takes for wrong
        assert soft(said, truths) == pytest.approx(value)


def test_soft_is_the_mean_over_those_left_out():
    truths = ["a", "b", "b", "c", "c", "c", "d", "d", "d", "d"]
    for said in "bcd":  # a is an article, and so is nothing
        left = [min(sum(t == said for t in truths[:i] + truths[i + 1 :]) / 3, 1) for i in range(10)]
        assert soft(said, truths) == pytest.approx(sum(left) / 10)
    assert soft("Yes.", ["yes"] * 10) == 1
    with pytest.raises(DataError, match="1 people's answers"):
        soft("yes", ["yes"])


def test_anls():
    assert anls("Hello  World", ["hello world"]) == 1
    assert anls("helo", ["hello", "unlike"]) == pytest.approx(0.8)  # one edit of five, the nearest truth
    assert anls("abcd", ["abxy"]) == 0  # two of four: from half on it is nothing
    assert anls("", ["x"]) == 0 and anls("", [""]) == 1


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_edits(a, b):
    def plain(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(plain(a[1:], b) + 1, plain(a, b[1:]) + 1, plain(a[1:], b[1:]) + (a[0] != b[0]))

    assert edits(a, b) == plain(a, b)


@pytest.mark.parametrize(
    ("said", "truth", "right"),
    [
        ("105", "100", 1), ("105.1", "100", 0), ("95", "100", 1), ("-3", "3", 0), ("5%", "0.05", 1), ("5", "5%", 0),
        ("0", "0", 1), ("0.0", "0", 0), ("Blue", "blue", 1), ("blue", "navy", 0), ("1,000", "1000", 0),
        ("2015", "1999", 1),
    ],
)  # fmt: skip
def test_relaxed(said, truth, right):
    assert relaxed(said, [truth]) == right


def test_exact_and_holds():
    assert exact("Yes.", ["yes"]) == 1 and exact("yes it is", ["yes"]) == 0 and exact(" no", ["yes", "No"]) == 1
    assert holds("The sign says: Centre", ["CENTRE"]) == 1 and holds("cent", ["centre"]) == 0
    assert holds("y = x^2", ["x ^ 2"]) == 0 and holds("y = x^2", ["x ^ 2"], formula=True) == 1
    assert holds("X^2", ["x ^ 2"], formula=True) == 0


@pytest.mark.parametrize(
    ("said", "truths", "value"),
    [  # what process_line(…, method="accuracy") of VLMEvalKit gives, and hit_calculate its maximum of
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
def test_verbatim_as_vlmevalkit(said, truths, value):
    assert verbatim(said, truths) == value
    assert exact(said, truths) >= value  # which leaves a full stop out
