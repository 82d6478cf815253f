"""Sampling order: every item once per epoch, correct proportions, random access."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.sampler import BLOCK_SIZE, MixtureConfig, MixtureSampler, permute_index
from vitrail.errors import ConfigError


@given(st.integers(1, 400), st.integers(0, 2**62))
@settings(max_examples=60)
def test_permutation_is_bijective(size, key):
    assert sorted(permute_index(i, size, key) for i in range(size)) == list(range(size))


def test_permutations_are_different_and_random():
    a, b = ([permute_index(i, 1000, key) for i in range(1000)] for key in (1, 2))
    assert a != b
    assert abs(np.corrcoef(a, range(1000))[0, 1]) < 0.1
    assert np.mean(np.abs(np.diff(a)) == 1) < 0.02


sources = st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 90), st.floats(0, 10)), min_size=1).filter(
    lambda s: sum(w for _, w in s.values()) > 0.01
)


@given(sources, st.integers(0, 1000), st.integers(0, 3000))
@settings(max_examples=40)
def test_every_item_once_per_epoch_and_random_access(table, seed, start):
    sizes = {name: size for name, (size, _) in table.items()}
    mixture = MixtureConfig(weights={name: weight for name, (_, weight) in table.items()})
    order = MixtureSampler(mixture, sizes, seed)
    draws = [order[i] for i in range(600)]
    assert draws == [MixtureSampler(mixture, sizes, seed)[i] for i in range(600)]
    assert MixtureSampler(mixture, sizes, seed)[start] == order[start]  # random access equals sequential access
    for name, size in sizes.items():
        mine = [d for d in draws if d.source == name]
        for epoch in range(1 + len(mine) // size):
            items = [d.item for d in mine if d.epoch == epoch]
            assert len(items) == len(set(items))  # no item twice in an epoch
            if epoch < len(mine) // size:
                assert sorted(items) == list(range(size))  # and none missing


@given(sources, st.integers(0, 100))
@settings(max_examples=40)
def test_proportions_do_not_drift(table, seed):
    mixture = MixtureConfig(weights={name: weight for name, (_, weight) in table.items()})
    order = MixtureSampler(mixture, {name: size for name, (size, _) in table.items()}, seed)
    draws = [order[i].source for i in range(8 * BLOCK_SIZE)]
    for name, fraction in zip(mixture.weights, mixture.weights_at(0), strict=True):
        assert abs(draws.count(name) - fraction * len(draws)) <= len(table)


def test_weights_are_annealed():
    mixture = MixtureConfig(weights={"a": 1, "b": 0}, final_weights={"a": 0, "b": 1}, anneal_samples=20 * BLOCK_SIZE)
    order = MixtureSampler(mixture, {"a": 10**6, "b": 10**6})
    shares = [np.mean([order[i].source == "b" for i in range(b * BLOCK_SIZE, (b + 1) * BLOCK_SIZE)]) for b in range(24)]
    assert shares[0] == 0
    assert shares[23] == 1
    assert all(abs(share - min(b / 20, 1)) < 0.03 for b, share in enumerate(shares))


def test_seeds_give_different_orders():
    mixture, sizes = MixtureConfig(weights={"a": 1}), {"a": 1000}
    assert [MixtureSampler(mixture, sizes, 1)[i] for i in range(20)] != [
        MixtureSampler(mixture, sizes, 2)[i] for i in range(20)
    ]


@pytest.mark.parametrize(
    "bad",
    [
        {"weights": {}},
        {"weights": {"a": 0.0}},
        {"weights": {"a": -1.0}},
        {"weights": {"a": 1.0}, "final_weights": {"b": 1.0}, "anneal_samples": 5},
        {"weights": {"a": 1.0}, "final_weights": {"a": 1.0}},
    ],
)
def test_invalid_mixtures_are_refused(bad):
    with pytest.raises(ConfigError):
        MixtureConfig(**bad)


def test_unknown_and_empty_sources_are_named():
    with pytest.raises(ConfigError, match="'b'"):
        MixtureSampler(MixtureConfig(weights={"b": 1.0}), {"a": 3})
    with pytest.raises(ConfigError, match="is empty"):
        MixtureSampler(MixtureConfig(weights={"a": 1.0}), {"a": 0})
