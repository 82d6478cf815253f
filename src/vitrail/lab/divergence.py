"""Measure the divergence of a decoder's hidden states over two continuations of one prefix (token-scaling theory).

D(n) = ‖Σᵢ (hᵢᴬ − hᵢᴮ)‖ over the first n tokens. Its square depends on three mean cosines: ψ_eq between branches at the
same position, ψ_AA within a branch and ψ_AB between branches at different positions. With Δ = ψ_AA − ψ_AB

    Υ(n) = n(1 − ψ_eq) + (n² − n)Δ,    E[D²] = 2M²Υ where all norms are M,    n* = (1 − ψ_eq)/Δ − 1

D grows as √n below the balance point n* and as n above it.

Shapes: P pairs, N tokens, D width.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.lab.scaling_law import compute_exponent

Array = np.ndarray
ZERO_GAP = 1e-12  # a smaller Δ is rounding error


@dataclass(frozen=True)
class Divergence:
    """Means over P pairs for the first n tokens, each of shape (N,).

    distance, squared_distance  D and D²
    same_position_cosine        ψ_eq
    within_branch_cosine        ψ_AA, the mean of both branches; NaN at n = 1
    cross_branch_cosine         ψ_AB; NaN at n = 1
    max_norm                    M: the largest mean norm of a position
    """

    pairs: int
    distance: Array
    squared_distance: Array
    same_position_cosine: Array
    within_branch_cosine: Array
    cross_branch_cosine: Array
    max_norm: float

    @property
    def n(self) -> Array:
        return np.arange(1, len(self.distance) + 1)

    @property
    def gap(self) -> Array:
        """Δ = ψ_AA − ψ_AB."""
        return self.within_branch_cosine - self.cross_branch_cosine

    @property
    def upsilon(self) -> Array:
        return compute_upsilon(self.same_position_cosine, self.gap)

    @property
    def scale(self) -> float:
        """λ of E[D] ≈ λ√Υ, fitted by least squares over all n."""
        rooted = np.sqrt(self.upsilon.clip(min=0))
        return float(self.distance @ rooted / (rooted @ rooted)) if rooted.any() else math.nan

    @property
    def fitted_distance(self) -> Array:
        """λ√Υ."""
        return self.scale * np.sqrt(self.upsilon.clip(min=0))

    def build_columns(self, beta: float) -> dict[str, Array]:
        """Name all values at each n; `beta` is β in S ∝ Υ^(β/2), for α(n)."""
        return {
            "D": self.distance,
            "λ√Υ": self.fitted_distance,
            "ψ_eq": self.same_position_cosine,
            "ψ_AA": self.within_branch_cosine,
            "ψ_AB": self.cross_branch_cosine,
            "Υ": self.upsilon,
            "n*": self.balance_point,
            f"α, β = {beta:g}": self.exponent(beta),
        }

    @property
    def tightness(self) -> float:
        """λ/(√2·M): at most 1 if all norms are equal, and 1 if D is also constant over pairs."""
        return self.scale / (math.sqrt(2) * self.max_norm)

    @property
    def balance_point(self) -> Array:
        """n*: the number of tokens at which growth changes from √n to n, from the cosines up to n.

        It is infinite if Δ = 0. It is below −1 if Δ is negative: Υ then decreases and reaches 0 at −n* tokens.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (1 - self.same_position_cosine) / self.gap - 1
        return np.where(np.abs(self.gap) <= ZERO_GAP, np.inf, found)

    def exponent(self, beta: float = 1.0) -> Array:
        """α(n) of scores S ∝ Υ^(β/2), with the cosines of all tokens as constants; NaN at n = 1 and where Υ < 0."""
        last, n = float(self.balance_point[-1]), self.n[1:]
        found = np.full(len(n), -beta / 2) if math.isinf(last) else compute_exponent(n, beta, last)
        return np.concatenate([[np.nan], found])


def compute_upsilon(same_position_cosine: Array, gap: Array) -> Array:
    """Compute Υ(n) from ψ_eq (N) and Δ (N). The first element of Δ is ignored."""
    n = np.arange(1, len(same_position_cosine) + 1)
    return n * (1 - same_position_cosine) + np.where(n > 1, (n**2 - n) * np.nan_to_num(gap), 0.0)


