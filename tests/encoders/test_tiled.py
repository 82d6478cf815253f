"""What a tower of tiles promises whatever its config. Agreement with the field is in tests/hub."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.encoders import TiledViT, TiledViTConfig
from vitrail.encoders.presets import TILED
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig, cost

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=20))


def config(**more) -> TiledViTConfig:
    settings = {"layers": 3, "over": 2, "block": BLOCK, "image": 6, "patch": 2, "channels": 1, "taps": (1, 3), **more}
    return TiledViTConfig(**settings)


def tower(**more) -> TiledViT:
    return randomize(TiledViT(config(**more))).eval()


def test_config_is_plain_data():
    assert TiledViTConfig.read(config().plain()) == config()


def test_features_of_all_layers_stand_side_by_side():
    model, tiles = tower(), torch.randn(2, 4, 1, 6, 6)
    features = model(tiles, [(1, 2), (2, 2)])
    assert features.shape == (2, 4, 10, 48) and model.config.width == 48
    # Without taps the last features are the same.
    bare = TiledViT(config(taps=())).eval()
    bare.load_state_dict(model.state_dict())
    assert torch.equal(bare(tiles, [(1, 2), (2, 2)]), features[..., :16])


def test_tiles_see_each_other_and_pictures_do_not():
    model, tiles = tower(), torch.randn(2, 4, 1, 6, 6)
    ratios = [(1, 2), (2, 2)]
    features, moved = model(tiles, ratios), tiles.clone()
    moved[0, 0] += 1.0
    after = model(moved, ratios)
    assert torch.equal(after[1], features[1])
    assert relative(after[0, 1], features[0, 1]) > 1e-4
    assert relative(model(tiles[1:], ratios[1:]), features[1:]) <= 1e-5


def test_the_ratio_counts():
    model, tiles = tower(), torch.randn(1, 4, 1, 6, 6)
    assert relative(model(tiles, [(1, 2)]), model(tiles, [(2, 1)])) > 1e-3


def test_starts_with_gates_shut():
    """At the start the gated blocks change nothing, nor does where a tile stands."""
    model, tiles = TiledViT(config(taps=())).eval(), torch.randn(1, 4, 1, 6, 6)
    assert torch.equal(model(tiles, [(1, 2)]), model(tiles, [(2, 1)]))
    alone = TiledViT(config(taps=(), over=0)).eval()
    alone.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(tiles, [(2, 2)]), alone(tiles, [(2, 2)]))


def test_gradients_reach_every_parameter():
    model = tower()
    model(torch.randn(2, 4, 1, 6, 6), [(1, 1), (4, 1)]).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    "more, why",
    [
        ({"image": 7}, "7 pixels"),
        ({"ratios": ((1, 5),)}, r"\(1, 5\)"),
        ({"ratios": ()}, "ratios"),
        ({"taps": (4,)}, "no layer 4"),
        ({"block": BLOCK.with_(gated=True)}, "gates"),
    ],
)
def test_what_is_refused(more, why):
    with pytest.raises(ConfigError, match=why):
        config(**more)


@pytest.mark.parametrize(
    "shape, ratios, why",
    [
        ((1, 3, 1, 6, 6), [(1, 1)], "zeros"),
        ((1, 4, 1, 6, 8), [(1, 1)], "6, 6"),
        ((1, 4, 1, 6, 6), [(2, 3)], r"\(2, 3\)"),
        ((1, 4, 1, 6, 6), [], "0 ratios"),
    ],
)
def test_pictures_that_do_not_fit(shape, ratios, why):
    with pytest.raises(ImageError, match=why):
        tower()(torch.randn(*shape), ratios)


def test_flops_are_those_counted():
    """Attention is computed for all pairs, masked or not: the counter sees those few more."""
    model, ratios = tower(), [(2, 2), (2, 2)]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(2, 4, 1, 6, 6), ratios)
    work = model.work(2)
    masked = 2 * (4 * (16 - 10)) ** 2
    assert cost.flops(model, work.with_(pairs=work.pairs + masked)) == counter.get_total_flops()
    assert cost.bytes(model, work).weights == sum(p.numel() * 4 for p in model.parameters())


def test_every_row_can_be_built():
    with torch.device("meta"):
        for row in TILED.values():
            assert TiledViT(row).config.width == 7680
