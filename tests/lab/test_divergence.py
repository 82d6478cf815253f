"""Divergence: streamed means against dense tables, growth regimes of known processes, and bounds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from vitrail.errors import DataError
from vitrail.lab.divergence import (
    Divergence,
    DivergenceMeter,
    accumulate_divergence,
    compute_bounds,
    measure_divergence,
)

shapes = st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(2, 12), st.integers(0, 2**31 - 1))


def made(shape: tuple[int, int, int, int], norms: bool = True) -> tuple[Tensor, Tensor]:
    """Make two correlated branches (P, N, D), with varying norms or with unit norms."""
    P, N, D, seed = shape
    rng = torch.Generator().manual_seed(seed)
    shared = torch.randn(P, 1, D, generator=rng, dtype=torch.float64)
    own = torch.randn(2, P, N, D, generator=rng, dtype=torch.float64) + 0.7 * shared
    own += 0.5 * torch.randn(2, P, 1, D, generator=rng, dtype=torch.float64)
    return tuple(own) if norms else tuple(3 * normalize(own, dim=-1))


def dense(x: Tensor, y: Tensor) -> Tensor:
    """Compute mean cosines over pairs for all positions (N, N)."""
    return torch.einsum("pid,pjd->pij", normalize(x, dim=-1), normalize(y, dim=-1)).mean(0)


def off(table: Tensor) -> Tensor:
    return table[~torch.eye(len(table), dtype=torch.bool)]


@settings(max_examples=40)
@given(shapes)
def test_streamed_means_match_dense_tables(shape):
    a, b = made(shape)
    found = measure_divergence(a, b)
    aa, bb, ab = dense(a, a), dense(b, b), dense(a, b)
    for n in range(1, shape[1] + 1):
        apart = (a - b)[:, :n].sum(1).norm(dim=1)
        assert found.distance[n - 1] == pytest.approx(apart.mean().item())
        assert found.squared_distance[n - 1] == pytest.approx(apart.square().mean().item())
        assert found.same_position_cosine[n - 1] == pytest.approx(ab.diagonal()[:n].mean().item())
        if n == 1:
            assert np.isnan([found.within_branch_cosine[0], found.cross_branch_cosine[0], found.balance_point[0]]).all()
            continue
        within = (off(aa[:n, :n]).mean() + off(bb[:n, :n]).mean()).item() / 2
        assert found.within_branch_cosine[n - 1] == pytest.approx(within, abs=1e-9)
        assert found.cross_branch_cosine[n - 1] == pytest.approx(off(ab[:n, :n]).mean().item(), abs=1e-9)
    assert found.max_norm == pytest.approx(max(x.norm(dim=-1).mean(0).max().item() for x in (a, b)))


@settings(max_examples=40)
@given(shapes)
def test_equal_norms_give_an_exact_square(shape):
    found = measure_divergence(*made(shape, norms=False))
    assert found.squared_distance == pytest.approx(2 * 9 * found.upsilon, rel=1e-9, abs=1e-9)
    assert found.tightness <= 1 + 1e-9
    if shape[0] == 1:
        assert found.tightness == pytest.approx(1)  # all pairs are equal


@settings(max_examples=20)
@given(shapes, st.integers(1, 6))
def test_batching_has_no_effect(shape, batch):
    a, b = made(shape)
    whole, parts = measure_divergence(a, b), accumulate_divergence(zip(a.split(batch), b.split(batch), strict=True))
    assert parts.pairs == whole.pairs == shape[0]
    cosines = ("same_position_cosine", "within_branch_cosine", "cross_branch_cosine")
    for name in ("distance", "squared_distance", *cosines):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), nan_ok=True)


@settings(max_examples=30)
@given(shapes, st.integers(1, 10))
def test_bounds_match_dense_tables_for_any_tile_size(shape, tile):
    a, b = made(shape)
    found = compute_bounds(a, b, tile)
    aa, bb, ab = dense(a, a), dense(b, b), dense(a, b)
    for n in range(1, shape[1] + 1):
        assert found.same_position_cosine[n - 1] == pytest.approx(ab.diagonal()[:n].max().item())
        assert found.min_same_position_cosine[n - 1] == pytest.approx(ab.diagonal()[:n].min().item())
        if n == 1:
            assert np.isnan(
                [found.within_branch_cosine[0], found.cross_branch_cosine[0], found.min_cross_branch_cosine[0]]
            ).all()
            continue
        within = (off(aa[:n, :n]).max() + off(bb[:n, :n]).max()).item() / 2
        assert found.within_branch_cosine[n - 1] == pytest.approx(within)
        assert found.cross_branch_cosine[n - 1] == pytest.approx(off(ab[:n, :n]).max().item())
        assert found.min_cross_branch_cosine[n - 1] == pytest.approx(off(ab[:n, :n]).min().item())


@settings(max_examples=30)
@given(shapes)
def test_valid_upsilon_is_a_bound(shape):
    a, b = made(shape, norms=False)
    assert (measure_divergence(a, b).squared_distance <= 2 * 9 * compute_bounds(a, b).valid_upsilon + 1e-9).all()


def test_suprema_alone_are_no_bound():
    """With two unit vectors per branch, Υ of the suprema is 0, but the distance is 1."""
    turn = math.radians(30)
    a, b = ([[[1, 0], [math.cos(turn), side * math.sin(turn)]]] for side in (1, -1))
    a, b = torch.tensor(a), torch.tensor(b)
    assert compute_bounds(a, b).upsilon[1] == pytest.approx(0, abs=1e-6)
    assert measure_divergence(a, b).squared_distance[1] == pytest.approx(1)
    assert 2 * compute_bounds(a, b).valid_upsilon[1] >= 1


def test_varying_norms_violate_bounds_by_the_mean_norm():
    """Orthogonal pairs with norms 1/2 and 3/2: M is 1 and Υ is 1, but E[D²] is 5/2 and not 2."""
    sizes = torch.tensor([0.5, 1.5])[:, None, None]
    a, b = sizes * torch.tensor([1.0, 0.0]), sizes * torch.tensor([0.0, 1.0])
    found = measure_divergence(a, b)
    assert (found.max_norm, found.upsilon[0], found.squared_distance[0]) == pytest.approx((1, 1, 2.5))
    assert found.squared_distance[0] > 2 * found.max_norm**2 * compute_bounds(a, b).valid_upsilon[0]


def test_distance_is_the_norm_of_the_sum():
    a = torch.tensor([[[1.0, 1.0], [1.0, 0.0]]])
    b = torch.tensor([[[1.0, 0.0], [1.0, 1.0]]])
    assert measure_divergence(a, b).distance == pytest.approx([1, 0], abs=1e-12)


def slope(found, low: int, high: int) -> float:
    """d ln D / d ln n between two numbers of tokens."""
    return math.log(found.distance[high - 1] / found.distance[low - 1]) / math.log(high / low)


def walks(drift: float, pairs: int = 60, length: int = 400, width: int = 32) -> tuple[Tensor, Tensor]:
    """Make unit vectors of noise around a direction per branch of strength `drift`."""
    own = normalize(torch.randn(2, pairs, 1, width), dim=-1)
    noise = normalize(torch.randn(2, pairs, length, width), dim=-1)
    return tuple(normalize(drift * own + noise, dim=-1))


def test_random_branches_diverge_as_the_root():
    found = measure_divergence(*walks(0.0))
    assert slope(found, 10, 400) == pytest.approx(0.5, abs=0.05)
    assert abs(found.balance_point[-1]) > 400  # Δ is near 0, with either sign
    assert found.exponent(1.0)[-1] == pytest.approx(-0.5, abs=0.05)


def test_directed_branches_diverge_linearly():
    found = measure_divergence(*walks(3.0))
    assert slope(found, 10, 400) == pytest.approx(1, abs=0.02)
    assert found.balance_point[-1] < 2
    assert found.exponent(1.0)[-1] == pytest.approx(-1, abs=0.05)


def test_growth_changes_at_the_balance_point():
    found = measure_divergence(*walks(0.15))
    turn = found.balance_point[-1]
    assert 15 < turn < 120
    assert slope(found, 1, 6) < 0.65 and slope(found, 200, 400) > 0.85
    law = found.scale * np.sqrt(found.upsilon)
    assert law == pytest.approx(found.distance, rel=0.05) and 0.9 < found.tightness <= 1


@pytest.mark.parametrize("gap", [-0.004, 0.0, 1e-15, 0.004, 0.3])
def test_exponent_reproduces_upsilon_for_any_gap(gap):
    """c·n^−α(n) = γΥ^(β/2) identically, with c = γ(1 − ψ_eq)^(β/2)."""
    n, beta, ones = np.arange(1, 201), 0.7, np.ones(200)
    found = Divergence(1, ones, ones, 0.5 * ones, (0.2 + gap) * ones, 0.2 * ones, 1.0)
    alpha, upsilon = found.exponent(beta), found.upsilon
    there = (n > 1) & (upsilon > 0)
    assert 0.5 ** (beta / 2) * n[there] ** -alpha[there] == pytest.approx(upsilon[there] ** (beta / 2))
    assert np.isnan(alpha[~there]).all() and (there.sum() == 199 if gap >= 0 else there.sum() == 124)


def test_equal_branches_have_zero_divergence():
    a = torch.randn(3, 5, 4)
    found = measure_divergence(a, a)
    assert not found.distance.any() and np.isinf(found.balance_point[1:]).all()
    assert found.exponent(0.6)[1:] == pytest.approx(-0.3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: measure_divergence(torch.ones(2, 3, 4), torch.ones(2, 2, 4)), "have shapes"),
        (lambda: measure_divergence(torch.ones(2, 3), torch.ones(2, 3)), "have shapes"),
        (lambda: measure_divergence(torch.ones(0, 3, 4), torch.ones(0, 3, 4)), "have shapes"),
        (lambda: measure_divergence(torch.zeros(1, 3, 4), torch.ones(1, 3, 4)), "token 1 is zero"),
        (lambda: measure_divergence(torch.full((1, 3, 4), math.nan), torch.ones(1, 3, 4)), "not finite"),
        (lambda: DivergenceMeter(2).add([(torch.ones(1, 4), torch.ones(1, 4))]), "pair of 1 tokens, expected 2"),
        (lambda: accumulate_divergence([]), "no pairs"),
        (lambda: compute_bounds(torch.zeros(1, 3, 4), torch.ones(1, 3, 4)), "is zero"),
    ],
)
def test_invalid_states_raise(make, words):
    with pytest.raises(DataError, match=words):
        make()
