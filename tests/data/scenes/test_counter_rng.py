import hashlib

import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.scenes.counter_rng import random_bits, random_distinct, random_integers, random_uniform

WRAP = (1 << 64) - 1


def splitmix(x: int) -> int:
    """Sebastiano Vigna's finisher, with Python's own integers."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WRAP
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WRAP
    return x ^ x >> 31


def reference(seed: int, index: int, what: str, cell: int) -> int:
    golden = 0x9E3779B97F4A7C15
    name = int.from_bytes(hashlib.blake2b(f"{seed},{what}".encode(), digest_size=8).digest(), "little")
    return splitmix(splitmix(index * golden + name & WRAP) + (cell + 1) * golden & WRAP) >> 16 & 0xFFFFFFFF


@given(st.integers(-(2**40), 2**40), st.lists(st.integers(0, 2**50), min_size=1, max_size=4), st.text(max_size=8))
def test_bits_are_those_of_splitmix(seed, index, what):
    got = random_bits(seed, torch.tensor(index), what, 2, 3)
    expected = [[reference(seed, i, what, c) for c in range(6)] for i in index]
    assert got.view(len(index), 6).tolist() == expected


def test_draws_lie_in_their_range_and_spread():
    index = torch.arange(20_000)
    number = random_integers(0, index, "number", high=7)
    assert number.min() == 0 and number.max() == 6
    assert (number.bincount() - 20_000 / 7).abs().max() < 250  # five deviations
    share = random_uniform(0, index, "share", 2)
    assert share.min() >= 0 and share.max() < 1
    assert torch.corrcoef(share.T)[0, 1].abs() < 0.04
    assert random_integers(0, index, "each", 3, high=torch.tensor([1, 2, 9])).amax(0).tolist() == [0, 1, 8]


@given(st.integers(1, 9), st.integers(0, 5))
def test_distinct_numbers_differ_and_reach_all(count, spare):
    numbers = random_distinct(3, torch.arange(200), "numbers", count, high=count + spare)
    assert numbers.shape == (200, count)
    assert numbers.min() >= 0 and numbers.max() < count + spare
    assert all(len(set(row)) == count for row in numbers.tolist())
    assert set(numbers[:, 0].tolist()) == set(range(count + spare))


def test_distinct_numbers_of_several_ranges():
    of = torch.tensor([4, 9, 16]).repeat(50)
    numbers = random_distinct(0, torch.arange(150), "cells", 4, high=of)
    assert (numbers < of[:, None]).all()
    assert all(len(set(row)) == 4 for row in numbers.tolist())
