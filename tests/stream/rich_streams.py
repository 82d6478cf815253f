"""Streams of all kinds of parts, and features for them."""

import torch

from vitrail.processing.grid import Grid
from vitrail.stream import (
    StreamRules,
    action_part,
    build_stream,
    image_part,
    query_part,
    text_part,
    video_part,
)

VOCAB = 50


def rich(both):
    """Samples of all kinds, one of them words alone, in two rows of 40."""
    rules = StreamRules(positions="qwen2.5-vl", bidirectional=both, vocab_size=VOCAB)
    parts = [
        [text_part(range(4)), image_part(Grid(h=4, w=6, merge_size=2)), text_part(range(5, 9), loss_mask=True)],
        [text_part([9, 8, 7, 6], loss_mask=True)],
        [video_part(Grid(t=3, h=2, w=2), seconds=0.5), text_part([3, 2, 1], loss_mask=True), query_part(2)],
        [
            image_part(3),
            action_part([40, 41], loss_mask=True),
            image_part(Grid(h=2, w=2)),
            action_part([42, 43], loss_mask=True),
        ],
        [
            text_part([11]),
            image_part(4, ids=[20, 21, 22, 23], loss_mask=True, bidirectional=False),
            text_part([12], loss_mask=True),
        ],
    ]
    return [build_stream(each, rules, name=f"s{i}") for i, each in enumerate(parts)]


def features_for(streams, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    own = {}
    for stream in streams:
        for source in stream.sources:
            if source.feed != "query":
                own.setdefault(source.feed, []).append(torch.randn(source.rows, width, generator=generator))
    table = torch.randn(2, width, generator=torch.Generator().manual_seed(9))
    return {feed: [block.requires_grad_() for block in blocks] for feed, blocks in own.items()} | {"query": table}
