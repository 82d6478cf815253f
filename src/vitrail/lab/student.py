"""Student's t: intervals from few points, and the points that are too far from the others' line."""

import math
from collections.abc import Sequence
from statistics import stdev

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)
STEPS = 60  # halvings of an angle: more than a double has bits
EXACT = 1e-9  # residuals below this are rounding


def student(p: float, dof: int) -> float:
    """The quantile t with P(T ≤ t) = p at so many degrees of freedom.

    With t = √dof·tan θ the density is cos^(dof−1) θ up to a factor: smooth on a finite range, so that few nodes do.
    """
    if not 0 < p < 1 or dof < 1:
        raise ValueError(f"no quantile at p = {p} and {dof} degrees of freedom")
    if p < 0.5:
        return -student(1 - p, dof)
    factor = math.exp(math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(STEPS):
        middle = (low + high) / 2
        angles = middle * (_NODES + 1) / 2
        share = factor * middle / 2 * float(_WEIGHTS @ np.cos(angles) ** (dof - 1))
        low, high = (middle, high) if share < p - 0.5 else (low, middle)
    return math.sqrt(dof) * math.tan(low)


def half_width(values: Sequence[float]) -> float:
    """Half of the interval of 95 % of their mean; two or more."""
    return student(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))


def studentised(residuals: np.ndarray, leverage: np.ndarray, dof: int) -> np.ndarray:
    """Residuals over the spread of the other points; nothing is an outlier where all lie on the law."""
    if dof < 2:
        return np.zeros_like(residuals)
    own = residuals**2 / (1 - leverage)
    others = (float(residuals @ residuals) - own).clip(min=0) / (dof - 1)
    return residuals / np.sqrt(others * (1 - leverage) + EXACT**2)


def outliers(n: np.ndarray, log: np.ndarray, level: float = 0.05) -> tuple[float, ...]:
    """Rosner's test around a line: the worst point is taken away, and again, up to a third of all. The last one beyond
    what chance allows, and all before it, are outliers; two that hide each other are found so."""
    kept, gone, found = np.arange(len(n)), [], 0
    while len(gone) < len(n) // 3 and len(kept) > 4:
        x = np.stack([np.ones(len(kept)), np.log(n[kept])], 1)
        leverage = np.einsum("np,pq,nq->n", x, np.linalg.pinv(x.T @ x), x).clip(max=1 - 1e-9)
        residuals = log[kept] - x @ np.linalg.lstsq(x, log[kept], rcond=None)[0]
        far = np.abs(studentised(residuals, leverage, len(kept) - 2))
        worst = int(far.argmax())
        gone.append(float(n[kept[worst]]))
        if far[worst] > student(1 - level / (2 * len(kept)), len(kept) - 3):
            found = len(gone)
        kept = np.delete(kept, worst)
    return tuple(sorted(gone[:found]))
