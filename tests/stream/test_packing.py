"""Packing loses nothing, cuts nothing, and lets no sample see another."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import randomize, relative
from stream.rich_streams import VOCAB, features_for, rich
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import StreamError
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig
from vitrail.processing.grid import Grid
from vitrail.stream import (
    POSITION_RULES,
    StreamRules,
    action_part,
    assign_rows,
    build_stream,
    image_part,
    merge_features,
    pack_streams,
    query_part,
    split_by_sample,
    text_part,
    unpack_streams,
    video_part,
)

WIDTH = 24

ids = st.integers(0, VOCAB - 1)
side = st.integers(1, 3)
flags = st.sampled_from([None, True, False])
part = st.one_of(
    st.builds(text_part, st.lists(ids, min_size=1, max_size=6), st.booleans(), bidirectional=st.just(False)),
    st.builds(lambda h, w, both: image_part(Grid(h=h, w=w), bidirectional=both), side, side, flags),
    st.builds(
        lambda t, h, s, both: video_part(Grid(t=t, h=h, w=2), seconds=s, bidirectional=both),
        side,
        side,
        st.just(0.5),
        flags,
    ),
    st.builds(action_part, st.lists(ids, min_size=1, max_size=3), st.booleans()),
    st.builds(
        lambda codes: image_part(len(codes), ids=codes, loss_mask=True, bidirectional=False),
        st.lists(ids, min_size=1, max_size=4),
    ),
    st.builds(query_part, side),
)
rules = st.builds(
    StreamRules,
    positions=st.sampled_from(list(POSITION_RULES)),
    bidirectional=st.sampled_from([(), ("image",), ("image", "video")]),
)
samples = st.lists(st.lists(part, min_size=1, max_size=4), min_size=1, max_size=7)


def streams_of(drawn, rules):
    return [build_stream(parts, rules, name=f"s{i}") for i, parts in enumerate(drawn)]


@settings(max_examples=120)
@given(samples, rules, st.integers(0, 40), st.booleans())
def test_unpack_inverts_pack(drawn, rules, slack, trim):
    streams = streams_of(drawn, rules)
    batch = pack_streams(streams, max(map(len, streams)) + slack, trim=trim)
    assert unpack_streams(batch) == streams
    assert torch.equal(batch.segments >= 0, batch.kinds >= 0)
    assert int((batch.segments >= 0).sum()) == sum(map(len, streams))
    for row in range(len(batch.ids)):  # spans of a row stay distinct
        pairs = set(zip(batch.spans[row].tolist(), batch.segments[row].tolist(), strict=True)) - {(0, -1)}
        numbers = [span for span, _ in pairs if span]
        assert len(numbers) == len(set(numbers))


@settings(max_examples=120)
@given(samples, rules)
def test_targets_are_the_next_token_of_the_same_sample(drawn, rules):
    streams = streams_of(drawn, rules)
    batch = pack_streams(streams, sum(map(len, streams)))  # all in one row, where a shift could cross
    for stream, targets in zip(streams, split_by_sample(batch, batch.targets), strict=True):
        wanted = [int(i) if learn else -100 for i, learn in zip(stream.ids[1:], stream.loss_mask[1:], strict=True)]
        assert targets.tolist() == [*wanted, -100]
    assert batch.samples_without_targets == tuple(s.name for s in streams if not s.num_target_tokens)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 30))
def test_bins(lengths, budget):
    rows = assign_rows(lengths, budget)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert max(filled) <= budget
    # A row is begun only when no other has room, so no two could have been one.
    assert all(a + b > budget for n, a in enumerate(filled) for b in filled[n + 1 :])


def test_assign_and_pack_rows():
    assert assign_rows([4, 8, 1, 4, 2, 1], 10) == [[0, 2, 3, 5], [1, 4]]
    streams = [
        build_stream([text_part([i] * n, loss_mask=True)], name=f"n{i}") for i, n in enumerate([4, 8, 1, 4, 2, 1])
    ]
    batch = pack_streams(streams, 10)
    assert batch.ids.tolist() == [[0] * 4 + [2] + [3] * 4 + [5], [1] * 8 + [4] * 2]
    assert batch.fill_ratio == 1.0
    assert batch.samples_without_targets == ("n2", "n5") and "no targets in n2, n5" in str(batch)
    assert pack_streams(streams, 100, trim=True).ids.shape == (1, 20) and pack_streams(streams, 100).ids.shape == (
        1,
        100,
    )


def test_what_does_not_fit_is_refused_not_cut():
    streams = [build_stream([text_part([1] * n)], name=name) for n, name in ((3, "short"), (12, "coco/7"))]
    with pytest.raises(StreamError, match="coco/7 has 12 tokens, more than a row of 8"):
        pack_streams(streams, 8)
    with pytest.raises(StreamError, match="sample 0 has 2 tokens"):
        pack_streams([build_stream([text_part([1, 2])])], 1)
    with pytest.raises(StreamError, match="no samples"):
        pack_streams([], 8)


# ---- nothing leaks ----------------------------------------------------------------------------------------------


def decoder() -> Decoder:
    block = BlockConfig(
        width=WIDTH,
        attention=AttentionConfig(heads=2, kv_heads=1),
        mlp=GatedMLPConfig(intermediate_size=32),
        norm="rms",
    )
    rotary = RotaryConfig(head_dim=12, layout="mrope_interleaved", sections=(2, 2, 2))
    return randomize(Decoder(DecoderConfig(vocab_size=VOCAB, layers=2, block=block, rotary=rotary)))


def run(model, streams, features, budget):
    batch = pack_streams(streams, budget)
    embeds = model.embed(batch.ids)
    logits = model(
        embeds=merge_features(embeds, features, batch), positions=batch.positions, plan=batch.attention_plan()
    )
    losses = [
        F.cross_entropy(own, target, ignore_index=-100, reduction="sum")
        for own, target in zip(split_by_sample(batch, logits), split_by_sample(batch, batch.targets), strict=True)
    ]
    return batch, logits, torch.stack(losses), embeds


@pytest.mark.parametrize("both", [(), ("image", "video", "query")])
def test_packed_equals_alone(both):
    model, streams = decoder(), rich(both)
    features = features_for(streams, WIDTH)
    batch, logits, losses, _ = run(model, streams, features, 40)
    assert batch.ids.shape[0] == 2
    losses.sum().backward()
    packed = [block.grad.clone() for feed in ("image", "video") for block in features[feed]]
    weights = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    taken = {feed: iter(blocks) for feed, blocks in features.items() if feed != "query"}
    alone = features_for(streams, WIDTH)
    fresh = {feed: iter(blocks) for feed, blocks in alone.items() if feed != "query"}
    for stream, own, loss in zip(streams, split_by_sample(batch, logits), losses, strict=True):
        mine = {}
        for source in stream.sources:
            if source.feed == "query":
                mine["query"] = alone["query"]
            else:
                block = next(fresh[source.feed])
                assert torch.equal(block, next(taken[source.feed]))
                mine.setdefault(source.feed, []).append(block)
        _, by_itself, loss_alone, _ = run(model, [stream], mine, len(stream))
        assert relative(own, by_itself[0]) < 1e-5
        assert relative(loss, loss_alone[0]) < 1e-5
        loss_alone.sum().backward()
    again = [block.grad for feed in ("image", "video") for block in alone[feed]]
    for ours, reference in zip(packed + weights, again + [p.grad for p in model.parameters()], strict=True):
        assert relative(ours, reference) < 1e-5


@pytest.mark.parametrize("both", [(), ("image", "video", "query")])
def test_no_gradient_crosses_between_samples(both):
    model, streams = decoder(), rich(both)
    features = features_for(streams, WIDTH)
    batch, _, losses, embeds = run(model, streams, features, 40)
    for i, loss in enumerate(losses):
        (grad,) = torch.autograd.grad(loss, embeds, retain_graph=True)
        touched = batch.segments[grad.abs().sum(-1) > 0].unique().tolist()
        assert touched == [i]  # exactly zero elsewhere, padding included


def test_the_picture_reads_both_ways_and_words_do_not():
    streams = rich(("image",))
    batch = pack_streams(streams, 40)
    mask = batch.attention_plan().mask(40, 40, torch.device("cpu"))[0, 0]
    at = (batch.segments[0] == 0).nonzero()[:, 0]
    first, last = int(at[4]), int(at[9])  # the 2 × 3 tokens of the picture
    assert mask[first, first : last + 1].all() and not mask[first, last + 1 :].any()
    assert not mask[first - 1, first]
    assert pack_streams(rich(()), 40).attention_plan().spans is None


def test_a_batch_moves_with_all_it_holds():
    batch = pack_streams(rich(("image",)), 40).to("meta")
    tensors = [batch.ids, batch.segments, batch.targets, batch.positions, batch.feature_placements["image"].rows]
    assert {x.device.type for x in tensors} == {"meta"}
