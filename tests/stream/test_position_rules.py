"""Positions against transformers, and the authors' rule where transformers leaves it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2VLConfig,
    Qwen2VLModel,
    Qwen3VLConfig,
    Qwen3VLModel,
)

from vitrail.nn import RotaryConfig, RotaryEmbedding
from vitrail.processing.grid import Grid
from vitrail.processing.resolution_policies import get_policy
from vitrail.stream import StreamRules, build_stream, image_part, interleave_patches, query_part, text_part, video_part

MODELS = {
    "qwen2-vl": (Qwen2VLModel, Qwen2VLConfig),
    "qwen2.5-vl": (Qwen2_5_VLModel, Qwen2_5_VLConfig),
    "qwen3-vl": (Qwen3VLModel, Qwen3VLConfig),
}
TYPES = {"text": 0, "image": 1, "video": 2}
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
}
VISION = {"depth": 1, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module")
def oracles():
    """family → a model on the meta device: only its position rule is asked."""
    found = {}
    for family, (model, config) in MODELS.items():
        taps = {"deepstack_visual_indexes": [0]} if family == "qwen3-vl" else {}
        ticks = {"tokens_per_second": 2} if family == "qwen2.5-vl" else {}
        with torch.device("meta"):
            found[family] = model(config(text_config=TEXT, vision_config=VISION | taps | ticks))
    return found


def theirs(model, parts) -> torch.Tensor:
    """(L, 3) by `get_rope_index`. Parts of one video are given to it as one grid, as its processor does."""
    types = torch.tensor([[TYPES[part.kind] for part in parts for _ in range(part.num_tokens)]])
    grids = {"image": [], "video": []}
    seconds = []
    for part in parts:
        if part.kind != "text" and part.first_row == 0:
            count = (
                sum(p.shape.t for p in parts if p.source is part.source) if part.source is not None else part.shape.t
            )
            grids[part.kind].append([count, part.shape.h, part.shape.w])
            seconds += [part.seconds] if part.kind == "video" else []
    given = {f"{kind}_grid_thw": torch.tensor(rows) if rows else None for kind, rows in grids.items()}
    if "5" in type(model).__name__:
        given["second_per_grid_ts"] = seconds or None
    positions, _ = model.get_rope_index(torch.zeros_like(types), types, **given)
    return positions[:, 0].T


def grids(t: int = 1):
    side = st.integers(1, 5)
    return st.builds(lambda t, h, w: Grid(t=t, h=2 * h, w=2 * w, merge_size=2), st.integers(1, t), side, side)


text = st.integers(1, 6).map(lambda n: text_part([1] * n))
still = grids().map(image_part)
SECONDS = (0.1, 0.5, 2 / 3, 1.0, 2 / 29.97, 1.7)
clip = st.builds(lambda grid, seconds: video_part(grid, seconds=seconds), grids(9), st.sampled_from(SECONDS))


def interleaved(vision):
    """Text between all vision: transformers cannot tell neighbours of one kind apart."""
    return st.lists(st.tuples(text, vision), min_size=1, max_size=4).map(
        lambda pairs: [p for pair in pairs for p in pair]
    )


@pytest.mark.parametrize("family", MODELS)
def test_pictures_agree_everywhere(oracles, family):
    @settings(max_examples=40)
    @given(interleaved(still), st.booleans())
    def run(parts, words_last):
        parts = [*parts, text_part([1, 1])] if words_last else parts
        for rule in (family, f"{family}/transformers") if family != "qwen3-vl" else (family,):
            assert torch.equal(
                build_stream(parts, StreamRules(positions=rule)).positions, theirs(oracles[family], parts)
            )

    run()


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2.5-vl"])
def test_videos_agree_under_the_rule_named_after_transformers(oracles, family):
    @settings(max_examples=60)
    @given(interleaved(st.one_of(still, clip)))
    def run(parts):
        parts = [*parts, text_part([1, 1])]
        rules = StreamRules(positions=f"{family}/transformers", tokens_per_second=2)
        assert torch.equal(build_stream(parts, rules).positions, theirs(oracles[family], parts))

    run()


def test_timestamped_videos_agree(oracles):
    @settings(max_examples=40)
    @given(st.lists(st.tuples(clip, st.integers(1, 5)), min_size=1, max_size=3), text)
    def run(clips, first):
        parts = [first]
        for each, stamp in clips:
            parts += interleave_patches(each, [text_part([1] * stamp)] * each.shape.t, after=[text_part([1])])
        ours = build_stream(parts, StreamRules(positions="qwen3-vl"))
        assert torch.equal(ours.positions, theirs(oracles["qwen3-vl"], parts))
        assert [source.rows for source in ours.sources] == [each.num_tokens for each, _ in clips]

    run()


def test_a_long_video_steps_back_only_in_transformers(oracles):
    """Four temporal patches of 2 × 2 tokens: t reaches 3, the sides only 1."""
    parts = [text_part([1]), video_part(Grid(t=4, h=4, w=4, merge_size=2)), text_part([1, 1])]
    ours = build_stream(parts, StreamRules(positions="qwen2-vl")).positions
    assert ours[-2:].tolist() == [[5, 5, 5], [6, 6, 6]]  # 1 + 3 on the axis of time, and one more
    assert ours[1:17, 0].tolist() == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    back = theirs(oracles["qwen2-vl"], parts)
    assert back[-2:].tolist() == [[3, 3, 3], [4, 4, 4]]  # the position of a frame that came before
    assert torch.equal(ours[:-2], back[:-2])


@pytest.mark.parametrize(
    ("seconds", "rate", "times"),
    [
        (0.5, 2, [0, 1, 2, 3]),  # truncating the half seconds first would stop the clock
        (1.0, 2, [0, 2, 4, 6]),
        (0.25, 2, [0, 0, 1, 1]),
        (2 / 3, 2, [0, 1, 2, 4]),  # 0, 1.33, 2.67, 4
        (1.0, 25, [0, 25, 50, 75]),
    ],
)
def test_absolute_time_is_multiplied_before_it_is_truncated(seconds, rate, times):
    parts = [text_part([1, 1, 1]), video_part(Grid(t=4, h=2, w=4, merge_size=2), seconds=seconds), text_part([1])]
    ours = build_stream(parts, StreamRules(positions="qwen2.5-vl", tokens_per_second=rate)).positions
    assert (ours[3:-1, 0] - 3).tolist() == [t for t in times for _ in range(2)]
    assert ours[3:-1, 1:].tolist() == [[3, 3], [3, 4]] * 4
    assert ours[-1].tolist() == [3 + max(times[-1], 1) + 1] * 3


def test_one_temporal_patch_at_a_time():
    grid = Grid(t=2, h=4, w=6, merge_size=2)  # 2 × 3 tokens each
    stamps = [text_part([7, 8]), text_part([7, 8, 9])]
    ours = build_stream(
        interleave_patches(video_part(grid), stamps, after=[text_part([5])]), StreamRules(positions="qwen3-vl")
    ).positions
    assert ours[2:8].tolist() == [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]]
    assert ours[8:12, 0].tolist() == [5, 6, 7, 8]  # the end mark, the next stamp
    assert ours[12].tolist() == [9, 9, 9] and ours[-1].tolist() == [12, 12, 12]
    bare = build_stream(
        [video_part(grid)], StreamRules(positions="qwen3-vl")
    ).positions  # without words the patches follow each other
    assert bare[:, 0].tolist() == [0] * 6 + [3] * 6


@pytest.mark.parametrize("rule", ["1d", *MODELS, "qwen2-vl/transformers", "qwen2.5-vl/transformers"])
def test_text_is_one_dimensional_under_every_rule(rule):
    stream = build_stream([text_part([1] * 5), query_part(3), text_part([1] * 4)], StreamRules(positions=rule))
    assert torch.equal(stream.positions, torch.arange(12)[:, None].expand(-1, 3))
    layouts = RotaryConfig(head_dim=16, layout="mrope", sections=(2, 3, 3)), RotaryConfig(head_dim=16)
    three, one = (RotaryEmbedding(layout) for layout in layouts)
    assert torch.equal(three(stream.positions[None]).cos, one(torch.arange(12)[None]).cos)


def test_newlines_are_a_column_or_a_word():
    tiles = get_policy("llava-next").layout(336, 672)
    base, stitched = tiles.spans
    one_d = build_stream([image_part(tiles)], StreamRules(positions="1d"))
    assert torch.equal(one_d.positions[:, 0], torch.arange(tiles.num_tokens))
    ours = build_stream([image_part(tiles), text_part([1])], StreamRules(positions="qwen2-vl")).positions
    rows, columns = stitched.size
    assert ours[base.num_tokens].tolist() == [24, 24, 24]
    assert ours[base.num_tokens + columns].tolist() == [24, 24, 24 + columns]  # the first row's newline
    assert ours[-1].tolist() == [24 + max(rows, columns + 1)] * 3
    views = get_policy("hd9").layout(300, 400)
    ours = build_stream([image_part(views)], StreamRules(positions="qwen2-vl")).positions
    assert ours[144].tolist() == [12, 12, 12] and ours[145].tolist() == [13, 13, 13]
