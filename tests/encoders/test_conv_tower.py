"""Convolutional tower: outputs, initialization, costs and saving."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize
from vitrail import hub
from vitrail.encoders import ConvTower, ConvTowerConfig
from vitrail.errors import CheckpointError, ConfigError, ImageError
from vitrail.nn import cost

SMALL = ConvTowerConfig(image_size=16, widths=(8, 16, 24), blocks=(1, 2, 1), norm_groups=4)


@pytest.mark.parametrize(
    "config", [SMALL, SMALL.replace(stem_stride=2), SMALL.replace(widths=(8,), blocks=(3,)), SMALL.replace(channels=1)]
)
def test_output_shapes(config):
    tower = randomize(ConvTower(config)).eval()
    P = config.patch_size
    for B, h, w in ((1, 1, 1), (3, 2, 5)):
        x = torch.randn(B, config.channels, h * P, w * P)
        assert tower(x).shape == (B, h * w, config.widths[-1])
        torch.testing.assert_close(tower.forward_pooled(x), tower(x).mean(1))


def test_head_maps_the_pooled_vector():
    tower, x = ConvTower(SMALL.replace(head_width=5)), torch.randn(2, 3, 16, 16)
    assert tower.forward_pooled(x).shape == (2, 5) and tower.config.pooled_width == 5
    torch.testing.assert_close(tower.forward_pooled(x), tower.head(tower(x).mean(1)))


def test_images_are_independent():
    tower, x = randomize(ConvTower(SMALL)), torch.randn(4, 3, 16, 16)
    torch.testing.assert_close(tower(x)[1:2], tower(x[1:2]), atol=1e-5, rtol=1e-4)


def test_block_starts_as_its_shortcut():
    tower, x = ConvTower(SMALL.replace(widths=(8,), blocks=(2,))), torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(tower.blocks[0](tower.stem(x)), tower.stem(x))
    tower.forward_pooled(x).square().sum().backward()
    assert all(p.grad is not None for p in tower.parameters())
    assert tower.blocks[0].conv2.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("config", [SMALL, SMALL.replace(stem_stride=2), ConvTowerConfig()])
def test_flops_equal_torch_counter(config):
    tower = ConvTower(config)
    with FlopCounterMode(display=False) as counter:
        tower(torch.randn(2, 3, config.image_size, config.image_size))
    assert cost.count_flops(tower, tower.workload(2)) == counter.get_total_flops()
    assert cost.count_bytes(tower, tower.workload(2)).weights == 4 * sum(p.numel() for p in tower.parameters())


@pytest.mark.parametrize(
    "change",
    [{"blocks": (1,)}, {"norm_groups": 3}, {"image_size": 15}, {"widths": (), "blocks": ()}, {"blocks": (1, 0, 1)}],
)
def test_invalid_configs_raise(change):
    with pytest.raises(ConfigError):
        SMALL.replace(**change)


@pytest.mark.parametrize("shape", [(1, 3, 15, 16), (1, 4, 16, 16), (3, 16, 16)])
def test_mismatched_images_raise(shape):
    with pytest.raises(ImageError):
        ConvTower(SMALL)(torch.randn(shape))


def test_save_and_load(tmp_path):
    tower, x = randomize(ConvTower(SMALL)).eval(), torch.randn(2, 3, 16, 16)
    hub.save(tower, tmp_path)
    assert torch.equal(hub.load(tmp_path)(x), tower(x))
    about = json.loads((tmp_path / "vitrail.json").read_text())
    about["config"]["blocks"] = [10**9, 1, 1]
    (tmp_path / "vitrail.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="layers"):
        hub.load(tmp_path)
