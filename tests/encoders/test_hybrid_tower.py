"""Hybrid tower. tests/hub compares it with transformers."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.encoders import HybridTower, HybridTowerConfig, SAMConfig, TowerConfig, ViTConfig
from vitrail.encoders.hybrid_tower import downscale_pixels
from vitrail.errors import ConfigError
from vitrail.hub import load, save
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, Workload, cost

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainMLPConfig(intermediate_size=20))
LOW = ViTConfig(
    layers=3, block=BLOCK.replace(width=10), image_size=12, patch_size=4, cls_token=True, positions="cls_and_patches"
)
HIGH = SAMConfig(
    layers=2, block=BLOCK, image_size=40, patch_size=5, window_size=3, full_attention_layers=(0,), out_features=6
)


def hybrid(**more) -> HybridTower:
    low = TowerConfig(vit=LOW, mean=(0.1, 0.2, 0.3), layer=-2)
    return randomize(HybridTower(HybridTowerConfig(**{"low": low, "high": HIGH, **more}))).eval()


def test_features_are_concatenated():
    model, pixels = hybrid(), torch.rand(2, 3, 40, 40)
    features = model(pixels)
    assert features.shape == (2, 9, 34) and model.config.width == 34
    mean = torch.tensor((0.1, 0.2, 0.3)).view(3, 1, 1)
    small = (downscale_pixels(pixels, 12, "bilinear") - mean) / 0.5
    assert relative(features[..., 24:], model.low(small, layer=-2)) <= 1e-5
    moved = hybrid(std=(0.9, 0.5, 0.5))(pixels)
    assert torch.equal(moved[..., 24:], features[..., 24:]) and relative(moved, features) > 1e-3


def test_alpha_weights_the_second_layer():
    model, pixels = hybrid(), torch.rand(1, 3, 40, 40)
    with torch.no_grad():
        found = []
        for alpha in (0.0, 1.0, 2.0):
            model.alpha.fill_(alpha)
            found.append(model(pixels)[..., :24])
    assert relative(found[2] - found[1], found[1] - found[0]) <= 1e-4
    assert not HybridTower(model.config).alpha.any()


def test_invalid_configs_raise():
    low = TowerConfig(vit=LOW)
    with pytest.raises(ConfigError, match="no full attention"):
        HybridTowerConfig(low=low, high=HIGH.replace(full_attention_layers=()))
    with pytest.raises(ConfigError, match="1 channels"):
        HybridTowerConfig(low=low, high=HIGH.replace(channels=1))
    with pytest.raises(ConfigError, match="mean and std"):
        HybridTowerConfig(low=low, high=HIGH, std=(1.0,))


def test_half_precision_is_close():
    model, pixels = hybrid(), torch.rand(2, 3, 40, 40)
    wanted = model(pixels)
    assert relative(model.bfloat16()(pixels.bfloat16()).float(), wanted) <= 0.05


def test_save_and_load(tmp_path):
    model, pixels = hybrid(), torch.rand(1, 3, 40, 40)
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config and torch.equal(again(pixels), model(pixels))


def test_costs_equal_those_counted():
    model = hybrid()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.rand(2, 3, 40, 40))
    assert cost.count_flops(model, Workload.full_attention(9, batch_size=2)) == counter.get_total_flops()
    model(torch.rand(1, 3, 40, 40)).sum().backward()
    read = sum(p.numel() * 4 for p in model.parameters() if p.grad is not None)
    total = sum(p.numel() * 4 for p in model.parameters())
    assert (
        cost.count_bytes(model, Workload.full_attention(9)) == cost.MemoryBytes(weights=total, read=read)
        and read < total
    )
