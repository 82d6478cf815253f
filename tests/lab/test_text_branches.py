"""Pairs of continuations in a text, and their hidden states."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import randomize
from vitrail import hub
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.data.text_source import TextSourceConfig, read_text
from vitrail.errors import ConfigError, DataError
from vitrail.lab.divergence import accumulate_divergence, measure_divergence
from vitrail.lab.text_branches import compute_hidden_states, find_branches
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig


@pytest.fixture(scope="module")
def decoder():
    block = BlockConfig(
        width=16, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=32), norm="rms"
    )
    config = DecoderConfig(vocab_size=9, layers=2, block=block, rotary=RotaryConfig(head_dim=8), context_length=32)
    return randomize(Decoder(config), spread=0.5)


@settings(max_examples=80)
@given(
    st.lists(st.integers(0, 2), max_size=60), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3)
)
def test_pairs_share_the_prefix_and_differ_after_it(ids, prefix, length, most, seed):
    windows = range(len(ids) - prefix - length + 1)
    every = [
        (i, j)
        for i in windows
        for j in windows
        if j - i >= prefix + length
        and ids[i : i + prefix] == ids[j : j + prefix]
        and ids[i + prefix] != ids[j + prefix]
    ]
    if not every:
        with pytest.raises(DataError, match="different continuations"):
            find_branches(ids, prefix, length, most, seed)
        return
    found = [tuple(pair) for pair in find_branches(ids, prefix, length, most, seed).tolist()]
    prefixes = [tuple(ids[i : i + prefix]) for i, _ in found]
    assert set(found) <= set(every) and len(set(prefixes)) == len(prefixes)
    assert len(found) == min(most, len({tuple(ids[i : i + prefix]) for i, _ in every}))


def test_states_equal_those_of_each_continuation_alone(decoder):
    ids = np.random.default_rng(0).integers(0, 9, 200)
    starts = find_branches(ids, 2, 6, 5)
    a, b = (
        torch.cat(side)
        for side in zip(*compute_hidden_states(decoder, ids, starts, 2, 6, bos_token_id=3, batch_size=2), strict=True)
    )
    assert a.shape == b.shape == (5, 6, 16)
    for pair, states in enumerate(zip(a, b, strict=True)):
        for start, state in zip(starts[pair], states, strict=True):
            for n in range(1, 7):
                read = torch.tensor([[3, *ids[start : start + 2 + n]]])
                torch.testing.assert_close(decoder.forward_hidden(read)[0, -1], state[n - 1], atol=1e-5, rtol=1e-4)


def test_divergence_is_symmetric(decoder):
    """The order of the branches does not matter."""
    ids = np.random.default_rng(1).integers(0, 9, 300)
    starts = find_branches(ids, 2, 8, 20)
    one, other = (
        accumulate_divergence(compute_hidden_states(decoder, ids, s, 2, 8, batch_size=7))
        for s in (starts, starts[:, ::-1].copy())
    )
    for name in ("distance", "same_position_cosine", "within_branch_cosine", "cross_branch_cosine"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-4, nan_ok=True)
    assert one.pairs == 20


def test_equal_texts_have_no_divergence(decoder):
    ids = np.random.default_rng(2).integers(0, 9, 60)
    ((a, b),) = compute_hidden_states(decoder, ids, np.array([[4, 4]]), 2, 8)
    assert not measure_divergence(a, b).distance.any()


@pytest.mark.slow
def test_stories15m_follows_the_law():
    """On real text D is λ√Υ within a few percent, and growth changes from √n to n."""
    if shutil.which("npm") is None:
        pytest.skip("stories15M comes with npm")
    words, model = hub.load_tokenizer("stories15M"), hub.load("stories15M")
    ids = words.encode(read_text(TextSourceConfig(package="python-docs")))
    found = accumulate_divergence(
        compute_hidden_states(model, ids, find_branches(ids, 4, 128, 48), 4, 128, bos_token_id=words.bos_token_id)
    )
    assert found.scale * np.sqrt(found.upsilon) == pytest.approx(found.distance, rel=0.1)
    assert 8 < found.balance_point[-1] < 40 and 0.85 < found.tightness < 1


def test_invalid_lengths_raise(decoder):
    with pytest.raises(ConfigError, match="context length of 32"):
        next(compute_hidden_states(decoder, range(9), np.array([[0, 1]]), 2, 40))
    with pytest.raises(ConfigError, match="at least 1"):
        find_branches([1, 2, 3], 0, 1, 1)
