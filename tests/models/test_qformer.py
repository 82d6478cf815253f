"""A Q-Former with a text beside it: who learns from whom, and what it costs."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize
from vitrail.connectors import QFormerConfig
from vitrail.encoders import ViTConfig
from vitrail.errors import ConfigError, TextError
from vitrail.models.qformer import TextQFormer, TextQFormerConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig, cost

BLOCK = BlockConfig(width=24, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=30))
QUERIES = QFormerConfig(reads=24, gives=12, queries=3, layers=3, width=16, heads=2, hidden=20, text=True)
CONFIG = TextQFormerConfig(
    tower=ViTConfig(image=16, patch=4, layers=2, block=BLOCK, cls=True),
    qformer=QUERIES,
    vocab=50,
    context=7,
    cls=1,
    eos=0,
    dec=2,
)


def model(**change) -> TextQFormer:
    return randomize(TextQFormer(CONFIG.with_(**change)).eval())


def sample(B: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (B, 7), generator=chance)
    ids[:, 0], ids[0, 4:] = 1, -1
    return torch.randn(B, 3, 16, 16, generator=chance), ids


def test_no_word_sees_the_future_and_every_word_sees_the_picture():
    made, (pixels, ids) = model(), sample()
    features = made.features(pixels)
    rows = made.embed(ids.clamp_min(0)).detach().requires_grad_()
    queries = features.detach().requires_grad_()
    embedded = type(made)._embedded
    made._embedded = lambda ids: embedded(made, ids) * 0 + rows
    looked, told = made.write(queries, ids)
    for at in range(7):
        found, seen = torch.autograd.grad(made.logits(told[1, at]).square().sum(), [rows, queries], retain_graph=True)
        reached = found[1].abs().sum(-1) > 0
        assert reached[: at + 1].all() and not reached[at + 1 :].any() and not found[0].any()
        assert seen[1].any() and not seen[0].any()
    assert torch.autograd.grad(looked.square().sum(), rows, allow_unused=True)[0].abs().sum() == 0


def test_what_the_queries_find_beside_words_that_are_written_is_what_they_find_alone():
    made, (pixels, ids) = model(prefix=True), sample()
    looked, _ = made.write(made.features(pixels), ids)
    torch.testing.assert_close(made.qformer.project(looked), made.encode_image(pixels))


def test_a_text_is_written_from_its_own_beginning():
    made, (pixels, ids) = model(), sample()
    features, other = made.features(pixels), ids.clone()
    other[:, 0] = 9
    assert torch.equal(made.write(features, ids)[1], made.write(features, other)[1])
    assert not torch.equal(made.encode_text(ids), made.encode_text(other))
    assert ids[0, 0] == 1  # and is left as it was


def test_padding_says_nothing():
    made, (pixels, ids) = model(), sample()
    features, short = made.features(pixels), ids[:1, :4]
    torch.testing.assert_close(made.encode_text(ids)[:1], made.encode_text(short))
    torch.testing.assert_close(made.match(features, ids)[:1], made.match(features[:1], short))
    torch.testing.assert_close(made.write(features, ids)[1][:1, :4], made.write(features[:1], short)[1])


def test_the_head_is_berts():
    """A layer, gelu, a norm, and the embeddings themselves."""
    made, (pixels, ids) = model(), sample()
    told = made.write(made.features(pixels), ids)[1]
    x = torch.nn.functional.gelu(told @ made.writer.dense.weight.T + made.writer.dense.bias)
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-12).sqrt()
    x = x * made.writer.norm.weight + made.writer.norm.bias
    torch.testing.assert_close(made.logits(told), x @ made.embed.weight.T + made.writer.bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prefix", [False, True])
def test_costs_are_those_that_torch_counts(prefix):
    made, (pixels, ids) = model(prefix=prefix), sample()
    ids = ids.clamp_min(3)
    features = made.features(pixels)
    for run, wanted in [
        (lambda: made(pixels, ids), cost.flops(made, made.work(2))),
        (
            lambda: made.qformer.both(features, made._embedded(ids), "itm"),
            made.qformer.pass_flops("itm", 2, made.config.seen, 7),
        ),
    ]:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == wanted
    held = cost.bytes(made, made.work(2))
    assert held.weights == sum(p.numel() * 4 for p in made.parameters()) > held.read


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"qformer": QUERIES.with_(text=False)}, "text = true"),
        ({"qformer": QUERIES.with_(reads=8)}, "reads = 24"),
        ({"layer": 5}, "layer"),
        ({"context": 2}, "context"),
        ({"dec": 50}, "dec is 50"),
        ({"dec": 1}, "two things"),
    ],
)
def test_what_cannot_be_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        CONFIG.with_(**change)


def test_texts_that_are_too_long_and_a_model_that_does_not_write():
    with pytest.raises(TextError, match="cut the text to 7"):
        model().encode_text(torch.ones(1, 8, dtype=torch.long))
    made, (pixels, ids) = model(dec=None), sample()
    with pytest.raises(ConfigError, match="dec"):
        made.write(made.features(pixels), ids)


def test_it_begins_as_blip_2_does():
    """A temperature of 0.07, and texts of at most 32 tokens."""
    plain = TextQFormerConfig(tower=CONFIG.tower, qformer=CONFIG.qformer, vocab=30_522)
    assert math.exp(-plain.log_scale) == pytest.approx(0.07) and plain.context == 32
