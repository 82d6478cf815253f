"""Properties of the ViT: sizes, padding, layers and costs. tests/hub compares it with transformers."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.encoders import ViT, ViTConfig
from vitrail.encoders.presets import VIT_PRESETS
from vitrail.encoders.vit import _mean_pool
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig, Workload, cost

BLOCK = BlockConfig(width=24, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainMLPConfig(intermediate_size=30))
ROTARY = RotaryConfig(head_dim=12, layout="2d", pairing="adjacent")
KINDS = {
    "bare": {},
    "cls": {
        "cls_token": True,
        "positions": "cls_and_patches",
        "pool": "cls",
        "norm_first": True,
        "norm_last": "pooled",
    },
    "registers": {
        "cls_token": True,
        "register_tokens": 3,
        "pool": "mean",
        "position_interpolation": "bicubic_antialias",
    },
    "attention": {"pool": "attention", "patch_order": "channels_last", "position_interpolation": "bilinear_antialias"},
    "rotary": {"cls_token": True, "positions": "none", "rotary": ROTARY, "rotary_span": 7, "pool": "mean"},
    "unstretched": {"positions": "none", "rotary": ROTARY, "pool": "mean", "norm_last": "none"},
    "both": {"rotary": ROTARY, "position_interpolation": "bilinear_antialias", "pool": "mean"},
    "centered": {
        "cls_token": True,
        "positions": "none",
        "rotary": ROTARY,
        "rotary_centered": True,
        "pool": "cls",
    },
    "query": {"positions": "sincos", "norm_patches": True, "pool": "query"},
    "gated": {
        "block": BLOCK.replace(mlp=GatedMLPConfig(intermediate_size=20, inner_norm="layer"), layer_scale=0.1),
        "pool": "mean",
    },
}


def vit(kind: str = "bare", **more) -> ViT:
    settings = {"layers": 3, "block": BLOCK, "image_size": 12, "patch_size": 3, **KINDS[kind], **more}
    return randomize(ViT(ViTConfig(**settings))).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_configs_round_trip(kind):
    config = vit(kind).config
    assert ViTConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_any_size(kind):
    model = vit(kind)
    for h, w in [(12, 12), (3, 3), (6, 27), (15, 3)]:
        features = model(torch.randn(2, 3, h, w))
        assert features.shape == (2, h * w // 9, 24)
        tokens = model.forward_tokens(torch.randn(1, 3, h, w))
        assert tokens.shape == (1, model.config.num_prefix_tokens + h * w // 9, 24)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_has_no_effect(kind):
    """Images of different sizes in one batch give the same features as alone, for any padding."""
    model = vit(kind)
    grids = [(4, 4), (1, 5), (3, 2)]
    patches = torch.randn(3, 18, 27)
    features = model(patches, grids)
    noisy = patches.clone()
    for row, (h, w) in enumerate(grids):
        noisy[row, h * w :] = 100.0
        alone = model(patches[row : row + 1, : h * w], [(h, w)])
        assert relative(features[row : row + 1, : h * w], alone) <= 1e-5
        assert relative(model(noisy, grids)[row, : h * w], alone[0]) <= 1e-5
        if model.config.pool != "none":
            assert (
                relative(
                    model.forward_pooled(noisy, grids)[row],
                    model.forward_pooled(patches[row : row + 1, : h * w], [(h, w)])[0],
                )
                <= 1e-5
            )


@pytest.mark.parametrize("kind", KINDS)
def test_patches_equal_images(kind):
    model = vit(kind)
    pixels = torch.randn(2, 3, 6, 9)
    cut = pixels.unfold(2, 3, 3).unfold(3, 3, 3)  # (B, C, h, w, P, P)
    order = (0, 2, 3, 4, 5, 1) if model.config.patch_order == "channels_last" else (0, 2, 3, 1, 4, 5)
    patches = cut.permute(order).reshape(2, 6, 27)
    assert relative(model(patches, [(2, 3)] * 2), model(pixels)) <= 1e-6


def test_layers_index_hidden_states():
    model, pixels = vit("cls"), torch.randn(1, 3, 12, 12)
    states = [model.forward_tokens(pixels, layer=k) for k in range(4)]
    for k in range(1, 4):
        assert torch.equal(model.blocks[k - 1](states[k - 1]), states[k])
        assert torch.equal(model.forward_tokens(pixels, layer=k - 4), states[k])
    assert torch.equal(model(pixels, layer=-2), states[2][:, 1:])
    # With a pooled norm, the final features are those of the last layer, without norm.
    assert torch.equal(model(pixels), model(pixels, layer=-1))
    assert not torch.equal(vit()(pixels), vit()(pixels, layer=-1))
    with pytest.raises(ConfigError, match="no layer 4"):
        model(pixels, layer=4)


def test_later_blocks_are_not_run():
    model, pixels = vit(), torch.randn(1, 3, 12, 12)
    model.blocks[2] = None
    assert model(pixels, layer=-2).shape == (1, 16, 24)


def test_cropped_pixels():
    """14 pixels are four patches of 3 and two more pixels: cropped at that size, an error at others."""
    model = vit(image_size=14)
    pixels = torch.randn(1, 3, 14, 14)
    assert torch.equal(model(pixels), model(pixels[..., :12, :12]))
    assert model(torch.randn(1, 3, 8, 6)).shape == (1, 4, 24)
    with pytest.raises(ImageError):
        model(torch.randn(1, 3, 13, 12))
    with pytest.raises(ImageError, match="13"):
        vit()(torch.randn(1, 3, 13, 12))


def test_mask_token():
    model = vit(mask_token=True)
    pixels, other = torch.randn(2, 1, 3, 12, 12)
    everything = torch.ones(1, 16, dtype=torch.bool)
    assert torch.equal(model(pixels, patch_mask=everything), model(other, patch_mask=everything))
    assert torch.equal(model(pixels, patch_mask=~everything), model(pixels))
    with pytest.raises(ConfigError, match="mask"):
        vit()(pixels, patch_mask=everything)


def test_rotary_positions_distinguish_orders():
    model = vit("unstretched")
    patches = torch.randn(1, 6, 27)
    a, b = model(patches, [(2, 3)]), model(patches, [(3, 2)])
    assert relative(a, b) > 1e-3  # the same patches in another order
    plain = vit(positions="none")
    assert torch.equal(plain(patches, [(2, 3)]), plain(patches, [(3, 2)]))


def test_rotary_can_be_added_to_learned_positions():
    """CoMP's continual RoPE: rotary positions can be added to a trained tower."""
    before, after = vit(pool="mean"), vit("both", position_interpolation="bicubic")
    after.load_state_dict(before.state_dict())
    alone, several = torch.randn(2, 3, 3, 3), torch.randn(2, 3, 9, 15)
    assert relative(after(alone), before(alone)) < 1e-6  # a single patch has no relative rotation
    assert relative(after(several), before(several)) > 1e-3


