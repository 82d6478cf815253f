"""Fit the token-scaling law: a score S as a function of the number n of visual tokens.

All forms are fitted to ln S by least squares, so that their errors are comparable.

Shapes: N points, P parameters.
"""

import math
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from vitrail.config import Config
from vitrail.errors import ConfigError, DataError, suggest_name
from vitrail.lab.scaling_forms import LAW_FORMS, Array, FormName, TokenRange, compute_jacobian
from vitrail.lab.student_t import ROUNDING_ERROR, find_outliers, student_t_quantile, studentize_residuals


class Prediction(NamedTuple):
    """Predicted scores with the interval of a new measurement."""

    value: Array
    low: Array
    high: Array


class ScalingLaw(Config):
    """A form fitted to the scores of one task.

    parameters   by name
    intervals    95 % intervals of the parameters; empty if the bend is at its bound
    residuals    of ln S
    studentised  residuals in units of the standard deviation of the other points
    outliers     numbers of tokens whose scores deviate significantly from a power law
    spread       standard deviation of ln S around the law
    aicc         Akaike's criterion, corrected for few points; lower is better; None with too few points
    theta        internal parameters of the form
    inverse      inverse of their normal matrix
    bounded      whether the bend is at its bound, so that the data do not determine it
    """

    form: FormName
    n: tuple[float, ...]
    s: tuple[float, ...]
    parameters: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    residuals: tuple[float, ...]
    studentised: tuple[float, ...]
    outliers: tuple[float, ...]
    spread: float
    aicc: float | None
    theta: tuple[float, ...]
    inverse: tuple[tuple[float, ...], ...]
    bounded: bool

    @property
    def token_range(self) -> TokenRange:
        return min(self.n), max(self.n)

    @property
    def dof(self) -> int:
        return len(self.n) - len(self.theta)

    @property
    def c(self) -> float:
        """Predicted score with one token."""
        return float(self(1.0))

    @property
    def alpha(self) -> float:
        """Exponent α at the largest measured n; constant for a power law."""
        return self.parameters["alpha"] if self.form == "power" else float(self.exponent(self.token_range[1]))

    def __call__(self, n: float | Sequence[float] | Array) -> Array:
        """Predict the score (N) at n tokens (N)."""
        return np.exp(LAW_FORMS[self.form].log_score(np.array(self.theta), np.asarray(n, float), self.token_range))

    def exponent(self, n: float | Sequence[float] | Array) -> Array:
        """Return α(n) of S = c·n^−α(n) for n > 1: the secant from one token, not the local slope."""
        n = np.asarray(n, float)
        return -(np.log(self(n)) - math.log(self.c)) / np.log(n)

    def predict(self, n: float | Sequence[float] | Array, level: float = 0.95) -> Prediction:
        """Predict scores at n tokens (N) with the interval of a new measurement.

        The interval widens outside of the measured range. Scores are NaN where a saturating law is negative.
        """
        n = np.atleast_1d(np.asarray(n, float))
        if not (n > 0).all():
            raise DataError(f"cannot predict a score at {n.min():g} tokens", "use a positive number of tokens")
        theta = np.array(self.theta)
        log = LAW_FORMS[self.form].log_score(theta, n, self.token_range)
        moves = compute_jacobian(self.form, theta, n, self.token_range)
        wide = np.sqrt(1 + np.einsum("np,pq,nq->n", moves, np.array(self.inverse), moves))
        half = student_t_quantile((1 + level) / 2, self.dof) * self.spread * wide
        return Prediction(np.exp(log), np.exp(log - half), np.exp(log + half))


def fit_law(
    n: Sequence[float] | Array, s: Sequence[float] | Array, form: FormName | Literal["best"] = "power"
) -> ScalingLaw:
    """Fit a law to scores s (N) at n visual tokens (N). `best` selects the form with the lowest AICc."""
    if form == "best":
        return compare_forms(n, s)[0]
    if form not in LAW_FORMS:
        raise ConfigError(f"no form of the law is named {form!r}", suggest_name(form, [*LAW_FORMS, "best"]))
    return _fit_form(*_check_points(n, s, form), form)


