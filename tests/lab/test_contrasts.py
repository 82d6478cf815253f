"""What runs say together: exponents and gains that were put in come out, with intervals that hold them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import DataError
from vitrail.lab.contrasts import Contrast, Point, column, gain, law, steeper
from vitrail.lab.scaling import fit

TOKENS, SEEDS = (1, 8, 16, 32, 64, 128), (0, 1, 2)


def runs(way: str, kind: str, c: float, alpha: float, noise: float = 0.0, seed: int = 0) -> list[Point]:
    rng = np.random.default_rng(seed)
    return [
        Point(way=way, tokens=n, seed=s, kind=kind, value=c * n**-alpha * float(np.exp(noise * rng.normal())), of=1000)
        for s in SEEDS
        for n in TOKENS
    ]


@settings(deadline=None, max_examples=30)
@given(st.floats(-0.2, 0.1), st.floats(-0.2, 0.1), st.integers(0, 9))
def test_a_ratio_has_the_difference_of_exponents(a, b, seed):
    points = runs("told", "reading", 0.1, a, 0.1, seed) + runs("told", "existence", 0.5, b, 0.1, seed + 1)
    ours, theirs = (fit(*column(points, "told", kind)).alpha for kind in ("reading", "existence"))
    found = steeper(points, "told", "reading", "existence")
    assert found.value == pytest.approx(ours - theirs, abs=1e-12) and found.low < found.value < found.high
    assert found.of == 18


def test_intervals_hold_what_was_put_in():
    inside = 0
    for seed in range(60):
        points = runs("told", "reading", 0.1, -0.2, 0.1, seed) + runs("told", "existence", 0.5, -0.05, 0.1, 999 - seed)
        found = steeper(points, "told", "reading", "existence")
        inside += found.low < -0.15 < found.high
    assert 52 <= inside < 60


def test_signs():
    points = runs("told", "reading", 0.1, -0.2, 0.01) + runs("told", "existence", 0.5, -0.05, 0.01, 1)
    assert steeper(points, "told", "reading", "existence").sign == "below 0"
    assert steeper(points, "told", "existence", "reading").sign == "above 0"
    assert Contrast.mean([-1.0, 1.0, 0.1]).sign == "not told from 0"
    assert str(Contrast.mean([0.1, 0.1])) == "+0.1000 [+0.1000, +0.1000] of 2: above 0"


def test_gains_are_of_the_same_runs():
    """What a run's seed or tokens add to both ways drops out."""
    points = runs("told", "colour", 0.4, -0.1, 0.2) + runs("told", "naming", 0.2, -0.1, 0.2, 5)
    for point in list(points):
        more = 0.1 if point.kind == "colour" else 0.0
        points.append(point.with_(way="alone", value=point.value - more))
    assert gain(points, "told", "alone", ["colour"]).value == pytest.approx(0.1)
    assert gain(points, "told", "alone", ["colour"]).low == pytest.approx(0.1)
    assert gain(points, "told", "alone", ["naming"]).sign == "not told from 0"
    apart = gain(points, "told", "alone", ["colour"], ["naming"])
    assert (apart.value, apart.of) == (pytest.approx(0.1), 18)
    both = gain(points, "told", "alone", ["colour", "naming"])
    assert both.value == pytest.approx(0.05)
    assert gain(points[1:], "told", "alone", ["colour"]).of == 17  # a run without its other half is left out


def test_none_right_is_half_a_hit():
    points = [point.with_(value=0.0) if point.tokens == 1 else point for point in runs("told", "reading", 0.1, -0.1)]
    assert column(points, "told", "reading").s[0] == 0.5 / 1000 and law(points, "told", "reading") is not None


def test_too_little_is_said():
    points = [point for point in runs("told", "reading", 0.1, -0.1) if point.tokens < 16]
    assert law(points, "told", "reading") is None
    with pytest.raises(DataError, match="three numbers of tokens"):
        steeper(points, "told", "reading", "reading")
    with pytest.raises(DataError, match="0 runs in common"):
        gain(points, "told", "alone", ["reading"])
