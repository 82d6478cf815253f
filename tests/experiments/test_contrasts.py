"""Contrasts between runs: planted exponents and gains are recovered with covering intervals."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.token_scaling.contrasts import (
    Contrast,
    QuestionHits,
    ScorePoint,
    compare_exponents,
    compare_exponents_by_question,
    compute_gain,
    fit_mean_law,
    get_raw_score,
    group_curves,
    mean_scores,
    summarize_scores,
)
from vitrail.errors import ConfigError
from vitrail.lab.scaling_law import fit_law
from vitrail.lab.student_t import student_t_quantile

TOKENS, SEEDS = (1, 8, 16, 32, 64, 128), (0, 1, 2)


def runs(method: str, kind: str, c: float, alpha: float, noise: float = 0.0, seed: int = 0, blind: float = 0.0):
    rng = np.random.default_rng(seed)
    found = []
    for s in SEEDS:
        for n in TOKENS:
            above = c * n**-alpha * float(np.exp(noise * rng.normal()))
            value = blind + (1 - blind) * above
            found.append(ScorePoint(method=method, tokens=n, seed=s, kind=kind, value=value, count=1000, blind=blind))
    return found


@settings(max_examples=30)
@given(st.floats(-0.2, 0.1), st.floats(-0.2, 0.1), st.integers(0, 9))
def test_ratio_has_the_difference_of_exponents(a, b, seed):
    points = runs("told", "reading", 0.1, a, 0.1, seed) + runs("told", "existence", 0.2, b, 0.1, seed + 1)
    ours, theirs = (fit_law(*mean_scores(points, "told", kind)).alpha for kind in ("reading", "existence"))
    found = compare_exponents(points, "told", "reading", "existence")
    assert found.value == pytest.approx(ours - theirs, abs=1e-12) and found.low < found.value < found.high
    assert (found.count, found.over) == (6, "numbers of tokens")


def test_intervals_cover_the_true_value():
    inside = 0
    for seed in range(60):
        points = runs("told", "reading", 0.1, -0.2, 0.1, seed) + runs("told", "existence", 0.5, -0.05, 0.1, 999 - seed)
        found = compare_exponents(points, "told", "reading", "existence")
        inside += found.low < -0.15 < found.high
    assert 52 <= inside < 60


def test_effects_common_to_all_seeds_count_once():
    """Identical seeds add no information: six numbers of tokens leave four degrees of freedom."""
    rng = np.random.default_rng(0)
    off = {n: float(np.exp(0.1 * rng.normal())) for n in TOKENS}
    points = [p.replace(value=p.value * off[p.tokens]) for p in runs("told", "reading", 0.1, -0.2)]
    alone = [p for p in points if p.seed == 0]
    three, one = fit_mean_law(points, "told", "reading"), fit_mean_law(alone, "told", "reading")
    assert three.intervals["alpha"] == pytest.approx(one.intervals["alpha"]) and three.dof == len(TOKENS) - 2
    points += runs("told", "existence", 0.3, 0.0)
    alone += [p for p in points if p.kind == "existence" and p.seed == 0]
    three, one = (compare_exponents(some, "told", "reading", "existence") for some in (points, alone))
    assert (three.low, three.high) == pytest.approx((one.low, one.high))


def test_chance_level_has_no_effect():
    """Two kinds with equal growth above chance differ in raw scores only."""
    points = runs("told", "reading", 0.1, -0.2, 0.01, 0, blind=0.01)
    points += runs("told", "existence", 0.1, -0.2, 0.01, 1, blind=0.5)
    raw = compare_exponents(points, "told", "reading", "existence", get_raw_score).replace(declared=True)
    assert raw.sign == "below 0" and raw.value < -0.1
    above = compare_exponents(points, "told", "reading", "existence").replace(declared=True)
    assert abs(above.value) < 0.01 and above.low < 0 < above.high


def test_scores_at_chance_are_skipped():
    points = runs("told", "reading", 0.1, -0.2, blind=0.1) + runs("told", "existence", 0.1, -0.1, blind=0.5)
    low = [p.replace(value=0.45) if (p.tokens, p.seed, p.kind) == (1, 2, "existence") else p for p in points]
    assert compare_exponents(low, "told", "reading", "existence").count == 5
    assert compare_exponents(low, "told", "reading", "existence").value == pytest.approx(-0.1)
    blind = [p.replace(value=0.5) if p.kind == "existence" and p.tokens < 64 else p for p in points]
    assert compare_exponents(blind, "told", "reading", "existence") is None


def test_only_declared_contrasts_have_a_verdict():
    points = runs("told", "reading", 0.1, -0.2, 0.01) + runs("told", "existence", 0.5, -0.05, 0.01, 1)
    found = compare_exponents(points, "told", "reading", "existence")
    assert found.sign == "" and str(found).endswith("of 6 numbers of tokens")
    assert found.replace(declared=True).sign == "below 0"
    assert compare_exponents(points, "told", "existence", "reading").replace(declared=True).sign == "above 0"
    assert Contrast.from_values([-1.0, 1.0, 0.1], "seeds").replace(declared=True).sign == "not different from 0"
    sure = Contrast.from_values([0.1, 0.1], "seeds").replace(declared=True)
    assert str(sure) == "+0.1000 [+0.1000, +0.1000] of 2 seeds: above 0"


def test_gains_are_paired_by_run():
    """Effects of seed or tokens on both methods cancel."""
    points = runs("told", "colour", 0.4, -0.1, 0.1) + runs("told", "naming", 0.2, -0.1, 0.1, 5)
    for point in list(points):
        more = 0.1 if point.kind == "colour" else 0.0
        points.append(point.replace(method="alone", value=point.value - more))
    assert compute_gain(points, "told", "alone", ["colour"]).value == pytest.approx(0.1)
    assert compute_gain(points, "told", "alone", ["colour"]).low == pytest.approx(0.1)
    assert compute_gain(points, "told", "alone", ["naming"]).value == 0
    apart = compute_gain(points, "told", "alone", ["colour"], ["naming"])
    assert (apart.value, apart.count, apart.over) == (pytest.approx(0.1), 3, "seeds")
    both = compute_gain(points, "told", "alone", ["colour", "naming"])
    assert both.value == pytest.approx(0.05)


def test_gain_intervals_are_over_seeds():
    gains = {0: 0.10, 1: 0.12, 2: 0.17}
    points = runs("alone", "colour", 0.3, -0.1)
    result = [p.replace(method="told", value=p.value + gains[p.seed]) for p in points]
    found = compute_gain(points + result, "told", "alone", ["colour"])
    half = student_t_quantile(0.975, 2) * float(np.std(list(gains.values()), ddof=1)) / math.sqrt(3)
    assert (found.value, found.high - found.value) == (pytest.approx(0.13), pytest.approx(half))
    lacks = [
        p for p in result if (p.tokens, p.seed) != (1, 0)
    ]  # one token is missing for one seed, so it is skipped for all
    far = [p.replace(value=1.0) if p.tokens == 1 else p for p in lacks]
    assert compute_gain(points + far, "told", "alone", ["colour"]).value == pytest.approx(0.13)


def test_zero_scores_have_no_law():
    points = [point.replace(value=0.0) if point.tokens == 1 else point for point in runs("told", "reading", 0.1, -0.1)]
    assert mean_scores(points, "told", "reading").n == (8, 16, 32, 64, 128)
    assert fit_mean_law(points, "told", "reading").alpha == pytest.approx(-0.1)
    once = [p.replace(value=0.0) if (p.tokens, p.seed) == (1, 0) else p for p in runs("told", "reading", 0.1, -0.1)]
    assert mean_scores(once, "told", "reading").n == (8, 16, 32, 64, 128)  # no selection of lucky seeds
    assert fit_mean_law([p.replace(value=0.0) if p.tokens < 64 else p for p in points], "told", "reading") is None


def test_too_little_data_gives_none():
    points = [point for point in runs("told", "reading", 0.1, -0.1) if point.tokens < 16]
    assert (
        fit_mean_law(points, "told", "reading") is None
        and compare_exponents(points, "told", "reading", "reading") is None
    )
    assert compute_gain(points, "told", "alone", ["reading"]) is None
    once = [p for p in runs("told", "a", 0.1, -0.1) + runs("alone", "a", 0.1, -0.1) if p.seed == 0]
    assert compute_gain(once, "told", "alone", ["a"]) is None  # one seed has no interval


@pytest.mark.parametrize("wrong", [{"value": math.nan}, {"value": 1.5}, {"count": 0}, {"blind": 1.0}, {"tokens": 0}])
def test_invalid_scores_raise(wrong):
    with pytest.raises(ConfigError, match="scores are in 0…1"):
        runs("told", "reading", 0.1, -0.1)[0].replace(**wrong)
    with pytest.raises(ConfigError, match="finite"):
        Contrast(value=0.0, low=math.nan, high=1.0, count=3, over="seeds")


def test_summaries_are_means_over_seeds():
    points = runs("told", "reading", 0.1, -0.2, 0.1) + runs("alone", "colour", 0.3, -0.1)[:2]
    reading, colour = summarize_scores(points)
    assert reading.means[8] == pytest.approx(np.mean([p.value for p in points if p.tokens == 8 and p.method == "told"]))
    assert reading.alpha_text.startswith(f"{reading.law.alpha:+.4f} [") and colour.alpha_text == "–"
    assert group_curves([reading, colour])["colour"] == {"alone": list(colour.means.items())}


# ---- by questions -----------------------------------------------------------------------------------------------


def drawn(rng: np.random.Generator, alpha: float, blind: float, questions: int) -> QuestionHits:
    """Sample questions of fixed difficulty, so that scores over tokens are correlated."""
    hard = rng.random(questions)
    tokens = (8, 16, 32, 64, 128)
    return QuestionHits({n: (hard < blind + (1 - blind) * 0.2 * (n / 8) ** -alpha).tolist() for n in tokens}, blind)


def test_question_interval_covers_resampled_questions():
    rng, found = np.random.default_rng(0), []
    for _ in range(300):
        one = compare_exponents_by_question(drawn(rng, -0.5, 0.0, 300), drawn(rng, -0.3, 0.4, 300))
        assert one is not None and one.over.startswith("questions")
        found.append((one.value, (one.high - one.low) / (2 * 1.959964)))
    values, widths = np.array(found).T
    assert values.mean() == pytest.approx(-0.2, abs=0.02)
    assert np.median(widths) == pytest.approx(values.std(), rel=0.15)


def test_exponents_by_question_match_the_law():
    rng = np.random.default_rng(1)
    ours, theirs = drawn(rng, -0.5, 0.0, 500), drawn(rng, -0.3, 0.0, 500)
    laws = [fit_law(list(one.hits), [sum(hits) / 500 for hits in one.hits.values()]) for one in (ours, theirs)]
    found = compare_exponents_by_question(ours, theirs)
    assert found.value == pytest.approx(laws[0].alpha - laws[1].alpha) and found.count == 1000


def test_kinds_at_chance_give_none():
    asked = QuestionHits({4: [True] * 55 + [False] * 45, **{n: [True] * 80 + [False] * 20 for n in (8, 16, 32)}}, 0.5)
    assert not asked.is_above_chance(4) and asked.is_above_chance(8)
    assert compare_exponents_by_question(asked, asked).over == "questions, 8, 16, 32 tokens"
    assert compare_exponents_by_question(asked, QuestionHits({n: asked.hits[n] for n in (4, 8, 16)}, 0.5)) is None
