"""Q-Former with text: attention masks, costs and validation."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize
from vitrail.connectors import QFormerConfig
from vitrail.encoders import ViTConfig
from vitrail.errors import ConfigError, TextError
from vitrail.models.text_qformer import TextQFormer, TextQFormerConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, cost

BLOCK = BlockConfig(width=24, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=30))
QUERIES = QFormerConfig(
    in_features=24, out_features=12, num_queries=3, layers=3, width=16, heads=2, intermediate_size=20, use_text=True
)
CONFIG = TextQFormerConfig(
    tower=ViTConfig(image_size=16, patch_size=4, layers=2, block=BLOCK, cls_token=True),
    qformer=QUERIES,
    vocab_size=50,
    context_length=7,
    cls_token_id=1,
    eos_token_id=0,
    decoder_start_token_id=2,
)


def model(**change) -> TextQFormer:
    return randomize(TextQFormer(CONFIG.replace(**change)).eval())


def sample(B: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (B, 7), generator=chance)
    ids[:, 0], ids[0, 4:] = 1, -1
    return torch.randn(B, 3, 16, 16, generator=chance), ids


def test_generation_is_causal_and_attends_to_the_image():
    made, (pixels, ids) = model(), sample()
    features = made.forward_features(pixels)
    rows = made.embed(ids.clamp_min(0)).detach().requires_grad_()
    queries = features.detach().requires_grad_()
    embedded = type(made)._embed_text
    made._embed_text = lambda ids: embedded(made, ids) * 0 + rows
    num_images, result = made.encode_for_generation(queries, ids)
    for at in range(7):
        found, seen = torch.autograd.grad(
            made.compute_logits(result[1, at]).square().sum(), [rows, queries], retain_graph=True
        )
        reached = found[1].abs().sum(-1) > 0
        assert reached[: at + 1].all() and not reached[at + 1 :].any() and not found[0].any()
        assert seen[1].any() and not seen[0].any()
    assert torch.autograd.grad(num_images.square().sum(), rows, allow_unused=True)[0].abs().sum() == 0


def test_generated_text_does_not_change_the_queries():
    made, (pixels, ids) = model(keep_prefix_tokens=True), sample()
    num_images, _ = made.encode_for_generation(made.forward_features(pixels), ids)
    torch.testing.assert_close(made.qformer.project(num_images), made.encode_image(pixels))


def test_generation_has_its_own_start_token():
    made, (pixels, ids) = model(), sample()
    features, other = made.forward_features(pixels), ids.clone()
    other[:, 0] = 9
    assert torch.equal(made.encode_for_generation(features, ids)[1], made.encode_for_generation(features, other)[1])
    assert not torch.equal(made.encode_text(ids), made.encode_text(other))
    assert ids[0, 0] == 1  # and is left as it was


def test_padding_is_ignored():
    made, (pixels, ids) = model(), sample()
    features, short = made.forward_features(pixels), ids[:1, :4]
    torch.testing.assert_close(made.encode_text(ids)[:1], made.encode_text(short))
    torch.testing.assert_close(
        made.compute_match_logits(features, ids)[:1], made.compute_match_logits(features[:1], short)
    )
    torch.testing.assert_close(
        made.encode_for_generation(features, ids)[1][:1, :4], made.encode_for_generation(features[:1], short)[1]
    )


def test_generation_head_matches_bert():
    """A dense layer, GELU, a norm, and the tied embedding."""
    made, (pixels, ids) = model(), sample()
    result = made.encode_for_generation(made.forward_features(pixels), ids)[1]
    x = torch.nn.functional.gelu(result @ made.writer.dense.weight.T + made.writer.dense.bias)
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-12).sqrt()
    x = x * made.writer.norm.weight + made.writer.norm.bias
    torch.testing.assert_close(
        made.compute_logits(result), x @ made.embed.weight.T + made.writer.bias, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("prefix", [False, True])
def test_flops_match_torch_counter(prefix):
    made, (pixels, ids) = model(keep_prefix_tokens=prefix), sample()
    ids = ids.clamp_min(3)
    features = made.forward_features(pixels)
    for run, wanted in [
        (lambda: made(pixels, ids), cost.count_flops(made, made.workload(2))),
        (
            lambda: made.qformer.encode_jointly(features, made._embed_text(ids), "itm"),
            made.qformer.count_pass_flops("itm", 2, made.config.features_per_image, 7),
        ),
    ]:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == wanted
    held = cost.count_bytes(made, made.workload(2))
    assert held.weights == sum(p.numel() * 4 for p in made.parameters()) > held.read


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qformer": QUERIES.replace(use_text=False)}, "text = true"),
        ({"qformer": QUERIES.replace(in_features=8)}, "in_features = 24"),
        ({"vision_feature_layer": 5}, "layer"),
        ({"context_length": 2}, "context_length"),
        ({"decoder_start_token_id": 50}, "decoder_start_token_id is 50"),
        ({"decoder_start_token_id": 1}, "share an id"),
    ],
)
def test_invalid_configs_raise(change, message):
    with pytest.raises(ConfigError, match=message):
        CONFIG.replace(**change)


def test_long_texts_and_missing_head_raise():
    with pytest.raises(TextError, match="truncate it to 7"):
        model().encode_text(torch.ones(1, 8, dtype=torch.long))
    made, (pixels, ids) = model(decoder_start_token_id=None), sample()
    with pytest.raises(ConfigError, match="dec"):
        made.encode_for_generation(made.forward_features(pixels), ids)


def test_defaults_match_blip_2():
    """A temperature of 0.07, and texts of at most 32 tokens."""
    plain = TextQFormerConfig(tower=CONFIG.tower, qformer=CONFIG.qformer, vocab_size=30_522)
    assert math.exp(-plain.log_scale) == pytest.approx(0.07) and plain.context_length == 32
