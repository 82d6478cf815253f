"""Tower ensembles."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize
from vitrail.encoders import MultiTower, MultiTowerConfig, TowerConfig, ViTConfig
from vitrail.encoders.presets import MULTI_TOWER_PRESETS
from vitrail.errors import ConfigError
from vitrail.hub import load, save
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, Workload, cost


def one(width: int, **more) -> ViTConfig:
    block = BlockConfig(
        width=width, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainMLPConfig(intermediate_size=20)
    )
    return ViTConfig(**{"layers": 3, "block": block, "image_size": 12, "patch_size": 3, **more})


def towers(image: int = 12) -> MultiTower:
    first = TowerConfig(vit=one(16), layer=-2)
    second = TowerConfig(vit=one(10, cls_token=True, register_tokens=2), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    return randomize(MultiTower(MultiTowerConfig(towers=(first, second), image_size=image))).eval()


def test_each_tower_has_its_normalization():
    model, pixels = towers(), torch.rand(2, 3, 12, 12)
    features = model(pixels)
    assert features.shape == (2, 16, 26) and model.config.width == 26
    assert torch.allclose(features[..., :16], model.towers[0]((pixels - 0.5) / 0.5, layer=-2), atol=1e-6)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    assert torch.allclose(features[..., 16:], model.towers[1]((pixels - mean) / std), atol=1e-6)


def test_cropped_pixels_have_no_effect():
    model, pixels = towers(image=14), torch.rand(1, 3, 14, 14)
    assert torch.equal(model(pixels), model(pixels[..., :12, :12]))


def test_unequal_grids_raise():
    with pytest.raises(ConfigError, match=r"4 × 4 of patch 3, 3 × 3 of patch 4"):
        MultiTowerConfig(towers=(TowerConfig(vit=one(16)), TowerConfig(vit=one(16, patch_size=4))), image_size=12)
    with pytest.raises(ConfigError, match="towers is empty"):
        MultiTowerConfig(towers=())
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
        model, pixels = MultiTower(towers().config), torch.empty(2, 3, 12, 12)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(pixels)
    assert cost.count_flops(model, Workload.full_attention(16, batch_size=2)) == counter.get_total_flops()


def test_bytes_equal_those_read():
    """Without the blocks after the feature layer, the last norm and the pooling."""
    first = TowerConfig(vit=one(16, pool="attention"), layer=-2)
    model = MultiTower(MultiTowerConfig(towers=(first, towers().config.towers[1]), image_size=12))
    model(torch.rand(1, 3, 12, 12)).sum().backward()
    read = sum(p.numel() * 4 for p in model.parameters() if p.grad is not None)
    total = sum(p.numel() * 4 for p in model.parameters())
    assert cost.count_bytes(model, Workload.full_attention(16)) == cost.MemoryBytes(weights=total, read=read)
    assert read < total


def test_cost_of_prismatic():
    """350–400 GFLOPs at 224², about one TFLOP at 384²."""
    for name, low, high in (("prismatic-224", 350e9, 400e9), ("prismatic-384", 0.9e12, 1.2e12)):
        with torch.device("meta"):
            model = MultiTower(MULTI_TOWER_PRESETS[name])
        assert low < cost.count_flops(model, Workload.full_attention((model.config.image_size // 14) ** 2)) < high
