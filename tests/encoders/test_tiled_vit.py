"""Properties of the tiled ViT. tests/hub compares it with transformers."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.encoders import TiledViT, TiledViTConfig
from vitrail.encoders.presets import TILED_VIT_PRESETS
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, cost

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=20))


def config(**more) -> TiledViTConfig:
    settings = {
        "layers": 3,
        "global_layers": 2,
        "block": BLOCK,
        "image_size": 6,
        "patch_size": 2,
        "channels": 1,
        "feature_layers": (1, 3),
        **more,
    }
    return TiledViTConfig(**settings)


def tower(**more) -> TiledViT:
    return randomize(TiledViT(config(**more))).eval()


def test_config_round_trips():
    assert TiledViTConfig.from_dict(config().to_dict()) == config()


def test_features_of_layers_are_concatenated():
    model, tiles = tower(), torch.randn(2, 4, 1, 6, 6)
    features = model(tiles, [(1, 2), (2, 2)])
    assert features.shape == (2, 4, 10, 48) and model.config.width == 48
    # Without feature_layers the last features are equal.
    bare = TiledViT(config(feature_layers=())).eval()
    bare.load_state_dict(model.state_dict())
    assert torch.equal(bare(tiles, [(1, 2), (2, 2)]), features[..., :16])


def test_tiles_attend_to_each_other_and_images_are_independent():
    model, tiles = tower(), torch.randn(2, 4, 1, 6, 6)
    ratios = [(1, 2), (2, 2)]
    features, moved = model(tiles, ratios), tiles.clone()
    moved[0, 0] += 1.0
    after = model(moved, ratios)
    assert torch.equal(after[1], features[1])
    assert relative(after[0, 1], features[0, 1]) > 1e-4
    assert relative(model(tiles[1:], ratios[1:]), features[1:]) <= 1e-5


def test_aspect_ratio_changes_features():
    model, tiles = tower(), torch.randn(1, 4, 1, 6, 6)
    assert relative(model(tiles, [(1, 2)]), model(tiles, [(2, 1)])) > 1e-3


def test_gates_start_closed():
    """Initially, gated blocks and tile positions have no effect."""
    model, tiles = TiledViT(config(feature_layers=())).eval(), torch.randn(1, 4, 1, 6, 6)
    assert torch.equal(model(tiles, [(1, 2)]), model(tiles, [(2, 1)]))
    alone = TiledViT(config(feature_layers=(), global_layers=0)).eval()
    alone.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(tiles, [(2, 2)]), alone(tiles, [(2, 2)]))


def test_gradients_reach_every_parameter():
    model = tower()
    model(torch.randn(2, 4, 1, 6, 6), [(1, 1), (4, 1)]).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    "more, why",
    [
        ({"image_size": 7}, "image_size 7"),
        ({"aspect_ratios": ((1, 5),)}, r"\(1, 5\)"),
        ({"aspect_ratios": ()}, "ratios"),
        ({"feature_layers": (4,)}, "no layer 4"),
        ({"block": BLOCK.replace(gated=True)}, "gated"),
    ],
)
def test_invalid_configs_raise(more, why):
    with pytest.raises(ConfigError, match=why):
        config(**more)


@pytest.mark.parametrize(
    "shape, ratios, why",
    [
        ((1, 3, 1, 6, 6), [(1, 1)], "zeros"),
        ((1, 4, 1, 6, 8), [(1, 1)], "6, 6"),
        ((1, 4, 1, 6, 6), [(2, 3)], r"\(2, 3\)"),
        ((1, 4, 1, 6, 6), [], "0 aspect ratios"),
    ],
)
def test_mismatched_images_raise(shape, ratios, why):
    with pytest.raises(ImageError, match=why):
        tower()(torch.randn(*shape), ratios)


def test_flops_equal_those_counted():
    """torch counts all pairs, also masked ones."""
    model, ratios = tower(), [(2, 2), (2, 2)]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(2, 4, 1, 6, 6), ratios)
    work = model.workload(2)
    masked = 2 * (4 * (16 - 10)) ** 2
    assert (
        cost.count_flops(model, work.replace(attention_pairs=work.attention_pairs + masked))
        == counter.get_total_flops()
    )
    assert cost.count_bytes(model, work).weights == sum(p.numel() * 4 for p in model.parameters())


def test_presets_build():
    with torch.device("meta"):
        for row in TILED_VIT_PRESETS.values():
            assert TiledViT(row).config.width == 7680
