"""What runs say together: exponents and gains that were put in come out, with intervals that hold them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError
from vitrail.lab.contrasts import (
    Asked,
    Contrast,
    Point,
    as_scored,
    column,
    gain,
    law,
    lines,
    panels,
    steeper,
    steeper_by_questions,
)
from vitrail.lab.scaling import fit
from vitrail.lab.student import student

TOKENS, SEEDS = (1, 8, 16, 32, 64, 128), (0, 1, 2)


def runs(way: str, kind: str, c: float, alpha: float, noise: float = 0.0, seed: int = 0, blind: float = 0.0):
    rng = np.random.default_rng(seed)
    found = []
    for s in SEEDS:
        for n in TOKENS:
            above = c * n**-alpha * float(np.exp(noise * rng.normal()))
            value = blind + (1 - blind) * above
            found.append(Point(way=way, tokens=n, seed=s, kind=kind, value=value, of=1000, blind=blind))
    return found


@settings(max_examples=30)
@given(st.floats(-0.2, 0.1), st.floats(-0.2, 0.1), st.integers(0, 9))
def test_a_ratio_has_the_difference_of_exponents(a, b, seed):
    points = runs("told", "reading", 0.1, a, 0.1, seed) + runs("told", "existence", 0.2, b, 0.1, seed + 1)
    ours, theirs = (fit(*column(points, "told", kind)).alpha for kind in ("reading", "existence"))
    found = steeper(points, "told", "reading", "existence")
    assert found.value == pytest.approx(ours - theirs, abs=1e-12) and found.low < found.value < found.high
    assert (found.of, found.over) == (6, "numbers of tokens")


def test_intervals_hold_what_was_put_in():
    inside = 0
    for seed in range(60):
        points = runs("told", "reading", 0.1, -0.2, 0.1, seed) + runs("told", "existence", 0.5, -0.05, 0.1, 999 - seed)
        found = steeper(points, "told", "reading", "existence")
        inside += found.low < -0.15 < found.high
    assert 52 <= inside < 60


def test_what_all_seeds_do_at_a_number_of_tokens_counts_once():
    """Seeds that repeat one another say no more than one of them: four degrees of freedom of six numbers of tokens."""
    rng = np.random.default_rng(0)
    off = {n: float(np.exp(0.1 * rng.normal())) for n in TOKENS}
    points = [p.with_(value=p.value * off[p.tokens]) for p in runs("told", "reading", 0.1, -0.2)]
    alone = [p for p in points if p.seed == 0]
    three, one = law(points, "told", "reading"), law(alone, "told", "reading")
    assert three.intervals["alpha"] == pytest.approx(one.intervals["alpha"]) and three.dof == len(TOKENS) - 2
    points += runs("told", "existence", 0.3, 0.0)
    alone += [p for p in points if p.kind == "existence" and p.seed == 0]
    three, one = (steeper(some, "told", "reading", "existence") for some in (points, alone))
    assert (three.low, three.high) == pytest.approx((one.low, one.high))


def test_a_floor_that_is_guessed_makes_no_difference():
    """Both grow alike above what is guessed: scores as they are say that one is steeper, and what is above does not."""
    points = runs("told", "reading", 0.1, -0.2, 0.01, 0, blind=0.01)
    points += runs("told", "existence", 0.1, -0.2, 0.01, 1, blind=0.5)
    raw = steeper(points, "told", "reading", "existence", as_scored).with_(declared=True)
    assert raw.sign == "below 0" and raw.value < -0.1
    above = steeper(points, "told", "reading", "existence").with_(declared=True)
    assert abs(above.value) < 0.01 and above.low < 0 < above.high


def test_what_is_no_better_than_a_guess_is_left_out():
    points = runs("told", "reading", 0.1, -0.2, blind=0.1) + runs("told", "existence", 0.1, -0.1, blind=0.5)
    low = [p.with_(value=0.45) if (p.tokens, p.seed, p.kind) == (1, 2, "existence") else p for p in points]
    assert steeper(low, "told", "reading", "existence").of == 5
    assert steeper(low, "told", "reading", "existence").value == pytest.approx(-0.1)
    blind = [p.with_(value=0.5) if p.kind == "existence" and p.tokens < 64 else p for p in points]
    assert steeper(blind, "told", "reading", "existence") is None


def test_verdicts_are_of_what_was_declared_alone():
    points = runs("told", "reading", 0.1, -0.2, 0.01) + runs("told", "existence", 0.5, -0.05, 0.01, 1)
    found = steeper(points, "told", "reading", "existence")
    assert found.sign == "" and str(found).endswith("of 6 numbers of tokens")
    assert found.with_(declared=True).sign == "below 0"
    assert steeper(points, "told", "existence", "reading").with_(declared=True).sign == "above 0"
    assert Contrast.mean([-1.0, 1.0, 0.1], "seeds").with_(declared=True).sign == "not told from 0"
    sure = Contrast.mean([0.1, 0.1], "seeds").with_(declared=True)
    assert str(sure) == "+0.1000 [+0.1000, +0.1000] of 2 seeds: above 0"


def test_gains_are_of_the_same_runs():
    """What a run's seed or tokens add to both ways drops out."""
    points = runs("told", "colour", 0.4, -0.1, 0.1) + runs("told", "naming", 0.2, -0.1, 0.1, 5)
    for point in list(points):
        more = 0.1 if point.kind == "colour" else 0.0
        points.append(point.with_(way="alone", value=point.value - more))
    assert gain(points, "told", "alone", ["colour"]).value == pytest.approx(0.1)
    assert gain(points, "told", "alone", ["colour"]).low == pytest.approx(0.1)
    assert gain(points, "told", "alone", ["naming"]).value == 0
    apart = gain(points, "told", "alone", ["colour"], ["naming"])
    assert (apart.value, apart.of, apart.over) == (pytest.approx(0.1), 3, "seeds")
    both = gain(points, "told", "alone", ["colour", "naming"])
    assert both.value == pytest.approx(0.05)


