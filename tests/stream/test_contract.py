"""Features against places: counted before any forward pass, and put where they belong."""

import pytest
import torch
from torch import nn

from vitrail.errors import StreamError
from vitrail.processing.grid import Grid
from vitrail.stream import actions, build, check, merge, pack, patch_by_patch, picture, queries, video, words

W = 5


def samples():
    """Two pictures and queries; a video in two patches; words alone; a picture and more queries."""
    clip = patch_by_patch(video(Grid(t=2, h=1, w=2)), [words([1]), words([2])])
    return [
        build([words([1, 2]), picture(Grid(h=2, w=2)), picture(3), queries(2)], name="zero"),
        build([*clip, words([3])], name="one"),
        build([words([4, 5])], name="two"),
        build([picture(Grid(h=1, w=2)), words([6]), queries(3), actions(1)], name="three"),
    ]


FITTING = {"image": [4, 3, 2], "video": [4], "query": 3, "action": [1]}


def test_what_fits_passes():
    batch = pack(samples(), 16)
    check(batch, FITTING)
    check(batch, FITTING | {"image": 9, "query": 64, "newline": 1})  # a table may hold more; another may go unused
    check(batch, {name: [torch.zeros(n, W) for n in rows] for name, rows in FITTING.items() if name != "query"}
          | {"query": torch.zeros(3, W)})  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"image": [4, 4, 2]}, r"zero, part 2 \(image, 3 tokens\): expected 3 rows of 'image' features, got 4"),
        ({"image": [4, 3, 1]}, r"three, part 0 \(image, 1×2\): expected 2 rows of 'image' features, got 1"),
        ({"image": [4, 3]}, r"three, part 0 .*: expected 2 rows of 'image' features, got none"),
        ({"image": [4, 3, 2, 2]}, "4 blocks of 'image' features for 3 that are expected"),
        ({"image": 10}, "expected 9 rows of 'image' features for 3 blocks, got 10"),
        ({"video": [3]}, r"one, part 1 \(video, 1×1×2\): expected 4 rows of 'video' features, got 3"),
        ({"video": None}, "one, part 1 .*: expected 4 rows of 'video' features, got none"),
        ({"query": 2}, r"three, part 2 \(query, 3 tokens\): expected at least 3 rows in the table 'query', got 2"),
        ({"smell": [3]}, "features for 'smell', but no place is reserved"),
    ],
)
def test_a_mismatch_names_the_sample_and_the_part(change, says):
    batch = pack(samples(), 16)
    offered = {name: rows for name, rows in (FITTING | change).items() if rows is not None}
    with pytest.raises(StreamError, match=says) as caught:
        check(batch, offered)
    assert caught.value.remedy


def test_features_without_places_are_not_lost_silently():
    batch = pack([build([words([1, 2])])], 8)
    check(batch, {"image": []})
    with pytest.raises(StreamError, match="no place is reserved"):
        check(batch, {"image": [576]})


@pytest.mark.parametrize("budget", [11, 16, 64])
def test_merge_puts_every_row_in_its_place(budget):
    streams = samples()
    batch = pack(streams, budget)
    table = nn.Embedding(8, W)
    features = {
        "image": [torch.randn(n, W, requires_grad=True) for n in FITTING["image"]],
        "video": [torch.randn(4, W, requires_grad=True)],
        "query": torch.randn(3, W, requires_grad=True),
        "action": torch.randn(1, W, requires_grad=True),
    }
    merged = merge(table(batch.ids), features, batch)
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
    for feed, fill in batch.fills.items():
        blocks = features[feed]
        grad = torch.cat([b.grad for b in blocks]) if isinstance(blocks, list) else blocks.grad
        expected = torch.zeros_like(grad).index_add(0, fill.rows, upstream.flatten(0, 1)[fill.places])
        assert torch.equal(grad, expected)
    words_only = upstream[(batch.source < 0) & (batch.ids == 1)].sum(0)
    assert torch.allclose(table.weight.grad[1], words_only)  # a covered embedding gets no gradient


def test_merge_checks_and_casts():
    batch = pack([build([words([1]), picture(2)], name="pic")], 4)
    embeds = torch.zeros(1, 4, W, dtype=torch.bfloat16)
    merged = merge(embeds, {"image": [torch.ones(2, W)]}, batch)
    assert merged.dtype is torch.bfloat16 and merged[0, :, 0].tolist() == [0, 1, 1, 0]
    assert not embeds.any()  # the embeddings given are left as they are
    with pytest.raises(StreamError, match="pic, part 1"):
        merge(embeds, {"image": [torch.ones(3, W)]}, batch)
    with pytest.raises(StreamError, match="do not fit embeddings 5 wide"):
        merge(embeds, {"image": [torch.ones(2, W + 1)]}, batch)
    text = pack([build([words([1])])], 4)
    assert merge(embeds, {}, text) is embeds
