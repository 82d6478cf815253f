"""Divergence: the streamed means against dense tables, the regimes of known processes, and what is no bound."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from vitrail.errors import DataError
from vitrail.lab.divergence import Divergence, Meter, bounds, gather, measure

shapes = st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(2, 12), st.integers(0, 2**31 - 1))


def made(shape: tuple[int, int, int, int], norms: bool = True) -> tuple[Tensor, Tensor]:
    """Two branches (P, N, D) with something in common; `norms`: of any length, or of one."""
    P, N, D, seed = shape
    rng = torch.Generator().manual_seed(seed)
    shared = torch.randn(P, 1, D, generator=rng, dtype=torch.float64)
    own = torch.randn(2, P, N, D, generator=rng, dtype=torch.float64) + 0.7 * shared
    own += 0.5 * torch.randn(2, P, 1, D, generator=rng, dtype=torch.float64)
    return tuple(own) if norms else tuple(3 * normalize(own, dim=-1))


def dense(x: Tensor, y: Tensor) -> Tensor:
    """Mean cosines over pairs of all positions (N, N)."""
    return torch.einsum("pid,pjd->pij", normalize(x, dim=-1), normalize(y, dim=-1)).mean(0)


def off(table: Tensor) -> Tensor:
    return table[~torch.eye(len(table), dtype=torch.bool)]


@settings(max_examples=40)
@given(shapes)
def test_streamed_means_are_those_of_the_dense_tables(shape):
    a, b = made(shape)
    found = measure(a, b)
    aa, bb, ab = dense(a, a), dense(b, b), dense(a, b)
    for n in range(1, shape[1] + 1):
        apart = (a - b)[:, :n].sum(1).norm(dim=1)
        assert found.distance[n - 1] == pytest.approx(apart.mean().item())
        assert found.square[n - 1] == pytest.approx(apart.square().mean().item())
        assert found.equal[n - 1] == pytest.approx(ab.diagonal()[:n].mean().item())
        if n == 1:
            assert np.isnan([found.within[0], found.across[0], found.balance[0]]).all()
            continue
        within = (off(aa[:n, :n]).mean() + off(bb[:n, :n]).mean()).item() / 2
        assert found.within[n - 1] == pytest.approx(within, abs=1e-9)
        assert found.across[n - 1] == pytest.approx(off(ab[:n, :n]).mean().item(), abs=1e-9)
    assert found.norm == pytest.approx(max(x.norm(dim=-1).mean(0).max().item() for x in (a, b)))


@settings(max_examples=40)
@given(shapes)
def test_equal_norms_make_the_square_exact(shape):
    found = measure(*made(shape, norms=False))
    assert found.square == pytest.approx(2 * 9 * found.upsilon, rel=1e-9, abs=1e-9)
    assert found.tightness <= 1 + 1e-9
    if shape[0] == 1:
        assert found.tightness == pytest.approx(1)  # nothing varies between pairs


@settings(max_examples=20)
@given(shapes, st.integers(1, 6))
def test_batches_do_not_matter(shape, batch):
    a, b = made(shape)
    whole, parts = measure(a, b), gather(zip(a.split(batch), b.split(batch), strict=True))
    assert parts.pairs == whole.pairs == shape[0]
    for name in ("distance", "square", "equal", "within", "across"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), nan_ok=True)


@settings(max_examples=30)
@given(shapes, st.integers(1, 10))
def test_extremes_are_those_of_the_dense_tables_whatever_the_tile(shape, tile):
    a, b = made(shape)
    found = bounds(a, b, tile)
    aa, bb, ab = dense(a, a), dense(b, b), dense(a, b)
    for n in range(1, shape[1] + 1):
        assert found.equal[n - 1] == pytest.approx(ab.diagonal()[:n].max().item())
        assert found.equal_low[n - 1] == pytest.approx(ab.diagonal()[:n].min().item())
        if n == 1:
            assert np.isnan([found.within[0], found.across[0], found.across_low[0]]).all()
            continue
        within = (off(aa[:n, :n]).max() + off(bb[:n, :n]).max()).item() / 2
        assert found.within[n - 1] == pytest.approx(within)
        assert found.across[n - 1] == pytest.approx(off(ab[:n, :n]).max().item())
        assert found.across_low[n - 1] == pytest.approx(off(ab[:n, :n]).min().item())


@settings(max_examples=30)
@given(shapes)
def test_infima_between_and_suprema_within_make_a_bound(shape):
    a, b = made(shape, norms=False)
    assert (measure(a, b).square <= 2 * 9 * bounds(a, b).valid + 1e-9).all()


def test_suprema_alone_make_none():
    """Two unit vectors a branch: Υ of the paper's suprema is 0, and the branches are 1 apart."""
    turn = math.radians(30)
    a, b = ([[[1, 0], [math.cos(turn), side * math.sin(turn)]]] for side in (1, -1))
    a, b = torch.tensor(a), torch.tensor(b)
    assert bounds(a, b).upsilon[1] == pytest.approx(0, abs=1e-6)
    assert measure(a, b).square[1] == pytest.approx(1)
    assert 2 * bounds(a, b).valid[1] >= 1


