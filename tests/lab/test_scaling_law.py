"""The token-scaling law: figures of the paper, known laws and invalid inputs."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError, DataError
from vitrail.lab.scaling_forms import LAW_FORMS
from vitrail.lab.scaling_law import ScalingLaw, compare_forms, compute_exponent, fit_law, measure_curvature
from vitrail.lab.score_tables import PAPER_TABLES, ScoreColumn, read_score_table
from vitrail.lab.student_t import find_outliers, student_t_quantile, studentize_residuals

N = np.array([1, 8, 16, 32, 64, 128, 256, 384, 512, 768.0])
BOTH = ("paper", "paper-tuned")


def table_1() -> dict[tuple[str, str], tuple[float, float]]:
    """Read (table, task) → printed c and α."""
    lines = Path(__file__).with_name("token-scaling-table-1.csv").read_text().splitlines()
    rows = list(csv.reader(line for line in lines if not line.startswith("#")))[1:]
    return {
        (table, row[0]): (float(row[i]), float(row[i + 1]))
        for row in rows
        for table, i in zip(BOTH, (1, 3), strict=True)
    }


def test_table_1_of_the_paper_is_reproduced():
    result = table_1()
    assert len(result) == 36
    for (table, task), (c, alpha) in result.items():
        law = fit_law(*read_score_table(table)[task])
        assert law.alpha == pytest.approx(alpha, abs=1e-4), (table, task)
        assert law.c == pytest.approx(c, rel=2e-4), (table, task)


@pytest.mark.parametrize(
    ("table", "c", "alpha"), [("paper", 45.496627, -0.011420), ("paper-tuned", 43.495766, -0.002974)]
)
def test_figure_11_is_reproduced(table, c, alpha):
    law = fit_law(*read_score_table(table)["Overall@RealWorldQA"].without((384, 512)))
    assert (law.c, law.alpha) == (pytest.approx(c, rel=1e-5), pytest.approx(alpha, abs=1e-5))


def test_most_columns_bend_down():
    assert sum(measure_curvature(*column) < 0 for table in BOTH for column in read_score_table(table).values()) == 26


def test_outliers_of_realworldqa():
    with_questions, without = (fit_law(*read_score_table(table)["Overall@RealWorldQA"]) for table in BOTH)
    assert with_questions.outliers == (384,)
    assert with_questions.studentised[7] == pytest.approx(-4.5, abs=0.05)
    assert without.outliers == (384, 512)
    assert max(map(abs, without.studentised)) < 3  # they mask each other


def test_named_tables_have_every_cell():
    for name in PAPER_TABLES:
        columns = read_score_table(name)
        assert len(columns) == 18 and all(column.n == tuple(N) for column in columns.values())


def test_intervals_match_the_linear_model():
    stats = pytest.importorskip("scipy.stats")
    n, s = read_score_table("paper")["Overall@MMStar"]
    law, line = fit_law(n, s), stats.linregress(np.log(n), np.log(s))
    half = stats.t.ppf(0.975, 8) * line.stderr
    assert law.intervals["alpha"] == pytest.approx((-line.slope - half, -line.slope + half))
    half = stats.t.ppf(0.975, 8) * line.intercept_stderr
    assert law.intervals["c"] == pytest.approx((math.exp(line.intercept - half), math.exp(line.intercept + half)))


@pytest.mark.parametrize("dof", [1, 2, 7, 40])
@pytest.mark.parametrize("p", [0.025, 0.5, 0.9, 0.9975])
def test_student_t_quantiles_match_scipy(p, dof):
    stats = pytest.importorskip("scipy.stats")
    assert student_t_quantile(p, dof) == pytest.approx(stats.t.ppf(p, dof), rel=1e-9, abs=1e-12)


def test_studentized_residuals_match_refits_without_the_point():
    n, s = map(np.array, read_score_table("paper")["Overall@AI2D TEST"])
    law, others = fit_law(n, s), np.arange(10) != 4
    left = fit_law(n[others], s[others])
    miss = math.log(s[4]) - math.log(left(n[4]))
    x = np.array([1, -math.log(n[4])])
    assert law.studentised[4] == pytest.approx(miss / (left.spread * math.sqrt(1 + x @ np.array(left.inverse) @ x)))


@settings(max_examples=40)
@given(st.floats(0.1, 1000), st.floats(-1, 1), st.integers(3, 12))
def test_power_law_is_recovered(c, alpha, count):
    law = fit_law(N[:count], c * N[:count] ** -alpha)
    assert (law.c, law.alpha) == (pytest.approx(c, rel=1e-8), pytest.approx(alpha, abs=1e-8))
    assert not law.outliers and law.spread < 1e-9


@settings(max_examples=12)
@given(st.floats(20, 100), st.floats(0.1, 0.9), st.floats(0.1, 1.5))
def test_saturating_law_is_recovered_and_selected(limit, share, b):
    law = compare_forms(N, limit * (1 - share * N**-b))[0]
    assert law.form == "saturating"
    assert law.parameters == pytest.approx({"limit": limit, "a": limit * share, "b": b}, rel=1e-3)


@settings(max_examples=12)
@given(st.floats(1, 50), st.floats(0.1, 0.8), st.floats(2, 200))
def test_two_regimes_are_recovered_and_selected(c, beta, balance):
    law = compare_forms(N, c * (N * (N + balance) / (1 + balance)) ** (beta / 2))[0]
    assert law.form == "regimes"
    assert law.parameters == pytest.approx({"c": c, "beta": beta, "balance": balance}, rel=1e-3)
    assert law.exponent(N[1:]) == pytest.approx(compute_exponent(N[1:], beta, balance), rel=1e-4)


@pytest.mark.parametrize("balance", [0.0, 5.0, -0.5, 300.0])
def test_exponent_matches_the_theory(balance):
    n, beta, gap, equal = np.geomspace(1.5, 900, 500), 0.3, 0.01, 1 - 0.01 * (1 + balance)
    alpha = compute_exponent(n, beta, balance)
    upsilon = n * (1 - equal) + (n**2 - n) * gap
    assert (1 - equal) ** (beta / 2) * n**-alpha == pytest.approx(upsilon ** (beta / 2))  # exact
    local = np.gradient(np.log(upsilon ** (beta / 2)), np.log(n))[1:-1]  # α is a secant; this is the slope
    assert local == pytest.approx(beta / 2 * (1 + n / (n + balance))[1:-1], rel=5e-3)
    moves = np.diff(alpha)
    assert (moves < 0).all() if balance > 0 else (np.abs(moves) < 1e-12).all() if balance == 0 else (moves > 0).all()
    assert compute_exponent(np.array([1e300]), beta, balance)[0] == pytest.approx(-beta, abs=2e-3)
    near = -beta / 2 * (2 + balance) / (1 + balance)
    assert compute_exponent(np.array([1 + 1e-7]), beta, balance)[0] == pytest.approx(near, rel=1e-5)


def test_power_law_is_preferred_for_noise():
    noise = np.random.default_rng(3).normal(0, 0.02, (8, 10))
    chosen = [compare_forms(N, 20 * N**0.1 * np.exp(e))[0].form for e in noise]
    assert chosen.count("power") >= 6


def test_prediction_intervals_cover_and_widen_outside():
    noise = np.random.default_rng(0).normal(0, 0.05, (200, 11))
    n = np.append(N, 1536)
    held = 0
    for e in noise:
        s = 20 * n**0.1 * np.exp(e)
        _, low, high = fit_law(n[:10], s[:10]).predict(n[10:])
        held += bool(low[0] <= s[10] <= high[0])
    assert 0.92 < held / 200 < 0.98
    wide = np.log(high / low)[0], np.log(np.divide(*fit_law(n[:10], s[:10]).predict([64.0])[:0:-1]))[0]
    assert wide[0] > wide[1]


@pytest.mark.parametrize("form", LAW_FORMS)
def test_predictions_match_parameters_of_every_form(form):
    n, s = read_score_table("paper")["Final Score@OCRBench"]
    law = fit_law(n, s, form)
    result = law.parameters
    want = {
        "power": lambda x: result["c"] * x ** -result["alpha"],
        "saturating": lambda x: result["limit"] - result["a"] * x ** -result["b"],
        "regimes": lambda x: (
            result["c"] * (x * (x + result["balance"]) / (1 + result["balance"])) ** (result["beta"] / 2)
        ),
    }[form]
    assert law(N) == pytest.approx(want(N))
    assert law.predict(N).value == pytest.approx(want(N))
    assert law.residuals == pytest.approx(np.log(s) - np.log(want(N)), abs=1e-9)
    assert ScalingLaw.from_dict(law.to_dict()) == law


CURVES = {
    "saturating": (lambda n, limit, a, b: np.log(limit - a * n**-b), lambda s: (1.1 * s[-1], 1.1 * s[-1] - s[0], 0.3)),
    "regimes": (
        lambda n, c, beta, balance: np.log(c) + beta / 2 * np.log(n * (n + balance) / (1 + balance)),
        lambda s: (s[0], 0.2, 20),
    ),
}


@pytest.mark.parametrize(
    ("form", "task"),
    [
        ("saturating", "Overall@MME"),
        ("saturating", "Final Score@OCRBench"),
        ("regimes", "Overall@HallusionBench"),
        ("regimes", "Overall@MMStar"),
    ],
)
def test_fits_match_scipy(form, task):
    optimize = pytest.importorskip("scipy.optimize")
    curve, start = CURVES[form]
    n, s = map(np.array, read_score_table("paper")[task])
    with np.errstate(invalid="ignore"):  # scipy tries negative values
        want, spread = optimize.curve_fit(curve, n, np.log(s), start(s), maxfev=20_000)
    law = fit_law(n, s, form)
    assert list(law.parameters.values()) == pytest.approx(want.tolist(), rel=1e-3)
    halves = [(high - low) / 2 for low, high in law.intervals.values()]
    assert halves == pytest.approx((student_t_quantile(0.975, 7) * np.sqrt(np.diag(spread))).tolist(), rel=2e-2)


def test_no_table_of_the_paper_selects_two_regimes():
    chosen = [compare_forms(*column)[0].form for table in BOTH for column in read_score_table(table).values()]
    assert (chosen.count("power"), chosen.count("saturating"), chosen.count("regimes")) == (21, 15, 0)


def test_planted_outliers_are_found():
    rng = np.random.default_rng(2)
    log = 3 + 0.1 * np.log(N) + rng.normal(0, 0.01, 10)
    assert find_outliers(N, log) == ()
    log[[2, 6]] += [0.3, -0.25]
    assert find_outliers(N, log) == (16, 256)


def test_false_outlier_rate_is_the_level():
    noise = np.random.default_rng(5).normal(0, 0.01, (400, 10))
    assert np.mean([bool(find_outliers(N, log)) for log in noise]) == pytest.approx(0.1, abs=0.04)


def test_points_on_a_line_are_not_outliers():
    assert not studentize_residuals(np.zeros(5), np.full(5, 0.4), 3).any()


@pytest.mark.parametrize(
    ("n", "s", "words"),
    [
        ([1, 2, 4], [1, 2], "numbers of tokens, but"),
        ([1, 2, 4], [1, 0, 3], r"score 0 \(n = 2\)"),
        ([0, 2, 4], [1, 2, 3], "tokens 0"),
        ([1, 2, 2], [1, 2, 3], "2 numbers of tokens"),
        ([1, 2, 4], [1, math.nan, 3], "nan"),
    ],
)
def test_invalid_points_raise(n, s, words):
    with pytest.raises(DataError, match=words):
        fit_law(n, s)


def test_predictions_outside_the_domain():
    with pytest.raises(DataError, match="at 0 tokens"):
        fit_law([1, 2, 4], [1, 2, 3]).predict([4.0, 0.0])
    n = N[3:]
    law = fit_law(n, 50 - 200 * n**-0.8, "saturating")  # 50 − 200 at one token
    assert math.isnan(law.c) and math.isnan(law.predict(1.0).value[0]) and law.predict(1000.0).value[0] < 50


def test_invalid_forms_raise():
    with pytest.raises(ConfigError, match="power"):
        fit_law([1, 2, 4], [1, 2, 3], "powre")
    with pytest.raises(DataError, match="too few to compare forms"):
        fit_law([1, 2, 4, 8], [1, 2, 3, 4], "best")


def test_score_files_are_read(tmp_path):
    file = tmp_path / "scores.csv"
    file.write_text("# remarks\nn,colour,count\n4,30,\n1,20,10\n\n16,40,12\n")
    assert read_score_table(file) == {
        "colour": ScoreColumn((1, 4, 16), (20, 30, 40)),
        "count": ScoreColumn((1, 16), (10, 12)),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "needs a column n"),
        ("tokens,a\n1,2\n", "needs a column n"),
        ("n,a,a\n1,2,3\n", "two columns named 'a'"),
        ("n,a\n1,2,3\n", "line 2 .* 3 cells"),
        ("n,a\n1,much\n", "line 2 .* column a: much"),
        ("n,a\n,2\n", "column n: an empty cell"),
    ],
)
def test_invalid_score_files_raise(tmp_path, text, words):
    (tmp_path / "scores.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        read_score_table(tmp_path / "scores.csv")


def test_unknown_table_suggests_a_name():
    with pytest.raises(DataError, match="paper-tuned"):
        read_score_table("paper-tuend")


def test_extreme_scores_are_fitted():
    law = fit_law([1, 2, 1e300], [1e308, 1e-308, 3])
    assert law.intervals["c"][1] == math.inf and math.isfinite(law.alpha)
