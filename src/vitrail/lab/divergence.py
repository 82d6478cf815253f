"""How far two continuations of one prefix drift apart in a decoder's hidden states, as the token-scaling theory has it.

D(n) = ‖Σᵢ (hᵢᴬ − hᵢᴮ)‖ over the first n tokens. Its square is governed by three mean cosines: ψ_eq between the branches
at one position, ψ_AA within a branch and ψ_AB between the branches at two positions. With Δ = ψ_AA − ψ_AB

    Υ(n) = n(1 − ψ_eq) + (n² − n)Δ,    E[D²] = 2M²Υ where all norms are M,    n* = (1 − ψ_eq)/Δ − 1

so that D grows as √n below the balance point n* and as n above it.

Axes: P pairs, N tokens, D width.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.lab.scaling import exponent

Array = np.ndarray
EXACT = 1e-12  # a Δ below this is rounding


@dataclass(frozen=True)
class Divergence:
    """Means over P pairs, each (N): what the first n tokens say.

    distance  D; `square` D²
    equal     ψ_eq; `within` ψ_AA, the mean of both branches; `across` ψ_AB. The last two need two tokens: NaN at n = 1
    norm      M: the largest mean norm of a position
    """

    pairs: int
    distance: Array
    square: Array
    equal: Array
    within: Array
    across: Array
    norm: float

    @property
    def n(self) -> Array:
        return np.arange(1, len(self.distance) + 1)

    @property
    def gap(self) -> Array:
        """Δ."""
        return self.within - self.across

    @property
    def upsilon(self) -> Array:
        return upsilon(self.equal, self.gap)

    @property
    def scale(self) -> float:
        """λ of E[D] ≈ λ√Υ, by least squares over all n."""
        rooted = np.sqrt(self.upsilon.clip(min=0))
        return float(self.distance @ rooted / (rooted @ rooted)) if rooted.any() else math.nan

    @property
    def tightness(self) -> float:
        """λ/(√2·M): at most 1 where norms are all alike, and 1 where D does not vary between pairs either."""
        return self.scale / (math.sqrt(2) * self.norm)

    @property
    def balance(self) -> Array:
        """n* by the cosines up to n: the tokens at which growth by √n turns into growth by n. Infinite where Δ is 0 and
        growth never turns; below −1 where Δ is negative: Υ then falls, and is gone at −n* tokens."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (1 - self.equal) / self.gap - 1
        return np.where(np.abs(self.gap) <= EXACT, np.inf, found)

    def exponent(self, beta: float = 1.0) -> Array:
        """α(n) of scores S ∝ Υ^(β/2), with the cosines of all tokens taken for constants; NaN at n = 1, and where these
        make Υ less than nothing."""
        last, n = float(self.balance[-1]), self.n[1:]
        found = np.full(len(n), -beta / 2) if math.isinf(last) else exponent(n, beta, last)
        return np.concatenate([[np.nan], found])


def upsilon(equal: Array, gap: Array) -> Array:
    """Υ(n) from ψ_eq (N) and Δ (N), whose first is not used."""
    n = np.arange(1, len(equal) + 1)
    return n * (1 - equal) + np.where(n > 1, (n**2 - n) * np.nan_to_num(gap), 0.0)


class Meter:
    """Adds up pairs, token by token: a pair in work keeps four vectors of width D, whatever its length."""

    def __init__(self, length: int):
        self.length, self.pairs = length, 0
        self.sums = torch.zeros(6, length, dtype=torch.float64)  # D, D², ψ_eq, ψ_AA, ψ_BB, ψ_AB
        self.norms = torch.zeros(2, length, dtype=torch.float64)  # of A and B

    def add(self, steps: Iterable[tuple[Tensor, Tensor]]) -> None:
        """The hidden states of both branches at each token, (P, D) each, for exactly `length` tokens: so that the same
        pairs are counted at every n."""
        n, pairs = 0, 0
        rows, norms = [], []
        apart = a = b = same = torch.zeros(1, dtype=torch.float64)
        for left, right in steps:
            if left.shape != right.shape or left.ndim != 2:
                raise DataError(f"branches of shapes {tuple(left.shape)} and {tuple(right.shape)} make no pairs")
            left, right = left.double(), right.double()
            n, pairs = n + 1, len(left)
            lengths = left.norm(dim=1), right.norm(dim=1)
            if not (torch.cat(lengths) > 0).all() or not torch.cat(lengths).isfinite().all():
                raise DataError(f"a hidden state of token {n} is zero or not finite", "its direction is undefined")
            u, v = left / lengths[0][:, None], right / lengths[1][:, None]
            apart, a, b = apart.to(u) + left - right, a.to(u) + u, b.to(u) + v
            same = same.to(u) + (u * v).sum(1)
            both = max(n * (n - 1), 1)  # at one token all three sums are nothing
            distance = apart.norm(dim=1)
            cosines = [same / n, (a.square().sum(1) - n) / both, (b.square().sum(1) - n) / both]
            every = [distance, distance.square(), *cosines, ((a * b).sum(1) - same) / both]
            rows.append(torch.stack([each.sum() for each in every]).cpu())
            norms.append(torch.stack([each.sum() for each in lengths]).cpu())
        if n != self.length:
            raise DataError(f"pairs of {n} tokens among pairs of {self.length}", "keep to one length: cut or leave out")
        self.sums += torch.stack(rows, 1)
        self.norms += torch.stack(norms, 1)
        self.pairs += pairs

    def result(self) -> Divergence:
        if not self.pairs:
            raise DataError("no pairs were measured", "add some first")
        distance, square, equal, first, second, across = (self.sums / self.pairs).numpy()
        within = (first + second) / 2
        within[0] = across[0] = np.nan
        norm = float(self.norms.max()) / self.pairs
        return Divergence(self.pairs, distance, square, equal, within, across, norm)


