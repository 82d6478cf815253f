"""Functional forms of the token-scaling law: ln S as a function of n and parameters θ.

power       S = c / n^α; α is negative where scores rise
saturating  S = limit − a·n^−b
regimes     S = γ Υ^(β/2) with Υ ∝ n(n + n*): exponent β/2 well below the balance point n*, β well above it

The curved forms use ln S at both ends of the measured range and one number for the bend as θ. These parameters have a
similar scale and are nearly independent. The usual parameters are computed from them.

Shapes: N points, P parameters.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

FormName = Literal["power", "saturating", "regimes"]
Array = np.ndarray
TokenRange = tuple[float, float]


class LawForm(NamedTuple):
    """One form of the law.

    num_parameters  number of parameters θ
    log_score       (θ, n, token_range) → ln S (N)
    to_parameters   (θ, token_range) → the usual parameters, by name
    bend_starts     starting values for the last of θ, from its lower to its upper bound; empty for a line
    """

    num_parameters: int
    log_score: Callable[[Array, Array, TokenRange], Array]
    to_parameters: Callable[[Array, TokenRange], dict[str, float]]
    bend_starts: tuple[float, ...] = ()


def _log_power(theta: Array, n: Array, token_range: TokenRange) -> Array:
    return theta[0] - theta[1] * np.log(n)


def _log_saturating(theta: Array, n: Array, token_range: TokenRange) -> Array:
    low, high = token_range
    b = math.exp(theta[2])
    share = (n**-b - low**-b) / (high**-b - low**-b)
    first, last = np.exp(theta[:2])
    values = first + (last - first) * share
    return np.log(np.where(values > 0, values, np.nan))  # may be negative outside of the measured range


def _saturating_parameters(theta: Array, token_range: TokenRange) -> dict[str, float]:
    low, high = token_range
    b = math.exp(theta[2])
    first, last = np.exp(theta[:2])
    a = float((last - first) / (low**-b - high**-b))
    return {"limit": float(last) + a * high**-b, "a": a, "b": b}


def _log_regimes(theta: Array, n: Array, token_range: TokenRange) -> Array:
    low, high = token_range
    balance = math.expm1(theta[2])
    across = np.log(n * (n + balance) / (low * (low + balance)))
    return theta[0] + (theta[1] - theta[0]) * across / math.log(high * (high + balance) / (low * (low + balance)))


def _regimes_parameters(theta: Array, token_range: TokenRange) -> dict[str, float]:
    low, high = token_range
    balance = math.expm1(theta[2])
    beta = 2 * float(theta[1] - theta[0]) / math.log(high * (high + balance) / (low * (low + balance)))
    return {"c": math.exp(float(_log_regimes(theta, np.ones(1), token_range)[0])), "beta": beta, "balance": balance}


LAW_FORMS: dict[FormName, LawForm] = {
    "power":      LawForm(2, _log_power, lambda t, _ends: {"c": math.exp(t[0]), "alpha": float(t[1])}),
    "saturating": LawForm(3, _log_saturating, _saturating_parameters, (-4.0, -2.0, -0.7, 0.5, 2.0)),  # ln b
    "regimes":    LawForm(3, _log_regimes, _regimes_parameters, (0.0, 1.0, 2.5, 4.0, 12.0)),  # ln(1 + n*)
}  # fmt: skip


def compute_jacobian(form: FormName, theta: Array, n: Array, token_range: TokenRange) -> Array:
    """∂ ln S / ∂θ (N, P), by central differences."""
    log = LAW_FORMS[form].log_score
    return np.stack(
        [(log(theta + d, n, token_range) - log(theta - d, n, token_range)) / 2e-5 for d in 1e-5 * np.eye(len(theta))], 1
    )