def test_gains_are_students_over_seeds():
    gains = {0: 0.10, 1: 0.12, 2: 0.17}
    points = runs("alone", "colour", 0.3, -0.1)
    told = [p.with_(way="told", value=p.value + gains[p.seed]) for p in points]
    found = gain(points + told, "told", "alone", ["colour"])
    half = student(0.975, 2) * float(np.std(list(gains.values()), ddof=1)) / math.sqrt(3)
    assert (found.value, found.high - found.value) == (pytest.approx(0.13), pytest.approx(half))
    lacks = [p for p in told if (p.tokens, p.seed) != (1, 0)]  # one token, which a seed lacks, is left out of all
    far = [p.with_(value=1.0) if p.tokens == 1 else p for p in lacks]
    assert gain(points + far, "told", "alone", ["colour"]).value == pytest.approx(0.13)


def test_none_right_makes_no_law():
    points = [point.with_(value=0.0) if point.tokens == 1 else point for point in runs("told", "reading", 0.1, -0.1)]
    assert column(points, "told", "reading").n == (8, 16, 32, 64, 128)
    assert law(points, "told", "reading").alpha == pytest.approx(-0.1)
    once = [p.with_(value=0.0) if (p.tokens, p.seed) == (1, 0) else p for p in runs("told", "reading", 0.1, -0.1)]
    assert column(once, "told", "reading").n == (8, 16, 32, 64, 128)  # no picking of lucky seeds
    assert law([p.with_(value=0.0) if p.tokens < 64 else p for p in points], "told", "reading") is None


def test_too_little_is_none():
    points = [point for point in runs("told", "reading", 0.1, -0.1) if point.tokens < 16]
    assert law(points, "told", "reading") is None and steeper(points, "told", "reading", "reading") is None
    assert gain(points, "told", "alone", ["reading"]) is None
    once = [p for p in runs("told", "a", 0.1, -0.1) + runs("alone", "a", 0.1, -0.1) if p.seed == 0]
    assert gain(once, "told", "alone", ["a"]) is None  # of one seed there is no interval


@pytest.mark.parametrize("wrong", [{"value": math.nan}, {"value": 1.5}, {"of": 0}, {"blind": 1.0}, {"tokens": 0}])
def test_what_is_no_share_is_refused(wrong):
    with pytest.raises(ConfigError, match="a share"):
        runs("told", "reading", 0.1, -0.1)[0].with_(**wrong)
    with pytest.raises(ConfigError, match="finite"):
        Contrast(value=0.0, low=math.nan, high=1.0, of=3, over="seeds")


def test_lines_are_means_over_seeds():
    points = runs("told", "reading", 0.1, -0.2, 0.1) + runs("alone", "colour", 0.3, -0.1)[:2]
    reading, colour = lines(points)
    assert reading.means[8] == pytest.approx(np.mean([p.value for p in points if p.tokens == 8 and p.way == "told"]))
    assert reading.alpha.startswith(f"{reading.law.alpha:+.4f} [") and colour.alpha == "–"
    assert panels([reading, colour])["colour"] == {"alone": list(colour.means.items())}


# ---- by questions -----------------------------------------------------------------------------------------------


def drawn(rng: np.random.Generator, alpha: float, blind: float, questions: int) -> Asked:
    """Questions that are each as hard as they are with any number of tokens, so that scores go together."""
    hard = rng.random(questions)
    tokens = (8, 16, 32, 64, 128)
    return Asked({n: (hard < blind + (1 - blind) * 0.2 * (n / 8) ** -alpha).tolist() for n in tokens}, blind)


def test_other_questions_would_differ_as_the_interval_says():
    rng, found = np.random.default_rng(0), []
    for _ in range(300):
        one = steeper_by_questions(drawn(rng, -0.5, 0.0, 300), drawn(rng, -0.3, 0.4, 300))
        assert one is not None and one.over.startswith("questions")
        found.append((one.value, (one.high - one.low) / (2 * 1.959964)))
    values, widths = np.array(found).T
    assert values.mean() == pytest.approx(-0.2, abs=0.02)
    assert np.median(widths) == pytest.approx(values.std(), rel=0.15)


def test_by_questions_the_exponents_are_those_of_the_law():
    rng = np.random.default_rng(1)
    ours, theirs = drawn(rng, -0.5, 0.0, 500), drawn(rng, -0.3, 0.0, 500)
    laws = [fit(list(one.hits), [sum(hits) / 500 for hits in one.hits.values()]) for one in (ours, theirs)]
    found = steeper_by_questions(ours, theirs)
    assert found.value == pytest.approx(laws[0].alpha - laws[1].alpha) and found.of == 1000


def test_what_is_not_told_from_a_guess_says_nothing():
    asked = Asked({4: [True] * 55 + [False] * 45, **{n: [True] * 80 + [False] * 20 for n in (8, 16, 32)}}, 0.5)
    assert not asked.told(4) and asked.told(8)
    assert steeper_by_questions(asked, asked).over == "questions, 8, 16, 32 tokens"
    assert steeper_by_questions(asked, Asked({n: asked.hits[n] for n in (4, 8, 16)}, 0.5)) is None
