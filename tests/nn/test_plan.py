"""The rule of who sees whom, against a loop written from its words and against transformers' masks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import (
    causal_mask_function,
    or_masks,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from vitrail.errors import ConfigError
from vitrail.nn import Plan, attention_plan, grid_windows

CPU = torch.device("cpu")


@st.composite
def streams(draw):
    """Rows of segments in any order, spans anywhere, a direction and perhaps a window."""
    B, L = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    ids = st.lists(st.integers(-1, 3), min_size=L, max_size=L)
    segments = torch.tensor(draw(st.lists(ids, min_size=B, max_size=B)))
    spans = torch.tensor(draw(st.lists(ids, min_size=B, max_size=B))).clamp_min(0)
    use = draw(st.sampled_from(["segments", "spans", "both"]))
    window = draw(st.none() | st.tuples(st.integers(-1, 6), st.integers(-1, 6)))
    return (
        segments if use != "spans" else None,
        spans if use != "segments" else None,
        draw(st.booleans()),
        window,
    )


@given(streams(), st.booleans())
@settings(max_examples=150)
def test_mask_is_the_rule(stream, common):
    segments, spans, causal, window = stream
    shape = (segments if segments is not None else spans).shape
    plan = replace(attention_plan(segments, spans, causal=causal, window=window), common=common)
    mask = plan.mask(shape[1], shape[1], CPU)
    assert torch.equal(plan.to("cpu").mask(shape[1], shape[1], CPU), mask)
    for b in range(shape[0]):
        for q in range(shape[1]):
            for k in range(shape[1]):
                near = window is None or (
                    (window[0] < 0 or q - k <= window[0]) and (window[1] < 0 or k - q <= window[1])
                )
                ok = (not causal or k <= q) and near
                if spans is not None:
                    ok = ok or (spans[b, q] > 0 and spans[b, q] == spans[b, k])
                if segments is not None:
                    ok = ok and (segments[b, q] == segments[b, k] or (common and segments[b, k] == 0))
                assert mask[b, 0, q, k] == bool(ok), (b, q, k)


@pytest.mark.parametrize("window", [None, 5])
def test_spans_agree_with_transformers(window):
    """Gemma 3's way: a picture's tokens see each other, whatever the direction and the window."""
    spans = torch.tensor([[0, 0, 1, 1, 1, 0, 2, 2, 0, 3, 3, 3, 3, 3, 3, 3, 0, 0]])
    L = spans.shape[1]

    def together(b, _h, q, k):
        return (spans[b, q] == spans[b, k]) & (spans[b, q] > 0)

    base = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    reference = sdpa_mask(
        batch_size=1, q_length=L, kv_length=L, mask_function=or_masks(base, together), allow_is_causal_skip=False
    )
    ours = attention_plan(spans=spans, causal=True, window=None if window is None else (window - 1, -1))
    assert torch.equal(ours.mask(L, L, CPU), reference)


def test_runs_are_found_only_where_there_are_runs():
    packed = attention_plan(torch.tensor([[0, 0, 1, 1, 1], [0, 5, 5, 5, -1]]))
    assert packed.lengths == (2, 3, 1, 3, 1)
    assert attention_plan(torch.tensor([[0, 1, 0]])).lengths is None
    cross = attention_plan(torch.tensor([[0, 0, 1]]), key_segments=torch.tensor([[0, 1, 1, 1]]))
    assert (cross.lengths, cross.key_lengths) == ((2, 1), (1, 3))
    # A segment without keys, or keys in another order, cannot be run one by one.
    assert attention_plan(torch.tensor([[0, 0, 1]]), key_segments=torch.tensor([[1, 1]])).lengths is None
    assert attention_plan(torch.tensor([[0, 1]]), key_segments=torch.tensor([[1, 0]])).lengths is None


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=60)
def test_windows_tile_every_frame(t, h, w, size):
    windows = grid_windows(t, h, w, size).view(t, h, w)
    for frame in range(t):
        for top in range(0, h, size):
            for left in range(0, w, size):
                assert len(windows[frame, top : top + size, left : left + size].unique()) == 1
    assert len(windows.unique()) == t * -(-h // size) * -(-w // size)


def test_windows_agree_with_transformers():
    from transformers.vision_utils import get_vision_window_index

    t, h, w, merge = 2, 12, 20, 2
    index, starts = get_vision_window_index(
        torch.tensor([[t, h, w]]), spatial_merge_size=merge, window_size=112, patch_size=14
    )
    ours = grid_windows(t, h // merge, w // merge, 112 // 14 // merge)[index]  # in transformers' order
    lengths = [n // merge**2 for n in torch.as_tensor(starts).diff().tolist() if n]
    assert ours.unique_consecutive(return_counts=True)[1].tolist() == lengths
    assert len(ours.unique()) == len(lengths)


@pytest.mark.parametrize(
    "bad",
    [
        {"segments": torch.zeros(4, dtype=torch.long)},
        {"segments": torch.zeros(1, 4)},
        {"segments": torch.zeros(1, 4, dtype=torch.long), "spans": torch.zeros(1, 5, dtype=torch.long)},
        {"key_segments": torch.zeros(1, 4, dtype=torch.long)},
        {"segments": torch.zeros(1, 4, dtype=torch.long), "key_segments": torch.zeros(2, 4, dtype=torch.long)},
        {"window": (-2, 3)},
    ],
)
def test_impossible_plans_are_refused(bad):
    with pytest.raises(ConfigError):
        attention_plan(**bad)


def test_a_plan_without_tensors_is_simple():
    assert Plan().simple
    assert Plan(causal=True).simple
    assert not attention_plan(torch.zeros(1, 3, dtype=torch.long)).simple
