"""The token-scaling law: how a score S grows with the number n of visual tokens.

Every form of it is fitted to ln S by least squares, so that their errors can be compared.

Axes: N points, P parameters.
"""

import math
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from vitrail.config import Config
from vitrail.errors import ConfigError, DataError, nearest
from vitrail.lab.forms import FORMS, Array, Ends, FormName, slopes
from vitrail.lab.student import EXACT, outliers, student, studentised


class Prediction(NamedTuple):
    """Scores with the interval that a new measurement falls into."""

    value: Array
    low: Array
    high: Array


class Law(Config):
    """A form fitted to one task.

    parameters   by name, and `intervals` of 95 %: none where too few points or a bend at its bound leave them open
    residuals    of ln S; `studentised` ones are told in what the other points spread, and `outliers` are the numbers of
                 tokens whose scores no law of this form explains
    spread       of ln S around the law
    aicc         Akaike's criterion, corrected for few points: less is better; none of too few points
    theta        what the form is computed from, and `inverse` the inverse of its normal matrix
    bounded      the bend ran to its bound: the data do not say where it is
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
    def ends(self) -> Ends:
        return min(self.n), max(self.n)

    @property
    def dof(self) -> int:
        return len(self.n) - len(self.theta)

    @property
    def c(self) -> float:
        """The score of one token."""
        return float(self(1.0))

    @property
    def alpha(self) -> float:
        """The exponent of c / n^α at the most tokens that were measured: a power law has no other."""
        return self.parameters["alpha"] if self.form == "power" else float(self.exponent(self.ends[1]))

    def __call__(self, n: float | Sequence[float] | Array) -> Array:
        """The score (N) at n tokens (N)."""
        return np.exp(FORMS[self.form].log(np.array(self.theta), np.asarray(n, float), self.ends))

    def exponent(self, n: float | Sequence[float] | Array) -> Array:
        """α(n) with S = c·n^−α(n): the secant from one token, not the slope; n > 1."""
        n = np.asarray(n, float)
        return -(np.log(self(n)) - math.log(self.c)) / np.log(n)

    def predict(self, n: float | Sequence[float] | Array, level: float = 0.95) -> Prediction:
        """Scores at n tokens (N), with the interval of a new measurement; it widens outside of what was measured. They
        are NaN where a saturating law falls below nothing."""
        n = np.atleast_1d(np.asarray(n, float))
        if not (n > 0).all():
            raise DataError(f"there is no score at {n.min():g} tokens", "ask for more than none")
        theta = np.array(self.theta)
        log = FORMS[self.form].log(theta, n, self.ends)
        moves = slopes(self.form, theta, n, self.ends)
        wide = np.sqrt(1 + np.einsum("np,pq,nq->n", moves, np.array(self.inverse), moves))
        half = student((1 + level) / 2, self.dof) * self.spread * wide
        return Prediction(np.exp(log), np.exp(log - half), np.exp(log + half))


def fit(n: Sequence[float] | Array, s: Sequence[float] | Array, form: FormName | Literal["best"] = "power") -> Law:
    """The law of scores s (N) at n visual tokens (N); `best` takes the form with the least AICc."""
    if form == "best":
        return compare(n, s)[0]
    if form not in FORMS:
        raise ConfigError(f"no law has the form {form!r}", nearest(form, [*FORMS, "best"]))
    return _fit(*_checked(n, s, form), form)


def compare(n: Sequence[float] | Array, s: Sequence[float] | Array) -> list[Law]:
    """All forms that so many points can tell apart, best first."""
    points = _checked(n, s, "power")
    count, places = len(points[0]), len(np.unique(points[0]))
    laws = [_fit(*points, name) for name, form in FORMS.items() if count > form.size + 2 and places > form.size]
    if not laws:
        raise DataError(f"{count} points do not tell forms apart", "measure at least five, or name the form")
    return sorted(laws, key=lambda law: math.inf if law.aicc is None else law.aicc)


def bend(n: Sequence[float] | Array, s: Sequence[float] | Array) -> float:
    """The second derivative of ln S by ln n in the quadratic fit: negative where the curve bends down, positive where
    it bends as the two regimes would have it."""
    n, s = _checked(n, s, "power")
    return 2 * float(np.polyfit(np.log(n), np.log(s), 2)[0])


def exponent(n: Array, beta: float, balance: float) -> Array:
    """α(n) of the theory: (β/2)·ln((1 + n*)/(n + n*))/ln n − β/2; NaN where Υ is not positive."""
    n = np.asarray(n, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (1 + balance) / (n + balance)
    return beta / 2 * np.log(np.where(share > 0, share, np.nan)) / np.log(n) - beta / 2


# ---- fitting ----------------------------------------------------------------------------------------------------


def _checked(n: Sequence[float] | Array, s: Sequence[float] | Array, form: FormName) -> tuple[Array, Array]:
    x, y = np.asarray(n, float), np.asarray(s, float)
    if x.ndim != 1 or x.shape != y.shape:
        raise DataError(f"{x.size} numbers of tokens and {y.size} scores do not pair", "give one score for each")
    for what, values in (("number of tokens", x), ("score", y)):
        if (wrong := ~(np.isfinite(values) & (values > 0))).any():
            i = int(wrong.argmax())
            raise DataError(
                f"{what} {values[i]:g} (n = {x[i]:g}) has no logarithm", "laws are of positive numbers; drop that point"
            )
    least = FORMS[form].size + 1
    if len(np.unique(x)) < least:
        raise DataError(f"{len(np.unique(x))} numbers of tokens do not make a {form} law", f"give at least {least}")
    return x, y


def _fit(n: Array, s: Array, name: FormName) -> Law:
    form, log, ends = FORMS[name], np.log(s), (float(n.min()), float(n.max()))
    theta = _line(n, log)
    if form.bends:
        values = FORMS["power"].log(theta, np.array(ends), ends)
        starts = [np.array([*values, bend]) for bend in form.bends]
        theta = min(
            (_descend(name, start, n, log, ends) for start in starts), key=lambda t: _error(name, t, n, log, ends)
        )
    residuals = log - form.log(theta, n, ends)
    moves = slopes(name, theta, n, ends)
    bounded = bool(form.bends) and not form.bends[0] < theta[-1] < form.bends[-1]
    free = moves[:, :-1] if bounded else moves
    inverse = np.zeros((form.size, form.size))
    inverse[: free.shape[1], : free.shape[1]] = np.linalg.pinv(free.T @ free)
    leverage = np.einsum("np,pq,nq->n", moves, inverse, moves).clip(max=1 - 1e-9)
    dof = len(n) - form.size
    spread = math.sqrt(float(residuals @ residuals) / dof)
    k = form.size + 1  # the spread is one too
    rounding = max(float(residuals @ residuals) / len(n), EXACT**2)
    spare = len(n) - k - 1
    return Law(
        form=name,
        n=tuple(n.tolist()),
        s=tuple(s.tolist()),
        parameters=form.told(theta, ends),
        intervals=_intervals(name, theta, inverse, spread, dof, ends, bounded),
        residuals=tuple(residuals.tolist()),
        studentised=tuple(studentised(residuals, leverage, dof).tolist()),
        outliers=outliers(n, log) if name == "power" else (),
        spread=spread,
        aicc=len(n) * math.log(rounding) + 2 * k + 2 * k * (k + 1) / spare if spare > 0 else None,
        theta=tuple(theta.tolist()),
        inverse=tuple(map(tuple, inverse.tolist())),
        bounded=bounded,
    )


def _line(n: Array, log: Array) -> Array:
    slope, start = np.polyfit(np.log(n), log, 1)
    return np.array([start, -slope])


def _error(name: FormName, theta: Array, n: Array, log: Array, ends: Ends) -> float:
    return float(np.sum((log - FORMS[name].log(theta, n, ends)) ** 2))


def _descend(name: FormName, theta: Array, n: Array, log: Array, ends: Ends) -> Array:
    """Levenberg and Marquardt's way down, the bend kept within its bounds."""
    low, *_, high = FORMS[name].bends
    damping = 1e-3
    error = _error(name, theta, n, log, ends)
    for _ in range(100):
        moves = slopes(name, theta, n, ends)
        misses = log - FORMS[name].log(theta, n, ends)
        step = _step(moves, misses, damping)
        if np.clip(theta[-1] + step[-1], low, high) == theta[-1]:  # it stays at its bound: the others move alone
            moves[:, -1] = 0
            step = _step(moves, misses, damping)
        there = theta + step
        there[-1] = np.clip(there[-1], low, high)
        with np.errstate(over="ignore", invalid="ignore"):  # a step too far is taken back below
            now = _error(name, there, n, log, ends)
        if now <= error:
            moved, gained = float(np.abs(there - theta).max()), error - now
            theta, error, damping = there, now, damping / 5
            if moved < 1e-10 or gained <= 1e-9 * error or error < 0.01 * len(n) * EXACT**2:
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    return theta


