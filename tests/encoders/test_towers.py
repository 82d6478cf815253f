"""Towers side by side."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize
from vitrail.encoders import TowerConfig, Towers, TowersConfig, ViTConfig
from vitrail.encoders.presets import TOWERS
from vitrail.errors import ConfigError
from vitrail.hub import load, save
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig, Work, cost


def one(width: int, **more) -> ViTConfig:
    block = BlockConfig(width=width, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainConfig(hidden=20))
    return ViTConfig(**{"layers": 3, "block": block, "image": 12, "patch": 3, **more})


def towers(image: int = 12) -> Towers:
    first = TowerConfig(vit=one(16), layer=-2)
    second = TowerConfig(vit=one(10, cls=True, registers=2), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    return randomize(Towers(TowersConfig(towers=(first, second), image=image))).eval()


def test_each_tower_by_its_own_norm():
    model, pixels = towers(), torch.rand(2, 3, 12, 12)
    features = model(pixels)
    assert features.shape == (2, 16, 26) and model.config.width == 26
    assert torch.allclose(features[..., :16], model.towers[0]((pixels - 0.5) / 0.5, layer=-2), atol=1e-6)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    assert torch.allclose(features[..., 16:], model.towers[1]((pixels - mean) / std), atol=1e-6)


def test_pixels_all_towers_leave_unread():
    model, pixels = towers(image=14), torch.rand(1, 3, 14, 14)
    assert torch.equal(model(pixels), model(pixels[..., :12, :12]))


def test_unequal_grids_are_refused():
    with pytest.raises(ConfigError, match=r"4 × 4 of patch 3, 3 × 3 of patch 4"):
        TowersConfig(towers=(TowerConfig(vit=one(16)), TowerConfig(vit=one(16, patch=4))), image=12)
    with pytest.raises(ConfigError, match="no tower"):
        TowersConfig(towers=())
    with pytest.raises(ConfigError, match="no layer 5"):
        TowerConfig(vit=one(16), layer=5)
    with pytest.raises(ConfigError, match="1 channels"):
        TowerConfig(vit=one(16, channels=1))


def test_save_and_load(tmp_path):
    model, pixels = towers(), torch.rand(1, 3, 12, 12)
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(pixels), model(pixels))


def test_costs():
    with torch.device("meta"):
        model, pixels = Towers(towers().config), torch.empty(2, 3, 12, 12)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(pixels)
    assert cost.flops(model, Work.full(16, batch=2)) == counter.get_total_flops()


def test_bytes_are_those_a_pass_reads():
    """Not the blocks behind a tower's layer, nor the norm after them, nor its pool."""
    first = TowerConfig(vit=one(16, pool="attention"), layer=-2)
    model = Towers(TowersConfig(towers=(first, towers().config.towers[1]), image=12))
    model(torch.rand(1, 3, 12, 12)).sum().backward()
    read = sum(p.numel() * 4 for p in model.parameters() if p.grad is not None)
    total = sum(p.numel() * 4 for p in model.parameters())
    assert cost.bytes(model, Work.full(16)) == cost.Bytes(weights=total, read=read)
    assert read < total


def test_prismatic_costs_what_is_published():
    """350–400 GFLOPs at 224², about a TFLOP at 384²."""
    for name, low, high in (("prismatic-224", 350e9, 400e9), ("prismatic-384", 0.9e12, 1.2e12)):
        with torch.device("meta"):
            model = Towers(TOWERS[name])
        assert low < cost.flops(model, Work.full((model.config.image // 14) ** 2)) < high