def compare_forms(n: Sequence[float] | Array, s: Sequence[float] | Array) -> list[ScalingLaw]:
    """Fit all forms that the number of points allows, best first."""
    points = _check_points(n, s, "power")
    count, places = len(points[0]), len(np.unique(points[0]))
    laws = [
        _fit_form(*points, name)
        for name, form in LAW_FORMS.items()
        if count > form.num_parameters + 2 and places > form.num_parameters
    ]
    if not laws:
        raise DataError(f"{count} points are too few to compare forms", "measure at least five, or choose a form")
    return sorted(laws, key=lambda law: math.inf if law.aicc is None else law.aicc)


def measure_curvature(n: Sequence[float] | Array, s: Sequence[float] | Array) -> float:
    """Measure the second derivative of ln S by ln n in a quadratic fit.

    It is negative if the curve bends down, and positive if it bends up as the two-regime form predicts.
    """
    n, s = _check_points(n, s, "power")
    return 2 * float(np.polyfit(np.log(n), np.log(s), 2)[0])


def compute_exponent(n: Array, beta: float, balance: float) -> Array:
    """Compute α(n) of the theory: (β/2)·ln((1 + n*)/(n + n*))/ln n − β/2; NaN where Υ is not positive."""
    n = np.asarray(n, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (1 + balance) / (n + balance)
    return beta / 2 * np.log(np.where(share > 0, share, np.nan)) / np.log(n) - beta / 2


# ---- fitting ----------------------------------------------------------------------------------------------------


def _check_points(n: Sequence[float] | Array, s: Sequence[float] | Array, form: FormName) -> tuple[Array, Array]:
    x, y = np.asarray(n, float), np.asarray(s, float)
    if x.ndim != 1 or x.shape != y.shape:
        raise DataError(f"{x.size} numbers of tokens, but {y.size} scores", "give one score per number of tokens")
    for quantity, values in (("number of tokens", x), ("score", y)):
        if (wrong := ~(np.isfinite(values) & (values > 0))).any():
            i = int(wrong.argmax())
            raise DataError(f"{quantity} {values[i]:g} (n = {x[i]:g}) is not positive and finite", "drop that point")
    min_points = LAW_FORMS[form].num_parameters + 1
    if len(np.unique(x)) < min_points:
        raise DataError(
            f"{len(np.unique(x))} numbers of tokens are too few for a {form} law", f"give at least {min_points}"
        )
    return x, y


def _fit_form(n: Array, s: Array, name: FormName) -> ScalingLaw:
    form, log, ends = LAW_FORMS[name], np.log(s), (float(n.min()), float(n.max()))
    theta = _fit_line(n, log)
    if form.bend_starts:
        values = LAW_FORMS["power"].log_score(theta, np.array(ends), ends)
        starts = [np.array([*values, bend]) for bend in form.bend_starts]
        theta = min(
            (_run_levenberg_marquardt(name, start, n, log, ends) for start in starts),
            key=lambda t: _compute_squared_error(name, t, n, log, ends),
        )
    residuals = log - form.log_score(theta, n, ends)
    moves = compute_jacobian(name, theta, n, ends)
    bounded = bool(form.bend_starts) and not form.bend_starts[0] < theta[-1] < form.bend_starts[-1]
    free = moves[:, :-1] if bounded else moves
    inverse = np.zeros((form.num_parameters, form.num_parameters))
    inverse[: free.shape[1], : free.shape[1]] = np.linalg.pinv(free.T @ free)
    leverage = np.einsum("np,pq,nq->n", moves, inverse, moves).clip(max=1 - 1e-9)
    dof = len(n) - form.num_parameters
    spread = math.sqrt(float(residuals @ residuals) / dof)
    k = form.num_parameters + 1  # plus the spread
    rounding = max(float(residuals @ residuals) / len(n), ROUNDING_ERROR**2)
    spare = len(n) - k - 1
    return ScalingLaw(
        form=name,
        n=tuple(n.tolist()),
        s=tuple(s.tolist()),
        parameters=form.to_parameters(theta, ends),
        intervals=_compute_intervals(name, theta, inverse, spread, dof, ends, bounded),
        residuals=tuple(residuals.tolist()),
        studentised=tuple(studentize_residuals(residuals, leverage, dof).tolist()),
        outliers=find_outliers(n, log) if name == "power" else (),
        spread=spread,
        aicc=len(n) * math.log(rounding) + 2 * k + 2 * k * (k + 1) / spare if spare > 0 else None,
        theta=tuple(theta.tolist()),
        inverse=tuple(map(tuple, inverse.tolist())),
        bounded=bounded,
    )


def _fit_line(n: Array, log: Array) -> Array:
    slope, start = np.polyfit(np.log(n), log, 1)
    return np.array([start, -slope])


def _compute_squared_error(form: FormName, theta: Array, n: Array, log: Array, token_range: TokenRange) -> float:
    return float(np.sum((log - LAW_FORMS[form].log_score(theta, n, token_range)) ** 2))


def _run_levenberg_marquardt(form: FormName, theta: Array, n: Array, log: Array, token_range: TokenRange) -> Array:
    """Minimize the squared error by Levenberg–Marquardt, with the bend clipped to its bounds."""
    low, *_, high = LAW_FORMS[form].bend_starts
    damping = 1e-3
    error = _compute_squared_error(form, theta, n, log, token_range)
    for _ in range(100):
        moves = compute_jacobian(form, theta, n, token_range)
        misses = log - LAW_FORMS[form].log_score(theta, n, token_range)
        step = _compute_damped_step(moves, misses, damping)
        if np.clip(theta[-1] + step[-1], low, high) == theta[-1]:  # the bend is at its bound: optimize the others
            moves[:, -1] = 0
            step = _compute_damped_step(moves, misses, damping)
        candidate = theta + step
        candidate[-1] = np.clip(candidate[-1], low, high)
        with np.errstate(over="ignore", invalid="ignore"):  # an overlong step is rejected below
            now = _compute_squared_error(form, candidate, n, log, token_range)
        if now <= error:
            step_size, error_drop = float(np.abs(candidate - theta).max()), error - now
            theta, error, damping = candidate, now, damping / 5
            if step_size < 1e-10 or error_drop <= 1e-9 * error or error < 0.01 * len(n) * ROUNDING_ERROR**2:
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    return theta


def _compute_damped_step(jacobian: Array, residuals: Array, damping: float) -> Array:
    normal = jacobian.T @ jacobian
    return np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), jacobian.T @ residuals)


