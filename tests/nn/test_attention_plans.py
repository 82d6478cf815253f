"""Attention plans against a loop over the rule and against transformers' masks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import and_masks, causal_mask_function, or_masks, sdpa_mask, sliding_window_overlay

from vitrail.errors import ConfigError
from vitrail.nn import AttentionPlan, attention_plan, compute_window_ids

CPU = torch.device("cpu")


@st.composite
def streams(draw):
    """Random segments, spans, causality and windows."""
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


@given(streams(), st.booleans(), st.booleans())
@settings(max_examples=150)
def test_mask_equals_the_rule(stream, common, limited):
    segments, spans, causal, window = stream
    shape = (segments if segments is not None else spans).shape
    plan = replace(
        attention_plan(segments, spans, causal=causal, window=window),
        shares_segment_zero=common,
        window_limits_spans=limited,
    )
    mask = plan.mask(shape[1], shape[1], CPU)
    assert torch.equal(plan.to("cpu").mask(shape[1], shape[1], CPU), mask)
    for b in range(shape[0]):
        for q in range(shape[1]):
            for k in range(shape[1]):
                near = window is None or (
                    (window[0] < 0 or q - k <= window[0]) and (window[1] < 0 or k - q <= window[1])
                )
                ok, together = not causal or k <= q, spans is not None and 0 < spans[b, q] == spans[b, k]
                ok = (ok or together) and near if limited else (ok and near) or together
                if segments is not None:
                    ok = ok and (segments[b, q] == segments[b, k] or (common and segments[b, k] == 0))
                assert mask[b, 0, q, k] == bool(ok), (b, q, k)


@pytest.mark.parametrize("window", [None, 5])
def test_spans_agree_with_transformers(window):
    """As in Gemma 3: tokens of an image attend to each other across causality, but not across the window."""
    spans = torch.tensor([[0, 0, 1, 1, 1, 0, 2, 2, 0, 3, 3, 3, 3, 3, 3, 3, 0, 0]])
    L = spans.shape[1]

    def together(b, _h, q, k):
        return (spans[b, q] == spans[b, k]) & (spans[b, q] > 0)

    rule = or_masks(causal_mask_function, together)
    rule = rule if window is None else and_masks(rule, sliding_window_overlay(window))
    reference = sdpa_mask(batch_size=1, q_length=L, kv_length=L, mask_function=rule, allow_is_causal_skip=False)
    ours = attention_plan(spans=spans, causal=True, window=None if window is None else (window - 1, -1))
    assert torch.equal(ours.mask(L, L, CPU), reference)


def test_segment_lengths_exist_only_for_contiguous_segments():
    packed = attention_plan(torch.tensor([[0, 0, 1, 1, 1], [0, 5, 5, 5, -1]]))
    assert packed.segment_lengths == (2, 3, 1, 3, 1)
    assert attention_plan(torch.tensor([[0, 1, 0]])).segment_lengths is None
    cross = attention_plan(torch.tensor([[0, 0, 1]]), key_segments=torch.tensor([[0, 1, 1, 1]]))
    assert (cross.segment_lengths, cross.key_segment_lengths) == ((2, 1), (1, 3))
    # A segment without keys, or keys in another order, cannot be split.
    assert attention_plan(torch.tensor([[0, 0, 1]]), key_segments=torch.tensor([[1, 1]])).segment_lengths is None
    assert attention_plan(torch.tensor([[0, 1]]), key_segments=torch.tensor([[1, 0]])).segment_lengths is None


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=60)
def test_windows_tile_every_frame(t, h, w, size):
    windows = compute_window_ids(t, h, w, size).view(t, h, w)
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
    ours = compute_window_ids(t, h // merge, w // merge, 112 // 14 // merge)[index]  # in transformers' order
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
def test_invalid_plans_raise(bad):
    with pytest.raises(ConfigError):
        attention_plan(**bad)


def test_plan_without_tensors_is_maskless():
    assert AttentionPlan().is_maskless
    assert AttentionPlan(causal=True).is_maskless
    assert not attention_plan(torch.zeros(1, 3, dtype=torch.long)).is_maskless
