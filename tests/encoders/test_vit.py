"""What a ViT promises whatever its config: sizes, padding, layers, costs. Agreement with the field is in tests/hub."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.encoders import ViT, ViTConfig
from vitrail.encoders.presets import VITS
from vitrail.encoders.vit import _mean
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig, RotaryConfig, Work, cost

BLOCK = BlockConfig(width=24, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainConfig(hidden=30))
ROTARY = RotaryConfig(head_dim=12, layout="2d", pairing="adjacent")
KINDS = {
    "bare": {},
    "cls": {"cls": True, "positions": "cls_and_patches", "pool": "cls", "norm_first": True, "norm_last": "pooled"},
    "registers": {"cls": True, "registers": 3, "pool": "mean", "resize": "bicubic_antialias"},
    "attention": {"pool": "attention", "order": "channels_last", "resize": "bilinear_antialias"},
    "rotary": {"cls": True, "positions": "none", "rotary": ROTARY, "rotary_span": 7, "pool": "mean"},
    "unstretched": {"positions": "none", "rotary": ROTARY, "pool": "mean", "norm_last": "none"},
    "both": {"rotary": ROTARY, "resize": "bilinear_antialias", "pool": "mean"},
    "gated": {"block": BLOCK.with_(mlp=GatedConfig(hidden=20, inner_norm="layer"), layer_scale=0.1), "pool": "mean"},
}


def vit(kind: str = "bare", **more) -> ViT:
    settings = {"layers": 3, "block": BLOCK, "image": 12, "patch": 3, **KINDS[kind], **more}
    return randomize(ViT(ViTConfig(**settings))).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_configs_are_plain_data(kind):
    config = vit(kind).config
    assert ViTConfig.read(config.plain()) == config


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_of_any_size(kind):
    model = vit(kind)
    for h, w in [(12, 12), (3, 3), (6, 27), (15, 3)]:
        features = model(torch.randn(2, 3, h, w))
        assert features.shape == (2, h * w // 9, 24)
        tokens = model.tokens(torch.randn(1, 3, h, w))
        assert tokens.shape == (1, model.config.prefix + h * w // 9, 24)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_not_seen(kind):
    """Unequal pictures side by side give what each gives alone, whatever stands in the padding."""
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
                relative(model.pool(noisy, grids)[row], model.pool(patches[row : row + 1, : h * w], [(h, w)])[0])
                <= 1e-5
            )


@pytest.mark.parametrize("kind", KINDS)
def test_cut_patches_are_the_pictures(kind):
    model = vit(kind)
    pixels = torch.randn(2, 3, 6, 9)
    cut = pixels.unfold(2, 3, 3).unfold(3, 3, 3)  # (B, C, h, w, P, P)
    order = (0, 2, 3, 4, 5, 1) if model.config.order == "channels_last" else (0, 2, 3, 1, 4, 5)
    patches = cut.permute(order).reshape(2, 6, 27)
    assert relative(model(patches, [(2, 3)] * 2), model(pixels)) <= 1e-6


def test_layers_count_as_hidden_states():
    model, pixels = vit("cls"), torch.randn(1, 3, 12, 12)
    states = [model.tokens(pixels, layer=k) for k in range(4)]
    for k in range(1, 4):
        assert torch.equal(model.blocks[k - 1](states[k - 1]), states[k])
        assert torch.equal(model.tokens(pixels, layer=k - 4), states[k])
    assert torch.equal(model(pixels, layer=-2), states[2][:, 1:])
    # Features at the end of a tower whose last norm is the pooled vector's are raw, like its last layer's.
    assert torch.equal(model(pixels), model(pixels, layer=-1))
    assert not torch.equal(vit()(pixels), vit()(pixels, layer=-1))
    with pytest.raises(ConfigError, match="no layer 4"):
        model(pixels, layer=4)


def test_later_blocks_are_not_run():
    model, pixels = vit(), torch.randn(1, 3, 12, 12)
    model.blocks[2] = None
    assert model(pixels, layer=-2).shape == (1, 16, 24)


def test_unread_pixels():
    """A picture of 14 holds four patches of 3 and two pixels more: unread at that size, refused at others."""
    model = vit(image=14)
    pixels = torch.randn(1, 3, 14, 14)
    assert torch.equal(model(pixels), model(pixels[..., :12, :12]))
    assert model(torch.randn(1, 3, 8, 6)).shape == (1, 4, 24)
    with pytest.raises(ImageError):
        model(torch.randn(1, 3, 13, 12))
    with pytest.raises(ImageError, match="13"):
        vit()(torch.randn(1, 3, 13, 12))


def test_mask_token():
    model = vit(mask=True)
    pixels, other = torch.randn(2, 1, 3, 12, 12)
    everything = torch.ones(1, 16, dtype=torch.bool)
    assert torch.equal(model(pixels, masked=everything), model(other, masked=everything))
    assert torch.equal(model(pixels, masked=~everything), model(pixels))
    with pytest.raises(ConfigError, match="mask"):
        vit()(pixels, masked=everything)


def test_rotary_positions_alone_tell_arrangements_apart():
    model = vit("unstretched")
    patches = torch.randn(1, 6, 27)
    a, b = model(patches, [(2, 3)]), model(patches, [(3, 2)])
    assert relative(a, b) > 1e-3  # the same patches in another arrangement
    plain = vit(positions="none")
    assert torch.equal(plain(patches, [(2, 3)]), plain(patches, [(3, 2)]))


def test_rotation_joins_learned_positions_and_adds_no_weight():
    """CoMP's continual RoPE: a tower that was trained without goes on with it."""
    before, after = vit(pool="mean"), vit("both", resize="bicubic")
    after.load_state_dict(before.state_dict())
    alone, several = torch.randn(2, 3, 3, 3), torch.randn(2, 3, 9, 15)
    assert relative(after(alone), before(alone)) < 1e-6  # one patch is turned against itself
    assert relative(after(several), before(several)) > 1e-3