def _exp_or_inf(x: float) -> float:
    """exp(x), or infinity on overflow."""
    return math.exp(x) if x < math.log(sys.float_info.max) else math.inf


def _compute_intervals(
    form: FormName, theta: Array, inverse: Array, spread: float, dof: int, token_range: TokenRange, bounded: bool
) -> dict[str, tuple[float, float]]:
    """Compute 95 % intervals by Student's t: exact for the power law (c via ln c), first-order otherwise."""
    if bounded:
        return {}
    half = student_t_quantile(0.975, dof) * spread
    if form == "power":
        c, alpha = half * np.sqrt(np.diag(inverse))
        return {
            "c": (_exp_or_inf(theta[0] - c), _exp_or_inf(theta[0] + c)),
            "alpha": (float(theta[1] - alpha), float(theta[1] + alpha)),
        }
    convert = LAW_FORMS[form].to_parameters
    steps = 1e-5 * np.eye(len(theta))
    found = {}
    for key, value in convert(theta, token_range).items():
        slope = np.array(
            [(convert(theta + d, token_range)[key] - convert(theta - d, token_range)[key]) / 2e-5 for d in steps]
        )
        wide = half * math.sqrt(float(slope @ inverse @ slope))
        found[key] = (value - wide, value + wide)
    return found