class DivergenceMeter:
    """Accumulate the statistics of pairs token by token. Memory per pair is four vectors of width D."""

    def __init__(self, length: int):
        self.length, self.pairs = length, 0
        self.sums = torch.zeros(6, length, dtype=torch.float64)  # D, D², ψ_eq, ψ_AA, ψ_BB, ψ_AB
        self.norms = torch.zeros(2, length, dtype=torch.float64)  # of A and B

    def add(self, steps: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add the hidden states of both branches, (P, D) each per token, for exactly `length` tokens."""
        n, pairs = 0, 0
        rows, norms = [], []
        difference = torch.zeros(1, dtype=torch.float64)
        a = difference
        b = difference
        same = difference
        for left, right in steps:
            if left.shape != right.shape or left.ndim != 2:
                raise DataError(
                    f"branches have shapes {tuple(left.shape)} and {tuple(right.shape)}",
                    "give two tensors of shape (P, D)",
                )
            left, right = left.double(), right.double()
            n, pairs = n + 1, len(left)
            lengths = left.norm(dim=1), right.norm(dim=1)
            if not (torch.cat(lengths) > 0).all() or not torch.cat(lengths).isfinite().all():
                raise DataError(f"a hidden state of token {n} is zero or not finite", "check the model's weights")
            u, v = left / lengths[0][:, None], right / lengths[1][:, None]
            difference, a, b = difference.to(u) + left - right, a.to(u) + u, b.to(u) + v
            same = same.to(u) + (u * v).sum(1)
            both = max(n * (n - 1), 1)  # at n = 1 all three sums are 0
            distance = difference.norm(dim=1)
            cosines = [same / n, (a.square().sum(1) - n) / both, (b.square().sum(1) - n) / both]
            every = [distance, distance.square(), *cosines, ((a * b).sum(1) - same) / both]
            rows.append(torch.stack([each.sum() for each in every]).cpu())
            norms.append(torch.stack([each.sum() for each in lengths]).cpu())
        if n != self.length:
            raise DataError(f"pair of {n} tokens, expected {self.length}", "truncate or skip pairs of other lengths")
        self.sums += torch.stack(rows, 1)
        self.norms += torch.stack(norms, 1)
        self.pairs += pairs

    def result(self) -> Divergence:
        if not self.pairs:
            raise DataError("no pairs were added", "call add() first")
        distance, square, equal, first, second, across = (self.sums / self.pairs).numpy()
        within = (first + second) / 2
        within[0] = np.nan
        across[0] = np.nan
        norm = float(self.norms.max()) / self.pairs
        return Divergence(self.pairs, distance, square, equal, within, across, norm)


def measure_divergence(a: Tensor, b: Tensor) -> Divergence:
    """Measure the divergence of hidden states (P, N, D) of both branches."""
    return accumulate_divergence([(a, b)])


def accumulate_divergence(batches: Iterable[tuple[Tensor, Tensor]]) -> Divergence:
    """Measure the divergence over batches of hidden states (P, N, D), one batch in memory at a time."""
    meter = None
    for a, b in batches:
        _check_shapes(a, b)
        meter = meter or DivergenceMeter(a.shape[1])
        meter.add(zip(a.unbind(1), b.unbind(1), strict=True))
    return (meter or DivergenceMeter(1)).result()


# ---- bounds -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CosineBounds:
    """Extremes of mean cosines among the first n tokens, each of shape (N,).

    same_position_cosine, within_branch_cosine and cross_branch_cosine are suprema, as the paper defines its ψ. The
    `min_…` fields are infima. Values over two positions are NaN at n = 1. within_branch_cosine is the mean of both
    branches.
    """

    same_position_cosine: Array
    within_branch_cosine: Array
    cross_branch_cosine: Array
    min_same_position_cosine: Array
    min_cross_branch_cosine: Array

    @property
    def upsilon(self) -> Array:
        """Υ of the paper, each ψ clamped at 0. It does not bound E[D²], because ψ_eq and ψ_AB enter negatively."""
        equal, within, across = (
            np.maximum(each, 0)
            for each in (self.same_position_cosine, self.within_branch_cosine, self.cross_branch_cosine)
        )
        return compute_upsilon(equal, within - across)

    @property
    def valid_upsilon(self) -> Array:
        """Υ from infima between branches and suprema within: a valid bound E[D²] ≤ 2M²Υ if all norms are M."""
        return compute_upsilon(self.min_same_position_cosine, self.within_branch_cosine - self.min_cross_branch_cosine)


def compute_bounds(a: Tensor, b: Tensor, tile_size: int = 256) -> CosineBounds:
    """Compute cosine bounds of hidden states (P, N, D), one tile of the N × N table in memory at a time."""
    _check_shapes(a, b)
    if not (torch.stack([a, b]).norm(dim=3) > 0).all():
        raise DataError("a hidden state is zero, its direction is undefined", "check the model's weights")
    u, v = (torch.nn.functional.normalize(x.double(), dim=2).transpose(0, 1).flatten(1) for x in (a, b))  # (N, P·D)
    equal = (u * v).sum(1) / len(a)
    within = (_compute_max_cosine(u, u, tile_size, len(a)) + _compute_max_cosine(v, v, tile_size, len(a))) / 2
    across, under = _compute_max_cosine(u, v, tile_size, len(a)), -_compute_max_cosine(u, -v, tile_size, len(a))
    found = (equal.cummax(0).values, within, across, equal.cummin(0).values, under)
    return CosineBounds(*(each.cpu().numpy() for each in found))


def _compute_max_cosine(u: Tensor, v: Tensor, tile_size: int, pairs: int) -> Tensor:
    """Compute the largest mean cosine of two positions i ≠ j ≤ n for every n (N)."""
    N = len(u)
    found = torch.full((N,), -torch.inf, dtype=u.dtype, device=u.device)
    places = torch.arange(N, device=u.device)
    for i in places.split(tile_size):
        for j in places.split(tile_size):
            table = u[i] @ v[j].T / pairs
            table[i[:, None] == j] = -torch.inf
            later = torch.maximum(i[:, None], j)  # smallest n that includes both positions
            found.scatter_reduce_(0, later.flatten(), table.flatten(), "amax")
    found = found.cummax(0).values
    return torch.where(found.isinf(), torch.nan, found)


def _check_shapes(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape or a.ndim != 3 or not a.numel():
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise DataError(f"hidden states have shapes {shapes}", "give two tensors of shape (pairs, tokens, width)")