def test_gradients_reach_every_parameter():
    for kind in KINDS:
        model = vit(kind)
        (model.pool if model.config.pool != "none" else model)(torch.randn(2, 3, 6, 9)).square().sum().backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"pool": "cls"}, "CLS"),
        ({"positions": "cls_and_patches"}, "CLS"),
        ({"norm_last": "pooled"}, "pool"),
        ({"head": 10}, "pool"),
        ({"rotary_span": 4}, "rotary"),
        ({"rotary": RotaryConfig(head_dim=8, layout="2d")}, "head_dim"),
        ({"image": 2}, "no patch"),
        ({"block": BLOCK.with_(chain=("cross", "mlp"))}, "self, mlp"),
    ],
)
def test_configs_that_cannot_be(settings, why):
    with pytest.raises(ConfigError, match=why):
        vit(**settings)


@pytest.mark.parametrize(
    "shape, grids",
    [
        ((1, 16, 27), None),  # cut, and nothing says how they lie
        ((1, 16, 27), [(4, 5)]),  # more patches than there are
        ((1, 16, 27), [(0, 3)]),
        ((2, 16, 27), [(4, 4)]),
        ((1, 16, 26), [(4, 4)]),
        ((1, 3, 12, 12), [(4, 4)]),
        ((3, 12, 12), None),
        ((1, 4, 12, 12), None),
    ],
)
def test_inputs_that_cannot_be(shape, grids):
    with pytest.raises(ImageError):
        vit()(torch.randn(shape), grids)


def test_no_pool():
    with pytest.raises(ConfigError, match="no pool"):
        vit().pool(torch.randn(1, 3, 12, 12))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_mean_of_many_halves(dtype):
    """288 · 300 passes what a float16 holds; padding may hold anything."""
    patches = torch.full((2, 300, 4), 300.0, dtype=dtype)
    patches[1, 288:] = torch.nan
    segments = -(torch.arange(300) >= torch.tensor([[300], [288]])).long()
    assert torch.equal(_mean(patches, segments), torch.full((2, 4), 300.0, dtype=dtype))
    assert torch.equal(_mean(patches[:1], None), torch.full((1, 4), 300.0, dtype=dtype))


@pytest.mark.parametrize("kind", ["cls", "registers", "attention"])
def test_a_head_reads_the_pooled_vector(kind):
    model, bare = vit(kind, head=7), vit(kind)
    bare.load_state_dict({name: p for name, p in model.state_dict().items() if not name.startswith("head.")})
    pixels = torch.randn(2, 3, 12, 12)
    assert model.config.pooled == 7 and bare.config.pooled == 24
    assert torch.equal(model.pool(pixels), model.head(bare.pool(pixels)))


def test_released_heads_are_applied():
    with torch.device("meta"):
        clip = ViT(VITS["eva02-l14-clip"])
        assert clip.pool(torch.empty(1, 3, 224, 224)).shape == (1, 768)


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
    work = model.work(2, *size)
    flops = cost.flops(model, work)
    assert flops == counted(lambda: model(pixels))
    if model.pooler is not None:
        pool = cost.flops(model.pooler, Work(tokens=2 * size[0] * size[1] // 9, pairs=0, rows=2))
        assert flops + pool == counted(lambda: model.pool(pixels))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_a_pass_reads(kind):
    """What gets a gradient was read; the rest only weighs."""
    more = {} if kind == "bare" else {"head": 5}
    model = vit(kind, mask=True, **more)
    model(torch.randn(1, 3, 12, 12)).sum().backward()
    read = sum(p.numel() * 4 for p in model.parameters() if p.grad is not None)
    total = sum(p.numel() * 4 for p in model.parameters())
    assert cost.bytes(model, model.work()) == cost.Bytes(weights=total, read=read)
    assert read < total
