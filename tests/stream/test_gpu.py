"""A packed stream on a GPU, with pictures that read both ways, against each sample alone on the CPU."""

import pytest
import torch

from helpers import randomize, relative
from stream import test_pack
from stream.test_pack import VOCAB, features_for, rich
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, RotaryConfig
from vitrail.stream import merge, pack, split

pytestmark = pytest.mark.gpu

WIDTH = 64


@pytest.mark.parametrize("both", [(), ("image", "video", "query")])
def test_packed_on_the_gpu_equals_alone_on_the_cpu(both, monkeypatch):
    monkeypatch.setattr(test_pack, "WIDTH", WIDTH)
    block = BlockConfig(
        width=WIDTH, attention=AttentionConfig(heads=2, kv_heads=1), mlp=GatedConfig(hidden=96), norm="rms"
    )
    rotary = RotaryConfig(head_dim=32, layout="mrope_interleaved", sections=(6, 5, 5))
    model = randomize(Decoder(DecoderConfig(vocab=VOCAB, layers=2, block=block, rotary=rotary)))
    streams = rich(both)
    features = features_for(streams)
    alone, given = [], {feed: iter(blocks) for feed, blocks in features.items() if feed != "query"}
    for each in streams:
        own = {"query": features["query"]}
        for source in each.sources:
            if source.feed != "query":
                own.setdefault(source.feed, []).append(next(given[source.feed]))
        batch = pack([each], len(each))
        embeds = merge(model.embed(batch.ids), {feed: own[feed] for feed in batch.fills}, batch)
        alone.append(model(embeds=embeds, positions=batch.positions, plan=batch.plan())[0])
    model.cuda()
    batch = pack(streams, 40).to("cuda")
    there = {f: b.cuda() if f == "query" else [x.detach().cuda() for x in b] for f, b in features.items()}
    embeds = model.embed(batch.ids)
    logits = model(embeds=merge(embeds, there, batch), positions=batch.positions, plan=batch.plan())
    for i, (own, reference) in enumerate(zip(split(batch, logits), alone, strict=True)):
        assert relative(own.cpu(), reference) < 1e-4
        (grad,) = torch.autograd.grad(own.square().sum(), embeds, retain_graph=True)
        assert batch.segments[grad.abs().sum(-1) > 0].unique().tolist() == [i]  # exactly zero elsewhere
