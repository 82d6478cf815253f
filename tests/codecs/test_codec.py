"""Codecs of both kinds with every quantizer: round trip, image sizes, cost and validation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize
from vitrail.codecs.codec import Codec, CodecConfig, compute_codec_identity
from vitrail.codecs.conv_autoencoder import ConvAutoencoderConfig
from vitrail.codecs.presets import CODEC_PRESETS, make_vit_autoencoder_config, make_vit_codec_config
from vitrail.codecs.quantizers import (
    BSQConfig,
    FSQConfig,
    GroupedVQConfig,
    IBQConfig,
    IdentityQuantizerConfig,
    KLConfig,
    LFQConfig,
    ResidualVQConfig,
    SimVQConfig,
    VQConfig,
    make_quantizer,
)
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, RotaryConfig, cost
from vitrail.processing.image_loading import NORMALIZATIONS

QUANTIZERS = {
    "vq": VQConfig(codebook_size=50, dim=6),
    "vq-gradient": VQConfig(codebook_size=32, dim=6, codebook_update="gradient", metric="cosine"),
    "residual": ResidualVQConfig(codebook_size=20, dim=6, layers=3),
    "one-layer": ResidualVQConfig(codebook_size=20, dim=6, layers=1),
    "grouped": GroupedVQConfig(codebook_size=20, dim=6, groups=2),
    "simvq": SimVQConfig(codebook_size=40, dim=6),
    "ibq": IBQConfig(codebook_size=40, dim=6),
    "fsq": FSQConfig(levels=(8, 5, 5, 5)),
    "lfq": LFQConfig(bits=18),
    "bsq": BSQConfig(bits=28),
    "continuous": IdentityQuantizerConfig(dim=6),
    "kl": KLConfig(width=6),
}
BLOCK = BlockConfig(width=24, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainMLPConfig(intermediate_size=40))


def conv(quantizer, **more) -> CodecConfig:
    net = {"widths": (8, 12, 12), "layers": 1, "latent_channels": 5, "norm_groups": 4, "image_size": (16, 16), **more}
    return CodecConfig(net=ConvAutoencoderConfig(**net), quantizer=quantizer)


def vit(quantizer, **more) -> CodecConfig:
    rotary = RotaryConfig(head_dim=12, layout="2d", pairing="adjacent")
    cls = {"cls_token": True, "positions": "cls_and_patches", "register_tokens": 1}
    encoder = ViTConfig(layers=2, block=BLOCK, image_size=16, patch_size=4, rotary=rotary, rotary_span=4, **cls, **more)
    return make_vit_codec_config(encoder, quantizer, make_quantizer(quantizer).width, intermediate_size=20)


def build_codec(config: CodecConfig, seed: int = 0) -> Codec:
    torch.manual_seed(seed)
    return randomize(Codec(config), seed).eval()


@pytest.mark.parametrize("make", [conv, vit])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_lookup_and_decode_invert_encode(make, name):
    codec = build_codec(make(QUANTIZERS[name]))
    pixels = torch.rand(2, 3, 8, 12) * 2 - 1
    found = codec.encode(pixels)
    assert found.codes.shape == (2, 2, 3, codec.quantizer.width)
    again = codec.decode(found.codes)
    assert again.shape == pixels.shape
    torch.testing.assert_close(codec.reconstruct(pixels), again.clamp(-1, 1))
    torch.testing.assert_close(codec(pixels)[0], again)
    if not codec.vocab_sizes:
        assert found.ids is None
        assert codec.bits == codec.bits_per_pixel == 0
        return
    groups = (len(codec.vocab_sizes),) if codec.has_id_groups else ()
    assert found.ids.shape == (2, 2, 3, *groups)
    assert found.ids.dtype == torch.int64
    assert torch.equal(codec.lookup(found.ids), found.codes)
    assert torch.equal(codec.decode(codec.lookup(found.ids)), again)
    assert codec.bits_per_pixel == codec.bits / 16


@pytest.mark.parametrize("make", [conv, vit])
@pytest.mark.parametrize("name", QUANTIZERS)
@torch.no_grad()
def test_half_precision(make, name):
    codec = build_codec(make(QUANTIZERS[name])).bfloat16()
    pixels = codec.to_pixels(torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8))
    found = codec.encode(pixels)
    assert pixels.dtype == found.codes.dtype == codec.decode(found.codes).dtype == torch.bfloat16
    assert found.ids is None or torch.equal(codec.lookup(found.ids), found.codes)


@pytest.mark.parametrize("make", [conv, vit])
def test_every_weight_has_a_gradient(make):
    codec = Codec(make(QUANTIZERS["fsq"]))
    randomize(codec).train()
    again, found = codec(torch.rand(2, 3, 16, 16) * 2 - 1)
    (again.square().mean() + sum(found.losses.values(), again.new_zeros(()))).backward()
    still = [name for name, p in codec.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    # A ViT's last norm is for what is pooled or for all tokens; here it is on all.
    assert not still


@pytest.mark.parametrize("make", [conv, vit])
@given(h=st.integers(1, 7), w=st.integers(1, 7), over=st.tuples(st.integers(0, 3), st.integers(0, 3)))
@settings(max_examples=25)
def test_image_sizes_must_be_multiples_of_the_factor(make, h, w, over):
    codec = get_small_codec(make)
    H, W = 4 * h + over[0], 4 * w + over[1]
    pixels = torch.zeros(1, 3, H, W)
    if over == (0, 0):
        assert codec.reconstruct(pixels).shape == pixels.shape
        assert codec.encode(pixels).ids.shape == (1, h, w)
    else:
        with pytest.raises(ImageError, match=f"{H} × {W}.*4 × 4"):
            codec.encode(pixels)


KEPT: dict = {}


def get_small_codec(make) -> Codec:
    if make not in KEPT:
        KEPT[make] = build_codec(make(QUANTIZERS["bsq"]))
    return KEPT[make]


def test_positions_are_resized_for_other_image_sizes():
    codec = build_codec(vit(QUANTIZERS["continuous"]))
    small, large = torch.rand(1, 3, 16, 16), torch.rand(1, 3, 32, 32)
    assert codec.forward_features(small).shape == (1, 4, 4, 24)
    assert codec.forward_features(large).shape == (1, 8, 8, 24)
    assert codec.decode(codec.encode(large).codes).shape == large.shape


def test_custom_pixel_normalization():
    norm = NORMALIZATIONS["clip"]
    plain = conv(QUANTIZERS["continuous"])
    codec, other = build_codec(plain), build_codec(plain.replace(mean=norm.mean, std=norm.std))
    other.load_state_dict(codec.state_dict())
    pixels = torch.rand(1, 3, 8, 8) * 2 - 1
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in norm)
    torch.testing.assert_close(other.forward_features(pixels), codec.forward_features(((pixels + 1) / 2 - mean) / std))
    codes = torch.rand(1, 2, 2, 6)
    torch.testing.assert_close((other.decode(codes) + 1) / 2, codec.decode(codes) * std + mean)


def test_uint8_round_trip():
    codec = get_small_codec(conv)
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    assert torch.equal(codec.to_uint8(codec.to_pixels(levels)), levels)
    assert torch.equal(codec.to_uint8(torch.tensor([-7.0, 7.0])), torch.tensor([0, 255], dtype=torch.uint8))


@pytest.mark.parametrize("make", [conv, vit])
@pytest.mark.parametrize("name", ["vq", "bsq", "kl", "grouped", "simvq"])
def test_cost_matches_torch_flop_counter(make, name):
    codec = build_codec(make(QUANTIZERS[name]))
    if make is conv:
        codec = build_codec(conv(QUANTIZERS[name], attention_levels=(1, 2), spatial_norm=name in ("vq", "kl")))
    pixels = torch.rand(2, 3, 8, 12) * 2 - 1
    work = codec.workload(2, 8, 12)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        codec.pre_quant_proj(codec.forward_features(pixels))
        codec.decode(torch.zeros(2, 2, 3, codec.quantizer.width))
    searched = {"vq": 50 * 6, "grouped": 2 * 20 * 3, "simvq": 40 * 6}.get(name, 0) * 2 * 12  # 12 vectors
    searched += 2 * 40 * 6 * 6 if name == "simvq" else 0  # its table, made anew
    assert cost.count_flops(codec, work) == counter.get_total_flops() + searched
    held = sum(p.numel() * p.element_size() for p in codec.parameters())
    tables = [part.codebook for part in codec.modules() if hasattr(part, "codebook")]
    buffers = sum(4 * table.numel() for table in tables if not isinstance(table, torch.nn.Parameter))
    assert cost.count_bytes(codec, work).weights == held + buffers


def test_identity_depends_on_config_and_every_weight():
    codec = build_codec(conv(QUANTIZERS["bsq"]))
    same = Codec(codec.config)
    same.load_state_dict(codec.state_dict())
    assert compute_codec_identity(same) == compute_codec_identity(codec)
    for name, p in same.named_parameters():
        before = p.data.clone()
        p.data.view(-1)[0] += 1e-3
        assert compute_codec_identity(same) != compute_codec_identity(codec), name
        p.data.copy_(before)
    assert compute_codec_identity(same) == compute_codec_identity(codec)
    assert compute_codec_identity(same.bfloat16()) != compute_codec_identity(codec)
    other = Codec(codec.config.replace(scaling_factor=2.0))
    other.load_state_dict(codec.state_dict())
    assert compute_codec_identity(other) != compute_codec_identity(codec)


def test_released_parameter_counts():
    def of(name: str) -> tuple[Codec, int]:
        with torch.device("meta"):
            codec = Codec(CODEC_PRESETS[name])
        return codec, sum(p.numel() for p in codec.parameters())

    codec, count = of("sd-vae")
    assert count == 83_653_863  # as the released file holds
    assert of("movq")[1] + 16_384 * 4 == 67_832_495  # diffusers' VQModel of Kandinsky's config
    assert of("amused")[1] + 8192 * 64 == 146_244_675  # and of aMUSEd's
    codec, count = of("gaia1")
    h, w = (side // codec.downsample_factor for side in codec.image_size)
    assert (h, w, h * w, codec.bits) == (18, 32, 576, 13)
    assert round(24 / codec.bits_per_pixel, 1) == 472.6
    assert 0.28e9 < count < 0.32e9
    for name, times in {"qlip-b16-256": 219.4, "qlip-b8-256": 54.9, "qlip-l14-392": 168.0}.items():
        assert round(24 / of(name)[0].bits_per_pixel, 1) == times


def test_invalid_configs_and_inputs_raise():
    with pytest.raises(ConfigError, match="groups"):
        ConvAutoencoderConfig(widths=(8, 9), norm_groups=4)
    with pytest.raises(ConfigError, match="multiple"):
        ConvAutoencoderConfig(widths=(8, 8), norm_groups=4, image_size=(15, 16))
    with pytest.raises(ConfigError, match="levels"):
        ConvAutoencoderConfig(widths=(8, 8), norm_groups=4, attention_levels=(2,), image_size=(16, 16))
    with pytest.raises(ConfigError, match="pre_quant"):
        Codec(conv(QUANTIZERS["bsq"]).replace(pre_quant="none"))
    with pytest.raises(ConfigError, match="not positive"):
        conv(QUANTIZERS["bsq"]).replace(std=(1.0, 0.0, 1.0))
    encoder = ViTConfig(layers=1, block=BLOCK, image_size=17, patch_size=4)
    with pytest.raises(ConfigError, match="does not divide into patches"):
        make_vit_autoencoder_config(encoder, 6)
    codec = get_small_codec(conv)
    with pytest.raises(ImageError, match="give pixels"):
        codec.encode(torch.zeros(1, 4, 8, 8))
    with pytest.raises(ImageError, match="give codes of shape"):
        codec.decode(torch.zeros(1, 2, 2, 5))
