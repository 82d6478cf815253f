"""Data order: every item once an epoch, shares as asked, the same from anywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.order import BLOCK, Mixture, Order, permuted
from vitrail.errors import ConfigError


@given(st.integers(1, 400), st.integers(0, 2**62))
@settings(max_examples=60)
def test_permutation_is_one(size, key):
    assert sorted(permuted(i, size, key) for i in range(size)) == list(range(size))


def test_permutations_differ_and_look_random():
    a, b = ([permuted(i, 1000, key) for i in range(1000)] for key in (1, 2))
    assert a != b
    assert abs(np.corrcoef(a, range(1000))[0, 1]) < 0.1
    assert np.mean(np.abs(np.diff(a)) == 1) < 0.02


sources = st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 90), st.floats(0, 10)), min_size=1).filter(
    lambda s: sum(w for _, w in s.values()) > 0.01
)


@given(sources, st.integers(0, 1000), st.integers(0, 3000))
@settings(max_examples=40)
def test_nothing_is_lost_and_nothing_depends_on_the_way(table, seed, start):
    sizes = {name: size for name, (size, _) in table.items()}
    mixture = Mixture(weights={name: weight for name, (_, weight) in table.items()})
    order = Order(mixture, sizes, seed)
    draws = [order[i] for i in range(600)]
    assert draws == [Order(mixture, sizes, seed)[i] for i in range(600)]
    assert Order(mixture, sizes, seed)[start] == order[start]  # reached at once or step by step
    for name, size in sizes.items():
        mine = [d for d in draws if d.source == name]
        for epoch in range(1 + len(mine) // size):
            items = [d.item for d in mine if d.epoch == epoch]
            assert len(items) == len(set(items))  # no item twice in an epoch
            if epoch < len(mine) // size:
                assert sorted(items) == list(range(size))  # and none left out


@given(sources, st.integers(0, 100))
@settings(max_examples=40)
def test_shares_never_drift(table, seed):
    mixture = Mixture(weights={name: weight for name, (_, weight) in table.items()})
    order = Order(mixture, {name: size for name, (size, _) in table.items()}, seed)
    draws = [order[i].source for i in range(8 * BLOCK)]
    for name, share in zip(mixture.weights, mixture.at(0), strict=True):
        assert abs(draws.count(name) - share * len(draws)) <= len(table)


def test_weights_move():
    mixture = Mixture(weights={"a": 1, "b": 0}, final={"a": 0, "b": 1}, over=20 * BLOCK)
    order = Order(mixture, {"a": 10**6, "b": 10**6})
    shares = [np.mean([order[i].source == "b" for i in range(b * BLOCK, (b + 1) * BLOCK)]) for b in range(24)]
    assert shares[0] == 0
    assert shares[23] == 1
    assert all(abs(share - min(b / 20, 1)) < 0.03 for b, share in enumerate(shares))


def test_seeds_differ():
    mixture, sizes = Mixture(weights={"a": 1}), {"a": 1000}
    assert [Order(mixture, sizes, 1)[i] for i in range(20)] != [Order(mixture, sizes, 2)[i] for i in range(20)]


@pytest.mark.parametrize(
    "bad",
    [
        {"weights": {}},
        {"weights": {"a": 0.0}},
        {"weights": {"a": -1.0}},
        {"weights": {"a": 1.0}, "final": {"b": 1.0}, "over": 5},
        {"weights": {"a": 1.0}, "final": {"a": 1.0}},
    ],
)
def test_impossible_mixtures_are_refused(bad):
    with pytest.raises(ConfigError):
        Mixture(**bad)


def test_unknown_and_empty_sources_are_named():
    with pytest.raises(ConfigError, match="'b'"):
        Order(Mixture(weights={"b": 1.0}), {"a": 3})
    with pytest.raises(ConfigError, match="holds nothing"):
        Order(Mixture(weights={"a": 1.0}), {"a": 0})