def measure(a: Tensor, b: Tensor) -> Divergence:
    """The divergence of hidden states (P, N, D) of both branches."""
    return gather([(a, b)])


def gather(batches: Iterable[tuple[Tensor, Tensor]]) -> Divergence:
    """The divergence of all pairs in batches of hidden states (P, N, D), which need not be held at once."""
    meter = None
    for a, b in batches:
        _check(a, b)
        meter = meter or Meter(a.shape[1])
        meter.add(zip(a.unbind(1), b.unbind(1), strict=True))
    return (meter or Meter(1)).result()


# ---- bounds -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """Extremes over positions of the cosines' means over pairs, each (N): among the first n tokens.

    equal, within, across are suprema, as the paper defines its ψ; equal_low and across_low infima. Those of two
    positions are NaN at n = 1. `within` is the mean of both branches' suprema.
    """

    equal: Array
    within: Array
    across: Array
    equal_low: Array
    across_low: Array

    @property
    def upsilon(self) -> Array:
        """The paper's Υ, each ψ no less than 0. E[D²] ≤ 2M²Υ does not follow: ψ_eq and ψ_AB count against it."""
        equal, within, across = (np.maximum(each, 0) for each in (self.equal, self.within, self.across))
        return upsilon(equal, within - across)

    @property
    def valid(self) -> Array:
        """Υ of infima between the branches and suprema within them: E[D²] ≤ 2M²Υ where all norms are M."""
        return upsilon(self.equal_low, self.within - self.across_low)


def bounds(a: Tensor, b: Tensor, tile: int = 256) -> Bounds:
    """Extremes of hidden states (P, N, D) of both branches; of the table of N × N means a tile at a time is held."""
    _check(a, b)
    if not (torch.stack([a, b]).norm(dim=3) > 0).all():
        raise DataError("a hidden state is zero", "its direction is undefined")
    u, v = (torch.nn.functional.normalize(x.double(), dim=2).transpose(0, 1).flatten(1) for x in (a, b))  # (N, P·D)
    equal = (u * v).sum(1) / len(a)
    within = (_highest(u, u, tile, len(a)) + _highest(v, v, tile, len(a))) / 2
    across, under = _highest(u, v, tile, len(a)), -_highest(u, -v, tile, len(a))
    found = (equal.cummax(0).values, within, across, equal.cummin(0).values, under)
    return Bounds(*(each.cpu().numpy() for each in found))


def _highest(u: Tensor, v: Tensor, tile: int, pairs: int) -> Tensor:
    """The largest mean cosine of two positions i ≠ j ≤ n, for every n (N)."""
    N = len(u)
    found = torch.full((N,), -torch.inf, dtype=u.dtype, device=u.device)
    places = torch.arange(N, device=u.device)
    for i in places.split(tile):
        for j in places.split(tile):
            table = u[i] @ v[j].T / pairs
            table[i[:, None] == j] = -torch.inf
            later = torch.maximum(i[:, None], j)  # the n from which on both are seen
            found.scatter_reduce_(0, later.flatten(), table.flatten(), "amax")
    found = found.cummax(0).values
    return torch.where(found.isinf(), torch.nan, found)


def _check(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape or a.ndim != 3 or not a.numel():
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise DataError(f"hidden states of shapes {shapes} make no pairs", "give (pairs, tokens, width), both alike")
