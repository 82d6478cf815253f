"""Contrastive models: outputs and costs. Agreement with released models is tested in tests/hub."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize
from vitrail.encoders import TextTowerConfig, ViTConfig
from vitrail.errors import ConfigError
from vitrail.hub import load, save
from vitrail.models.contrastive_model import CONTRASTIVE_PRESETS, ContrastiveConfig, ContrastiveModel
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, cost


def block(width: int) -> BlockConfig:
    return BlockConfig(
        width=width, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainMLPConfig(intermediate_size=20)
    )


IMAGE = ViTConfig(layers=2, block=block(16), image_size=12, patch_size=3, cls_token=True, pool="cls")
TEXT = TextTowerConfig(vocab_size=50, layers=2, block=block(12), context_length=9, pool="largest")
CLIP = ContrastiveConfig(image=IMAGE, text=TEXT, embed_dim=10)
SIGLIP = ContrastiveConfig(
    image=IMAGE.replace(cls_token=False, pool="attention"),
    text=TEXT.replace(causal=False, pool="last", head_width=16),
    log_scale=math.log(10),
    bias=-10.0,
)
EVA = ContrastiveConfig(image=IMAGE.replace(head_width=12, mask_token=True), text=TEXT)  # a head is the projection
BOTH = pytest.mark.parametrize("config", [CLIP, SIGLIP], ids=["clip", "siglip"])
ALL = pytest.mark.parametrize("config", [CLIP, SIGLIP, EVA], ids=["clip", "siglip", "eva"])


def pair(count: int = 3):
    return torch.randn(count, 3, 12, 12), torch.randint(0, 50, (count, 9))


@BOTH
def test_embeddings_are_not_normalized(config):
    model = randomize(ContrastiveModel(config)).eval()
    pixels, ids = pair()
    u, v = model.encode_image(pixels), model.encode_text(ids)
    assert u.shape == v.shape == (3, config.embed_dim or 16)
    assert not torch.allclose(u.norm(dim=-1), torch.ones(3))
    logits = model.scale * F.cosine_similarity(u[:, None], v[None], dim=-1) + (0 if model.bias is None else model.bias)
    assert torch.allclose(model(pixels, ids), logits, atol=1e-5)


@BOTH
def test_initial_scale_and_bias(config):
    model = ContrastiveModel(config)
    assert model.scale.item() == pytest.approx(1 / 0.07 if config is CLIP else 10)
    assert model.bias is None if config is CLIP else model.bias.item() == -10


@BOTH
def test_save_and_load(config, tmp_path):
    model = randomize(ContrastiveModel(config)).eval()
    pixels, ids = pair()
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == config
    assert torch.equal(again(pixels, ids), model(pixels, ids))


@ALL
def test_costs(config):
    with torch.device("meta"):
        model = ContrastiveModel(config.replace(text=config.text.replace(causal=False)))
        pixels, ids = torch.empty(3, 3, 12, 12), torch.empty(3, 9, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(pixels, ids)
    assert cost.count_flops(model, model.workload(3)) == counter.get_total_flops()
    total = sum(p.numel() * 4 for p in model.parameters())
    idle = 0 if model.image.mask is None else 4 * 16
    rows = 4 * 12 * (50 - 27)  # of the table of words, those that 27 tokens cannot meet
    assert cost.count_bytes(model, model.workload(3)) == cost.MemoryBytes(weights=total, read=total - idle - rows)


def test_head_output_is_the_embedding():
    model = randomize(ContrastiveModel(EVA)).eval()
    pixels, ids = pair()
    assert model.encode_image(pixels).shape == model.encode_text(ids).shape == (3, 12)
    assert ContrastiveModel(EVA.replace(embed_dim=5)).eval().encode_image(pixels).shape == (3, 5)


def test_invalid_configs_raise():
    with pytest.raises(ConfigError, match="the image tower has width 16, the text tower 12"):
        ContrastiveConfig(image=IMAGE, text=TEXT)
    with pytest.raises(ConfigError, match="pool"):
        ContrastiveConfig(image=IMAGE.replace(pool="none"), text=TEXT, embed_dim=4)


def test_presets_round_trip():
    for config in CONTRASTIVE_PRESETS.values():
        assert ContrastiveConfig.from_dict(config.to_dict()) == config