def test_norms_that_vary_break_any_bound_by_their_mean():
    """Pairs of right angles, of norms 1/2 and 3/2: M is 1 and Υ is 1, but E[D²] is 5/2 and not 2."""
    sizes = torch.tensor([0.5, 1.5])[:, None, None]
    a, b = sizes * torch.tensor([1.0, 0.0]), sizes * torch.tensor([0.0, 1.0])
    found = measure(a, b)
    assert (found.norm, found.upsilon[0], found.square[0]) == pytest.approx((1, 1, 2.5))
    assert found.square[0] > 2 * found.norm**2 * bounds(a, b).valid[0]


def test_the_norm_is_of_the_sum_and_not_a_sum_of_norms():
    a = torch.tensor([[[1.0, 1.0], [1.0, 0.0]]])
    b = torch.tensor([[[1.0, 0.0], [1.0, 1.0]]])
    assert measure(a, b).distance == pytest.approx([1, 0], abs=1e-12)


def slope(found, low: int, high: int) -> float:
    """d ln D / d ln n between two numbers of tokens."""
    return math.log(found.distance[high - 1] / found.distance[low - 1]) / math.log(high / low)


def walks(drift: float, pairs: int = 60, length: int = 400, width: int = 32) -> tuple[Tensor, Tensor]:
    """Unit vectors around a direction of each branch's own, as strong as `drift`, and noise."""
    own = normalize(torch.randn(2, pairs, 1, width), dim=-1)
    noise = normalize(torch.randn(2, pairs, length, width), dim=-1)
    return tuple(normalize(drift * own + noise, dim=-1))


def test_branches_without_a_direction_drift_apart_as_the_root():
    found = measure(*walks(0.0))
    assert slope(found, 10, 400) == pytest.approx(0.5, abs=0.05)
    assert abs(found.balance[-1]) > 400  # a Δ of next to nothing, of either sign
    assert found.exponent(1.0)[-1] == pytest.approx(-0.5, abs=0.05)


def test_branches_with_a_direction_each_drift_apart_evenly():
    found = measure(*walks(3.0))
    assert slope(found, 10, 400) == pytest.approx(1, abs=0.02)
    assert found.balance[-1] < 2
    assert found.exponent(1.0)[-1] == pytest.approx(-1, abs=0.05)


def test_between_the_two_growth_turns_at_the_balance_point():
    found = measure(*walks(0.15))
    turn = found.balance[-1]
    assert 15 < turn < 120
    assert slope(found, 1, 6) < 0.65 and slope(found, 200, 400) > 0.85
    law = found.scale * np.sqrt(found.upsilon)
    assert law == pytest.approx(found.distance, rel=0.05) and 0.9 < found.tightness <= 1


@pytest.mark.parametrize("gap", [-0.004, 0.0, 1e-15, 0.004, 0.3])
def test_scores_are_those_of_upsilon_whatever_the_sign_of_the_gap(gap):
    """c·n^−α(n) = γΥ^(β/2) identically, with c = γ(1 − ψ_eq)^(β/2)."""
    n, beta, ones = np.arange(1, 201), 0.7, np.ones(200)
    found = Divergence(1, ones, ones, 0.5 * ones, (0.2 + gap) * ones, 0.2 * ones, 1.0)
    alpha, upsilon = found.exponent(beta), found.upsilon
    there = (n > 1) & (upsilon > 0)
    assert 0.5 ** (beta / 2) * n[there] ** -alpha[there] == pytest.approx(upsilon[there] ** (beta / 2))
    assert np.isnan(alpha[~there]).all() and (there.sum() == 199 if gap >= 0 else there.sum() == 124)


def test_branches_that_never_part():
    a = torch.randn(3, 5, 4)
    found = measure(a, a)
    assert not found.distance.any() and np.isinf(found.balance[1:]).all()
    assert found.exponent(0.6)[1:] == pytest.approx(-0.3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: measure(torch.ones(2, 3, 4), torch.ones(2, 2, 4)), "make no pairs"),
        (lambda: measure(torch.ones(2, 3), torch.ones(2, 3)), "make no pairs"),
        (lambda: measure(torch.ones(0, 3, 4), torch.ones(0, 3, 4)), "make no pairs"),
        (lambda: measure(torch.zeros(1, 3, 4), torch.ones(1, 3, 4)), "token 1 is zero"),
        (lambda: measure(torch.full((1, 3, 4), math.nan), torch.ones(1, 3, 4)), "not finite"),
        (lambda: Meter(2).add([(torch.ones(1, 4), torch.ones(1, 4))]), "pairs of 1 tokens among pairs of 2"),
        (lambda: gather([]), "no pairs"),
        (lambda: bounds(torch.zeros(1, 3, 4), torch.ones(1, 3, 4)), "is zero"),
    ],
)
def test_what_cannot_be_measured(make, words):
    with pytest.raises(DataError, match=words):
        make()