def _step(moves: Array, misses: Array, damping: float) -> Array:
    normal = moves.T @ moves
    return np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), moves.T @ misses)


def _exp(x: float) -> float:
    """Infinite where no number is large enough."""
    return math.exp(x) if x < math.log(sys.float_info.max) else math.inf


def _intervals(
    name: FormName, theta: Array, inverse: Array, spread: float, dof: int, ends: Ends, bounded: bool
) -> dict[str, tuple[float, float]]:
    """By Student's t: exact for the power law, whose c is told from the interval of ln c, to first order elsewhere."""
    if bounded:
        return {}
    half = student(0.975, dof) * spread
    if name == "power":
        c, alpha = half * np.sqrt(np.diag(inverse))
        return {
            "c": (_exp(theta[0] - c), _exp(theta[0] + c)),
            "alpha": (float(theta[1] - alpha), float(theta[1] + alpha)),
        }
    told = FORMS[name].told
    steps = 1e-5 * np.eye(len(theta))
    found = {}
    for key, value in told(theta, ends).items():
        slope = np.array([(told(theta + d, ends)[key] - told(theta - d, ends)[key]) / 2e-5 for d in steps])
        wide = half * math.sqrt(float(slope @ inverse @ slope))
        found[key] = (value - wide, value + wide)
    return found
