"""Student's t distribution: quantiles, intervals of means and outlier tests."""

import math
from collections.abc import Sequence
from statistics import stdev

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)
NUM_BISECTIONS = 60  # more than the bits of a double
ROUNDING_ERROR = 1e-9  # smaller residuals are rounding errors


def student_t_quantile(p: float, dof: int) -> float:
    """Return the quantile t with P(T ≤ t) = p at `dof` degrees of freedom.

    With t = √dof·tan θ the density is proportional to cos^(dof−1) θ, which is smooth on a finite range. Gauss–Legendre
    quadrature with few nodes is then exact enough.
    """
    if not 0 < p < 1 or dof < 1:
        raise ValueError(f"no quantile at p = {p} and {dof} degrees of freedom")
    if p < 0.5:
        return -student_t_quantile(1 - p, dof)
    factor = math.exp(math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        angles = middle * (_NODES + 1) / 2
        share = factor * middle / 2 * float(_WEIGHTS @ np.cos(angles) ** (dof - 1))
        low, high = (middle, high) if share < p - 0.5 else (low, middle)
    return math.sqrt(dof) * math.tan(low)


def compute_half_width(values: Sequence[float]) -> float:
    """Return the half width of the 95 % interval of the mean of two or more values."""
    return student_t_quantile(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))


def studentize_residuals(residuals: np.ndarray, leverage: np.ndarray, dof: int) -> np.ndarray:
    """Divide residuals by the standard deviation of the other points. Residuals at rounding level stay near 0."""
    if dof < 2:
        return np.zeros_like(residuals)
    scaled_squares = residuals**2 / (1 - leverage)
    others = (float(residuals @ residuals) - scaled_squares).clip(min=0) / (dof - 1)
    return residuals / np.sqrt(others * (1 - leverage) + ROUNDING_ERROR**2)


def find_outliers(n: np.ndarray, log: np.ndarray, level: float = 0.05) -> tuple[float, ...]:
    """Find outliers from a line by Rosner's test.

    The worst point is removed repeatedly, up to a third of all. The last significant one and all removed before it are
    outliers. This also finds pairs of outliers that mask each other.
    """
    remaining, removed, num_outliers = np.arange(len(n)), [], 0
    while len(removed) < len(n) // 3 and len(remaining) > 4:
        x = np.stack([np.ones(len(remaining)), np.log(n[remaining])], 1)
        leverage = np.einsum("np,pq,nq->n", x, np.linalg.pinv(x.T @ x), x).clip(max=1 - 1e-9)
        residuals = log[remaining] - x @ np.linalg.lstsq(x, log[remaining], rcond=None)[0]
        distances = np.abs(studentize_residuals(residuals, leverage, len(remaining) - 2))
        worst = int(distances.argmax())
        removed.append(float(n[remaining[worst]]))
        if distances[worst] > student_t_quantile(1 - level / (2 * len(remaining)), len(remaining) - 3):
            num_outliers = len(removed)
        remaining = np.delete(remaining, worst)
    return tuple(sorted(removed[:num_outliers]))
