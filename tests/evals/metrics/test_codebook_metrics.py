"""Codebook usage and bit rates."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import ConfigError, DataError
from vitrail.evals.metrics import bits_per_pixel, compression_ratio, measure_codebook_usage


@given(ids=st.lists(st.integers(0, 30), min_size=1, max_size=60), cut=st.integers(0, 60), high=st.booleans())
def test_batched_counts_match_all_at_once(ids, cut, high):
    codes, lift = (2**63, 2**63 - 31) if high else (31, 0)
    flat = torch.tensor(ids) + lift
    whole, parts = measure_codebook_usage(flat, codes), measure_codebook_usage([flat[:cut], flat[cut:]], codes)
    assert whole == parts
    counts = torch.tensor(ids).bincount()
    share = counts[counts > 0].double() / len(ids)
    assert (whole.used, whole.tokens, whole.codes) == (len(set(ids)), len(ids), codes)
    assert whole.entropy == pytest.approx(
        torch.distributions.Categorical(share).entropy().item() / math.log(2), abs=1e-9
    )
    assert 1 - 1e-9 <= whole.perplexity <= whole.used + 1e-9


def test_closed_forms():
    even = measure_codebook_usage(torch.arange(8).repeat(4).view(2, 4, 4), 16)
    assert (even.used_fraction, even.entropy, even.perplexity) == (0.5, 3.0, 8.0)
    assert str(even) == "8 of 16 codes (50.0%) in 32 tokens, entropy 3.000 of 4.000 bits, perplexity 8.0"
    one = measure_codebook_usage(torch.zeros(9, dtype=torch.int32), 4)
    assert (one.used, one.entropy, one.perplexity) == (1, 0.0, 1.0)


def test_invalid_ids_raise():
    for ids in (torch.tensor([0, 4]), torch.tensor([-1, 2])):
        with pytest.raises(DataError, match="the codebook has 4 codes"):
            measure_codebook_usage(ids, 4)
    for ids in (torch.rand(3), torch.tensor([True])):
        with pytest.raises(DataError, match="not an integer type"):
            measure_codebook_usage(ids, 4)
    for ids in ([], torch.empty(0, dtype=torch.int64)):
        with pytest.raises(DataError, match="no ids"):
            measure_codebook_usage(ids, 4)
    with pytest.raises(ConfigError, match="codebook size 0"):
        measure_codebook_usage(torch.tensor([0]), 0)


def test_published_rates():
    assert compression_ratio(28, 256, 256, 256) == pytest.approx(219.4, abs=0.05)  # QLIP-B-16
    assert compression_ratio(13, 18 * 32, 288, 512) == pytest.approx(472.6, abs=0.05)  # GAIA-1
    assert bits_per_pixel(28, 256, 256, 256) == 28 / 256
    for wrong in ((-1, 4, 8, 8), (1, -4, 8, 8), (1, 4, 0, 8)):
        with pytest.raises(ConfigError, match="tokens of"):
            bits_per_pixel(*wrong)
