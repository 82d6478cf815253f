"""The forms that a token-scaling law can have: ln S as a function of n and a few numbers θ.

power       S = c / n^α; α is negative where scores rise
saturating  S = limit − a·n^−b
regimes     S = γ Υ^(β/2) with Υ ∝ n(n + n*): exponent β/2 well below the balance point n*, β well above it

The curved forms are described by ln S at both ends of what was measured and one number for the bend: so all of θ is
about as large as one, and no two of them do the same. What people know them by is worked out from those.

Axes: N points, P parameters.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

FormName = Literal["power", "saturating", "regimes"]
Array = np.ndarray
Ends = tuple[float, float]


class Form(NamedTuple):
    """`log(θ, n, ends)` is ln S (N); `told(θ, ends)` the parameters as people know them; `bends` where to look for the
    last of θ, between its bounds; a line has none."""

    size: int
    log: Callable[[Array, Array, Ends], Array]
    told: Callable[[Array, Ends], dict[str, float]]
    bends: tuple[float, ...] = ()


def _power(theta: Array, n: Array, ends: Ends) -> Array:
    return theta[0] - theta[1] * np.log(n)


def _saturating(theta: Array, n: Array, ends: Ends) -> Array:
    low, high = ends
    b = math.exp(theta[2])
    share = (n**-b - low**-b) / (high**-b - low**-b)
    first, last = np.exp(theta[:2])
    values = first + (last - first) * share
    return np.log(np.where(values > 0, values, np.nan))  # outside of what was measured it may fall below nothing


def _saturating_told(theta: Array, ends: Ends) -> dict[str, float]:
    low, high = ends
    b = math.exp(theta[2])
    first, last = np.exp(theta[:2])
    a = float((last - first) / (low**-b - high**-b))
    return {"limit": float(last) + a * high**-b, "a": a, "b": b}


def _regimes(theta: Array, n: Array, ends: Ends) -> Array:
    low, high = ends
    balance = math.expm1(theta[2])
    across = np.log(n * (n + balance) / (low * (low + balance)))
    return theta[0] + (theta[1] - theta[0]) * across / math.log(high * (high + balance) / (low * (low + balance)))


def _regimes_told(theta: Array, ends: Ends) -> dict[str, float]:
    low, high = ends
    balance = math.expm1(theta[2])
    beta = 2 * float(theta[1] - theta[0]) / math.log(high * (high + balance) / (low * (low + balance)))
    return {"c": math.exp(float(_regimes(theta, np.ones(1), ends)[0])), "beta": beta, "balance": balance}


FORMS: dict[FormName, Form] = {
    "power":      Form(2, _power, lambda t, ends: {"c": math.exp(t[0]), "alpha": float(t[1])}),
    "saturating": Form(3, _saturating, _saturating_told, (-4.0, -2.0, -0.7, 0.5, 2.0)),  # ln b
    "regimes":    Form(3, _regimes, _regimes_told, (0.0, 1.0, 2.5, 4.0, 12.0)),  # ln(1 + n*); below 0 there is one
}  # fmt: skip


def slopes(name: FormName, theta: Array, n: Array, ends: Ends) -> Array:
    """∂ ln S / ∂θ (N, P), by central differences."""
    log = FORMS[name].log
    return np.stack([(log(theta + d, n, ends) - log(theta - d, n, ends)) / 2e-5 for d in 1e-5 * np.eye(len(theta))], 1)
