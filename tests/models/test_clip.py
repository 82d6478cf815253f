"""Contrastive models: what they give and what they cost. Agreement with the field is in tests/hub."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize
from vitrail.encoders import TextConfig, ViTConfig
from vitrail.errors import ConfigError
from vitrail.hub import load, save
from vitrail.models.clip import CONTRASTIVE, Contrastive, ContrastiveConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig, cost


def block(width: int) -> BlockConfig:
    return BlockConfig(width=width, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainConfig(hidden=20))


IMAGE = ViTConfig(layers=2, block=block(16), image=12, patch=3, cls=True, pool="cls")
TEXT = TextConfig(vocab=50, layers=2, block=block(12), context=9, pool="largest")
CLIP = ContrastiveConfig(image=IMAGE, text=TEXT, embed=10)
SIGLIP = ContrastiveConfig(
    image=IMAGE.with_(cls=False, pool="attention"),
    text=TEXT.with_(causal=False, pool="last", head=16),
    log_scale=math.log(10),
    bias=-10.0,
)
EVA = ContrastiveConfig(image=IMAGE.with_(head=12, mask=True), text=TEXT)  # a head is the projection
BOTH = pytest.mark.parametrize("config", [CLIP, SIGLIP], ids=["clip", "siglip"])
ALL = pytest.mark.parametrize("config", [CLIP, SIGLIP, EVA], ids=["clip", "siglip", "eva"])


def pair(count: int = 3):
    return torch.randn(count, 3, 12, 12), torch.randint(0, 50, (count, 9))


@BOTH
def test_embeddings_are_not_normalised(config):
    model = randomize(Contrastive(config)).eval()
    pixels, ids = pair()
    u, v = model.encode_image(pixels), model.encode_text(ids)
    assert u.shape == v.shape == (3, config.embed or 16)
    assert not torch.allclose(u.norm(dim=-1), torch.ones(3))
    logits = model.scale * F.cosine_similarity(u[:, None], v[None], dim=-1) + (0 if model.bias is None else model.bias)
    assert torch.allclose(model(pixels, ids), logits, atol=1e-5)


@BOTH
def test_starting_scale_and_bias(config):
    model = Contrastive(config)
    assert model.scale.item() == pytest.approx(1 / 0.07 if config is CLIP else 10)
    assert model.bias is None if config is CLIP else model.bias.item() == -10


@BOTH
def test_save_and_load(config, tmp_path):
    model = randomize(Contrastive(config)).eval()
    pixels, ids = pair()
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == config
    assert torch.equal(again(pixels, ids), model(pixels, ids))


@ALL
def test_costs(config):
    with torch.device("meta"):
        model = Contrastive(config.with_(text=config.text.with_(causal=False)))
        pixels, ids = torch.empty(3, 3, 12, 12), torch.empty(3, 9, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(pixels, ids)
    assert cost.flops(model, model.work(3)) == counter.get_total_flops()
    total = sum(p.numel() * 4 for p in model.parameters())
    idle = 0 if model.image.mask is None else 4 * 16
    rows = 4 * 12 * (50 - 27)  # of the table of words, those that 27 tokens cannot meet
    assert cost.bytes(model, model.work(3)) == cost.Bytes(weights=total, read=total - idle - rows)


def test_a_head_is_what_is_compared():
    model = randomize(Contrastive(EVA)).eval()
    pixels, ids = pair()
    assert model.encode_image(pixels).shape == model.encode_text(ids).shape == (3, 12)
    assert Contrastive(EVA.with_(embed=5)).eval().encode_image(pixels).shape == (3, 5)


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="width 16 cannot be compared with texts of width 12"):
        ContrastiveConfig(image=IMAGE, text=TEXT)
    with pytest.raises(ConfigError, match="pool"):
        ContrastiveConfig(image=IMAGE.with_(pool="none"), text=TEXT, embed=4)


def test_released_models_are_plain_data():
    for config in CONTRASTIVE.values():
        assert ContrastiveConfig.read(config.plain()) == config
