"""Pairs of continuations: real ones, apart from each other, and read by the decoder as it reads a text."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import randomize
from vitrail import hub
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.data.text import TextConfig, read_text
from vitrail.errors import ConfigError, DataError
from vitrail.lab.branches import branches, hidden
from vitrail.lab.divergence import gather, measure
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, RotaryConfig


@pytest.fixture(scope="module")
def decoder():
    block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=GatedConfig(hidden=32), norm="rms")
    config = DecoderConfig(vocab=9, layers=2, block=block, rotary=RotaryConfig(head_dim=8), context=32)
    return randomize(Decoder(config), spread=0.5)


@settings(max_examples=80)
@given(
    st.lists(st.integers(0, 2), max_size=60), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3)
)
def test_pairs_agree_in_the_prefix_and_nowhere_right_behind_it(ids, prefix, length, most, seed):
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
        with pytest.raises(DataError, match="two ways"):
            branches(ids, prefix, length, most, seed)
        return
    found = [tuple(pair) for pair in branches(ids, prefix, length, most, seed).tolist()]
    prefixes = [tuple(ids[i : i + prefix]) for i, _ in found]
    assert set(found) <= set(every) and len(set(prefixes)) == len(prefixes)
    assert len(found) == min(most, len({tuple(ids[i : i + prefix]) for i, _ in every}))


def test_states_are_those_of_reading_each_continuation(decoder):
    ids = np.random.default_rng(0).integers(0, 9, 200)
    starts = branches(ids, 2, 6, 5)
    a, b = (torch.cat(side) for side in zip(*hidden(decoder, ids, starts, 2, 6, bos=3, batch=2), strict=True))
    assert a.shape == b.shape == (5, 6, 16)
    for pair, states in enumerate(zip(a, b, strict=True)):
        for start, state in zip(starts[pair], states, strict=True):
            for n in range(1, 7):
                read = torch.tensor([[3, *ids[start : start + 2 + n]]])
                torch.testing.assert_close(decoder.hidden(read)[0, -1], state[n - 1], atol=1e-5, rtol=1e-4)


def test_branches_are_alike(decoder):
    """Which is A and which is B says nothing."""
    ids = np.random.default_rng(1).integers(0, 9, 300)
    starts = branches(ids, 2, 8, 20)
    one, other = (gather(hidden(decoder, ids, s, 2, 8, batch=7)) for s in (starts, starts[:, ::-1].copy()))
    for name in ("distance", "equal", "within", "across"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-4, nan_ok=True)
    assert one.pairs == 20


def test_one_prefix_read_twice_never_parts(decoder):
    ids = np.random.default_rng(2).integers(0, 9, 60)
    ((a, b),) = hidden(decoder, ids, np.array([[4, 4]]), 2, 8)
    assert not measure(a, b).distance.any()


@pytest.mark.slow
def test_stories15m_follows_the_law():
    """Real text, real states: D is λ√Υ within a few percent, and growth turns from √n to n on the way."""
    if shutil.which("npm") is None:
        pytest.skip("stories15M comes with npm")
    words, model = hub.tokenizer("stories15M"), hub.load("stories15M")
    ids = words.encode(read_text(TextConfig(package="python-docs")))
    found = gather(hidden(model, ids, branches(ids, 4, 128, 48), 4, 128, bos=words.bos))
    assert found.scale * np.sqrt(found.upsilon) == pytest.approx(found.distance, rel=0.1)
    assert 8 < found.balance[-1] < 40 and 0.85 < found.tightness < 1


def test_what_is_too_long(decoder):
    with pytest.raises(ConfigError, match="context of 32"):
        next(hidden(decoder, range(9), np.array([[0, 1]]), 2, 40))
    with pytest.raises(ConfigError, match="at least one"):
        branches([1, 2, 3], 0, 1, 1)
