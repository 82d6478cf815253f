"""The convolutional tower: what it gives, that it starts as its shortcuts, and what it costs."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize
from vitrail import hub
from vitrail.encoders import Conv, ConvConfig
from vitrail.errors import CheckpointError, ConfigError, ImageError
from vitrail.nn import cost

SMALL = ConvConfig(image=16, widths=(8, 16, 24), blocks=(1, 2, 1), groups=4)


@pytest.mark.parametrize(
    "config", [SMALL, SMALL.with_(stem=2), SMALL.with_(widths=(8,), blocks=(3,)), SMALL.with_(channels=1)]
)
def test_every_shape_that_fits(config):
    tower = randomize(Conv(config)).eval()
    P = config.patch
    for B, h, w in ((1, 1, 1), (3, 2, 5)):
        x = torch.randn(B, config.channels, h * P, w * P)
        assert tower(x).shape == (B, h * w, config.widths[-1])
        torch.testing.assert_close(tower.pool(x), tower(x).mean(1))


def test_a_head_maps_the_pooled_vector():
    tower, x = Conv(SMALL.with_(head=5)), torch.randn(2, 3, 16, 16)
    assert tower.pool(x).shape == (2, 5) and tower.config.pooled == 5
    torch.testing.assert_close(tower.pool(x), tower.head(tower(x).mean(1)))


def test_pictures_do_not_see_each_other():
    tower, x = randomize(Conv(SMALL)), torch.randn(4, 3, 16, 16)
    torch.testing.assert_close(tower(x)[1:2], tower(x[1:2]), atol=1e-5, rtol=1e-4)


def test_a_block_starts_as_its_shortcut_and_learns():
    tower, x = Conv(SMALL.with_(widths=(8,), blocks=(2,))), torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(tower.blocks[0](tower.stem(x)), tower.stem(x))
    tower.pool(x).square().sum().backward()
    assert all(p.grad is not None for p in tower.parameters())
    assert tower.blocks[0].conv2.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("config", [SMALL, SMALL.with_(stem=2), ConvConfig()])
def test_operations_are_those_that_torch_counts(config):
    tower = Conv(config)
    with FlopCounterMode(display=False) as counter:
        tower(torch.randn(2, 3, config.image, config.image))
    assert cost.flops(tower, tower.work(2)) == counter.get_total_flops()
    assert cost.bytes(tower, tower.work(2)).weights == 4 * sum(p.numel() for p in tower.parameters())


@pytest.mark.parametrize(
    "change", [{"blocks": (1,)}, {"groups": 3}, {"image": 15}, {"widths": (), "blocks": ()}, {"blocks": (1, 0, 1)}]
)
def test_what_cannot_be_is_refused(change):
    with pytest.raises(ConfigError):
        SMALL.with_(**change)


@pytest.mark.parametrize("shape", [(1, 3, 15, 16), (1, 4, 16, 16), (3, 16, 16)])
def test_other_pictures_are_refused(shape):
    with pytest.raises(ImageError):
        Conv(SMALL)(torch.randn(shape))


def test_it_comes_back_from_its_folder_and_no_depth_is_built_for_ever(tmp_path):
    tower, x = randomize(Conv(SMALL)).eval(), torch.randn(2, 3, 16, 16)
    hub.save(tower, tmp_path)
    assert torch.equal(hub.load(tmp_path)(x), tower(x))
    about = json.loads((tmp_path / "vitrail.json").read_text())
    about["config"]["blocks"] = [10**9, 1, 1]
    (tmp_path / "vitrail.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="layers"):
        hub.load(tmp_path)
