"""Two towers at two resolutions. Agreement with the field is in tests/hub."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.encoders import Hybrid, HybridConfig, SAMConfig, TowerConfig, ViTConfig
from vitrail.encoders.hybrid import shrunk
from vitrail.errors import ConfigError
from vitrail.hub import load, save
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig, Work, cost

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainConfig(hidden=20))
LOW = ViTConfig(layers=3, block=BLOCK.with_(width=10), image=12, patch=4, cls=True, positions="cls_and_patches")
HIGH = SAMConfig(layers=2, block=BLOCK, image=40, patch=5, window=3, full=(0,), gives=6)


def hybrid(**more) -> Hybrid:
    low = TowerConfig(vit=LOW, mean=(0.1, 0.2, 0.3), layer=-2)
    return randomize(Hybrid(HybridConfig(**{"low": low, "high": HIGH, **more}))).eval()


def test_features_stand_side_by_side_each_by_its_own_norm_and_size():
    model, pixels = hybrid(), torch.rand(2, 3, 40, 40)
    features = model(pixels)
    assert features.shape == (2, 9, 34) and model.config.width == 34
    mean = torch.tensor((0.1, 0.2, 0.3)).view(3, 1, 1)
    small = (shrunk(pixels, 12, "bilinear") - mean) / 0.5
    assert relative(features[..., 24:], model.low(small, layer=-2)) <= 1e-5
    moved = hybrid(std=(0.9, 0.5, 0.5))(pixels)
    assert torch.equal(moved[..., 24:], features[..., 24:]) and relative(moved, features) > 1e-3


def test_the_tap_counts_as_much_as_alpha_says():
    model, pixels = hybrid(), torch.rand(1, 3, 40, 40)
    with torch.no_grad():
        found = []
        for alpha in (0.0, 1.0, 2.0):
            model.alpha.fill_(alpha)
            found.append(model(pixels)[..., :24])
    assert relative(found[2] - found[1], found[1] - found[0]) <= 1e-4
    assert not Hybrid(model.config).alpha.any()


def test_what_cannot_stand_together_is_refused():
    low = TowerConfig(vit=LOW)
    with pytest.raises(ConfigError, match="sees the whole picture"):
        HybridConfig(low=low, high=HIGH.with_(full=()))
    with pytest.raises(ConfigError, match="1 channels"):
        HybridConfig(low=low, high=HIGH.with_(channels=1))
    with pytest.raises(ConfigError, match="deviations"):
        HybridConfig(low=low, high=HIGH, std=(1.0,))


def test_half_precision_is_near_the_whole():
    model, pixels = hybrid(), torch.rand(2, 3, 40, 40)
    wanted = model(pixels)
    assert relative(model.bfloat16()(pixels.bfloat16()).float(), wanted) <= 0.05


def test_save_and_load(tmp_path):
    model, pixels = hybrid(), torch.rand(1, 3, 40, 40)
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config and torch.equal(again(pixels), model(pixels))


def test_costs_are_those_counted():
    model = hybrid()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.rand(2, 3, 40, 40))
    assert cost.flops(model, Work.full(9, batch=2)) == counter.get_total_flops()
    model(torch.rand(1, 3, 40, 40)).sum().backward()
    read = sum(p.numel() * 4 for p in model.parameters() if p.grad is not None)
    total = sum(p.numel() * 4 for p in model.parameters())
    assert cost.bytes(model, Work.full(9)) == cost.Bytes(weights=total, read=read) and read < total
