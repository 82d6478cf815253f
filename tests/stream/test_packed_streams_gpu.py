"""A packed stream on a GPU, with bidirectional attention over images, against single samples on the CPU."""

import pytest
import torch

from helpers import randomize, relative
from stream.rich_streams import VOCAB, features_for, rich
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig
from vitrail.stream import merge_features, pack_streams, split_by_sample

pytestmark = pytest.mark.gpu

WIDTH = 64


@pytest.mark.parametrize("bidirectional", [(), ("image", "video", "query")])
def test_packed_rows_on_a_gpu_equal_single_samples_on_the_cpu(bidirectional):
    block = BlockConfig(
        width=WIDTH,
        attention=AttentionConfig(heads=2, kv_heads=1),
        mlp=GatedMLPConfig(intermediate_size=96),
        norm="rms",
    )
    rotary = RotaryConfig(head_dim=32, layout="mrope_interleaved", sections=(6, 5, 5))
    model = randomize(Decoder(DecoderConfig(vocab_size=VOCAB, layers=2, block=block, rotary=rotary)))
    streams = rich(bidirectional)
    features = features_for(streams, WIDTH)
    references, remaining = [], {feed: iter(blocks) for feed, blocks in features.items() if feed != "query"}
    for stream in streams:
        own_features = {"query": features["query"]}
        for source in stream.sources:
            if source.feed != "query":
                own_features.setdefault(source.feed, []).append(next(remaining[source.feed]))
        batch = pack_streams([stream], len(stream))
        embeds = merge_features(
            model.embed(batch.ids), {feed: own_features[feed] for feed in batch.feature_placements}, batch
        )
        references.append(model(embeds=embeds, positions=batch.positions, plan=batch.attention_plan())[0])
    model.cuda()
    batch = pack_streams(streams, 40).to("cuda")
    gpu_features = {f: b.cuda() if f == "query" else [x.detach().cuda() for x in b] for f, b in features.items()}
    embeds = model.embed(batch.ids)
    logits = model(
        embeds=merge_features(embeds, gpu_features, batch), positions=batch.positions, plan=batch.attention_plan()
    )
    for i, (own, reference) in enumerate(zip(split_by_sample(batch, logits), references, strict=True)):
        assert relative(own.cpu(), reference) < 1e-4
        (grad,) = torch.autograd.grad(own.square().sum(), embeds, retain_graph=True)
        assert batch.segments[grad.abs().sum(-1) > 0].unique().tolist() == [i]  # exactly zero in other samples
