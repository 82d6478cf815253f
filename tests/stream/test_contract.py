"""Features against places: counted before any forward pass, and put where they belong."""

import pytest
import torch
from torch import nn

from vitrail.errors import StreamError
from vitrail.processing.grid import Grid
from vitrail.stream import (
    action_part,
    build_stream,
    check_features,
    image_part,
    interleave_patches,
    merge_features,
    pack_streams,
    query_part,
    text_part,
    video_part,
)

W = 5


def samples():
    """Two pictures and queries; a video in two patches; words alone; a picture and more queries."""
    clip = interleave_patches(video_part(Grid(t=2, h=1, w=2)), [text_part([1]), text_part([2])])
    return [
        build_stream([text_part([1, 2]), image_part(Grid(h=2, w=2)), image_part(3), query_part(2)], name="zero"),
        build_stream([*clip, text_part([3])], name="one"),
        build_stream([text_part([4, 5])], name="two"),
        build_stream([image_part(Grid(h=1, w=2)), text_part([6]), query_part(3), action_part(1)], name="three"),
    ]


FITTING = {"image": [4, 3, 2], "video": [4], "query": 3, "action": [1]}


def test_what_fits_passes():
    batch = pack_streams(samples(), 16)
    check_features(batch, FITTING)
    check_features(
        batch, FITTING | {"image": 9, "query": 64, "newline": 1}
    )  # a table may hold more; another may go unused
    check_features(batch, {name: [torch.zeros(n, W) for n in rows] for name, rows in FITTING.items() if name != "query"}
          | {"query": torch.zeros(3, W)})  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": [4, 4, 2]}, r"zero, part 2 \(image, 3 tokens\): expected 3 rows of 'image' features, got 4"),
        ({"image": [4, 3, 1]}, r"three, part 0 \(image, 1×2\): expected 2 rows of 'image' features, got 1"),
        ({"image": [4, 3]}, r"three, part 0 .*: expected 2 rows of 'image' features, got none"),
        ({"image": [4, 3, 2, 2]}, "4 blocks of 'image' features are given, expected 3"),
        ({"image": 10}, "expected 9 rows of 'image' features for 3 blocks, got 10"),
        ({"video": [3]}, r"one, part 1 \(video, 1×1×2\): expected 4 rows of 'video' features, got 3"),
        ({"video": None}, "one, part 1 .*: expected 4 rows of 'video' features, got none"),
        ({"query": 2}, r"three, part 2 \(query, 3 tokens\): expected at least 3 rows in table 'query', got 2"),
        ({"smell": [3]}, "features for 'smell' are given, but the batch has no such placeholders"),
    ],
)
def test_a_mismatch_names_the_sample_and_the_part(change, message):
    batch = pack_streams(samples(), 16)
    offered = {name: rows for name, rows in (FITTING | change).items() if rows is not None}
    with pytest.raises(StreamError, match=message) as caught:
        check_features(batch, offered)
    assert caught.value.remedy


def test_features_without_places_are_not_lost_silently():
    batch = pack_streams([build_stream([text_part([1, 2])])], 8)
    check_features(batch, {"image": []})
    with pytest.raises(StreamError, match="no such placeholders"):
        check_features(batch, {"image": [576]})


@pytest.mark.parametrize("budget", [11, 16, 64])
def test_merge_puts_every_row_in_its_place(budget):
    streams = samples()
    batch = pack_streams(streams, budget)
    table = nn.Embedding(8, W)
    features = {
        "image": [torch.randn(n, W, requires_grad=True) for n in FITTING["image"]],
        "video": [torch.randn(4, W, requires_grad=True)],
        "query": torch.randn(3, W, requires_grad=True),
        "action": torch.randn(1, W, requires_grad=True),
    }
    merged = merge_features(table(batch.ids), features, batch)
    taken = {feed: iter(blocks) for feed, blocks in features.items() if isinstance(blocks, list)}
    for i, stream in enumerate(streams):  # the slow way, token by token
        blocks = [next(taken[s.feed]) if s.feed in taken else features[s.feed] for s in stream.sources]
        rows = [
            table(token) if s < 0 else blocks[s][r]
            for token, s, r in zip(stream.ids, stream.source.tolist(), stream.row.tolist(), strict=True)
        ]
        assert torch.equal(merged[batch.segments == i], torch.stack(rows))

    upstream = torch.randn_like(merged)
    merged.backward(upstream)
    for feed, fill in batch.feature_placements.items():
        blocks = features[feed]
        grad = torch.cat([b.grad for b in blocks]) if isinstance(blocks, list) else blocks.grad
        expected = torch.zeros_like(grad).index_add(0, fill.rows, upstream.flatten(0, 1)[fill.token_indices])
        assert torch.equal(grad, expected)
    words_only = upstream[(batch.source < 0) & (batch.ids == 1)].sum(0)
    assert torch.allclose(table.weight.grad[1], words_only)  # a covered embedding gets no gradient


def test_merge_checks_and_casts():
    batch = pack_streams([build_stream([text_part([1]), image_part(2)], name="pic")], 4)
    embeds = torch.zeros(1, 4, W, dtype=torch.bfloat16)
    merged = merge_features(embeds, {"image": [torch.ones(2, W)]}, batch)
    assert merged.dtype is torch.bfloat16 and merged[0, :, 0].tolist() == [0, 1, 1, 0]
    assert not embeds.any()  # the embeddings given are left as they are
    with pytest.raises(StreamError, match="pic, part 1"):
        merge_features(embeds, {"image": [torch.ones(3, W)]}, batch)
    with pytest.raises(StreamError, match="the embeddings have width 5"):
        merge_features(embeds, {"image": [torch.ones(2, W + 1)]}, batch)
    text = pack_streams([build_stream([text_part([1])])], 4)
    assert merge_features(embeds, {}, text) is embeds