def test_gradients_reach_every_parameter():
    for kind in KINDS:
        model = vit(kind)
        (model.forward_pooled if model.config.pool != "none" else model)(
            torch.randn(2, 3, 6, 9)
        ).square().sum().backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"pool": "cls"}, "CLS"),
        ({"positions": "cls_and_patches"}, "CLS"),
        ({"norm_last": "pooled"}, "pool"),
        ({"head_width": 10}, "pool"),
        ({"rotary_span": 4}, "rotary"),
        ({"rotary_centered": True}, "rotary"),
        ({"rotary": ROTARY, "rotary_span": 4, "rotary_centered": True}, "only one|both scale"),
        ({"positions": "sincos", "block": BLOCK.replace(width=22, attention=AttentionConfig(heads=2))}, "of 4"),
        ({"rotary": RotaryConfig(head_dim=8, layout="2d")}, "head_dim"),
        ({"image_size": 2}, "smaller than patch_size"),
        ({"block": BLOCK.replace(branches=("cross", "mlp"))}, "self, mlp"),
    ],
)
def test_invalid_configs_raise(settings, why):
    with pytest.raises(ConfigError, match=why):
        vit(**settings)


@pytest.mark.parametrize(
    "shape, grids",
    [
        ((1, 16, 27), None),  # patches without grids
        ((1, 16, 27), [(4, 5)]),  # more patches than rows
        ((1, 16, 27), [(0, 3)]),
        ((2, 16, 27), [(4, 4)]),
        ((1, 16, 26), [(4, 4)]),
        ((1, 3, 12, 12), [(4, 4)]),
        ((3, 12, 12), None),
        ((1, 4, 12, 12), None),
    ],
)
def test_invalid_inputs_raise(shape, grids):
    with pytest.raises(ImageError):
        vit()(torch.randn(shape), grids)


def test_no_pool():
    with pytest.raises(ConfigError, match="no pooling"):
        vit().forward_pooled(torch.randn(1, 3, 12, 12))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_mean_pooling_in_half_precision(dtype):
    """288 · 300 exceeds the range of float16; padding may have any value."""
    patches = torch.full((2, 300, 4), 300.0, dtype=dtype)
    patches[1, 288:] = torch.nan
    segments = -(torch.arange(300) >= torch.tensor([[300], [288]])).long()
    assert torch.equal(_mean_pool(patches, segments), torch.full((2, 4), 300.0, dtype=dtype))
    assert torch.equal(_mean_pool(patches[:1], None), torch.full((1, 4), 300.0, dtype=dtype))


@pytest.mark.parametrize("kind", ["cls", "registers", "attention"])
def test_head_maps_the_pooled_vector(kind):
    model, bare = vit(kind, head_width=7), vit(kind)
    bare.load_state_dict({name: p for name, p in model.state_dict().items() if not name.startswith("head.")})
    pixels = torch.randn(2, 3, 12, 12)
    assert model.config.pooled_width == 7 and bare.config.pooled_width == 24
    assert torch.equal(model.forward_pooled(pixels), model.head(bare.forward_pooled(pixels)))


def test_released_heads_are_applied():
    with torch.device("meta"):
        clip = ViT(VIT_PRESETS["eva02-l14-clip"])
        assert clip.forward_pooled(torch.empty(1, 3, 224, 224)).shape == (1, 768)


def counted(call) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(12, 12), (6, 15)])
def test_costs(kind, size):
    with torch.device("meta"):
        model = ViT(vit(kind).config)
        pixels = torch.empty(2, 3, *size)
    work = model.workload(2, *size)
    flops = cost.count_flops(model, work)
    assert flops == counted(lambda: model(pixels))
    if model.pooler is not None:
        pool = cost.count_flops(
            model.pooler, Workload(tokens=2 * size[0] * size[1] // 9, attention_pairs=0, sequences=2)
        )
        assert flops + pool == counted(lambda: model.forward_pooled(pixels))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_equal_those_read(kind):
    """Parameters with a gradient are those that a pass reads."""
    more = {} if kind == "bare" else {"head_width": 5}
    model = vit(kind, mask_token=True, **more)
    model(torch.randn(1, 3, 12, 12)).sum().backward()
    read = sum(p.numel() * 4 for p in model.parameters() if p.grad is not None)
    total = sum(p.numel() * 4 for p in model.parameters())
    assert cost.count_bytes(model, model.workload()) == cost.MemoryBytes(weights=total, read=read)
    assert read < total
