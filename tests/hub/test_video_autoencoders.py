"""Causal video codecs of diffusers: values, gradients, export."""

import random

import pytest
import torch

from helpers import randomize, relative
from vitrail.codecs import CausalVideoCodec, causal_layers
from vitrail.errors import CheckpointError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.registry import FAMILIES

diffusers = pytest.importorskip("diffusers")
AutoencoderKLCosmos = diffusers.AutoencoderKLCosmos  # the import takes seconds: here, not in the first test
AutoencoderKLWan = diffusers.AutoencoderKLWan
AutoencoderKLCogVideoX = diffusers.AutoencoderKLCogVideoX


def make_cosmos(draw: random.Random):
    spatial, temporal, patch = draw.choice([(8, 8, 4), (8, 4, 4), (16, 8, 4), (4, 4, 2), (4, 2, 2), (2, 2, 2)])
    widths = [tuple(draw.choice((4, 8, 12)) for _ in range(4)) for _ in range(2)]
    latent = draw.randint(1, 5)
    model = AutoencoderKLCosmos(
        latent_channels=latent,
        encoder_block_out_channels=widths[0],
        decode_block_out_channels=widths[1],
        attention_resolutions=draw.choice([(), (64 // patch,), (32 // patch, 16 // patch)]),
        resolution=64,
        num_layers=draw.randint(1, 2),
        patch_size=patch,
        patch_type=draw.choice(["haar", "rearrange"]),
        spatial_compression_ratio=spatial,
        temporal_compression_ratio=temporal,
        latents_mean=[0.1] * 3 * latent,
        latents_std=[0.5] * 3 * latent,
    )
    return randomize(model, spread=0.3).eval(), spatial, 1 + temporal * draw.randint(0, 2)


def make_wan(draw: random.Random):
    time = draw.choice([(False, True, True), (True, True, False), (True, False), (False, True)])
    is_residual = draw.random() < 0.5
    patch = draw.choice([None, 2])
    latent, width = draw.randint(1, 4), draw.choice((4, 6))
    channels = 3 * (patch or 1) ** 2
    model = AutoencoderKLWan(
        base_dim=width,
        decoder_base_dim=draw.choice([None, 8]) if is_residual else None,
        z_dim=latent,
        dim_mult=[1, 2, 2, 2][: len(time) + 1],
        num_res_blocks=draw.randint(1, 2),
        temperal_downsample=list(time),
        latents_mean=[0.1] * latent,
        latents_std=[0.5] * latent,
        is_residual=is_residual,
        in_channels=channels,
        out_channels=channels,
        patch_size=patch,
        scale_factor_temporal=2 ** sum(time),
        scale_factor_spatial=(patch or 1) * 2 ** len(time),
    )
    # diffusers encodes four frames at a time, whatever the temporal factor is.
    return randomize(model, spread=0.3).eval(), (patch or 1) * 2 ** len(time), 1 + 4 * draw.randint(0, 2)


def make_cogvideox(draw: random.Random):
    levels, channels = draw.randint(2, 3), draw.choice((1, 3))
    has_quant = draw.random() < 0.3  # the convolutions of diffusers have as many channels as the pixels
    latent = channels if has_quant else draw.randint(1, 4)
    model = AutoencoderKLCogVideoX(
        in_channels=channels,
        out_channels=channels,
        down_block_types=["CogVideoXDownBlock3D"] * levels,
        up_block_types=["CogVideoXUpBlock3D"] * levels,
        block_out_channels=[draw.choice((4, 8, 12)) for _ in range(levels)],
        latent_channels=latent,
        layers_per_block=draw.randint(1, 2),
        norm_eps=draw.choice((1e-6, 1e-5)),
        norm_num_groups=draw.choice((1, 2, 4)),
        temporal_compression_ratio=2 ** draw.randint(0, levels - 1),
        sample_height=48,
        sample_width=72,
        scaling_factor=0.7,
        latents_mean=[0.1] * latent,
        latents_std=[0.5] * latent,
        use_quant_conv=has_quant,
        use_post_quant_conv=has_quant,
        invert_scale_latents=draw.random() < 0.5,
    )
    frames = draw.choice((1, 2, 3, 4, 6, 8, 9, 13, 16, 17, 21))
    return randomize(model, spread=0.3).eval(), 2 ** (levels - 1), frames


def settings_of(model) -> dict:
    """Return the settings of a model of diffusers, without the version."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in model.config.items()}
    return {name: value for name, value in plain.items() if not name.startswith("_")}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("make", [make_cosmos, make_wan, make_cogvideox])
def test_agrees_with_diffusers(make, seed, tmp_path, monkeypatch):
    monkeypatch.setattr(causal_layers, "FEW_CHANNELS", 16 if seed % 2 else 1)  # both ways to convolve
    draw = random.Random(seed)
    torch.manual_seed(seed)
    theirs, spatial, frames = make(draw)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs").eval()
    assert isinstance(ours, CausalVideoCodec)
    channels = ours.config.net.channels
    video = torch.rand(2, frames, channels, spatial * draw.randint(1, 3), spatial * draw.randint(1, 2)) * 2 - 1
    inputs = [video.clone().requires_grad_(), video.transpose(1, 2).clone().requires_grad_()]
    latents = theirs.encode(inputs[1]).latent_dist.mode()
    codes = ours.encode(inputs[0]).codes
    assert relative(codes, latents.permute(0, 2, 3, 4, 1)) < 1e-4
    pixels, expected = ours.decode(codes), theirs.decode(latents).sample
    assert codes.shape[1] == ours.count_latent_frames(frames)
    assert pixels.shape[1] == ours.count_frames(codes.shape[1])
    if make is make_wan:  # diffusers clamps
        pixels = pixels.clamp(-1, 1)
    assert relative(pixels, expected.transpose(1, 2)) < 1e-4
    pixels.square().mean().backward()
    expected.square().mean().backward()
    assert relative(inputs[0].grad, inputs[1].grad.transpose(1, 2)) < 1e-3
    # One frame does not pass the convolutions over time of Wan.
    gradients, own = (
        {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        for model in (theirs, ours)
    )
    rules = FAMILIES[type(theirs).__name__].tensor_rules(ours.config)
    for rule in rules:
        for name, grad in zip(rule.hf, rule.export([own[native] for native in rule.native]), strict=True):
            assert (grad - gradients[name]).norm() <= 1e-3 * gradients[name].norm() + 1e-4, name
    to_hf(ours, tmp_path / "ours")
    again = type(theirs).from_pretrained(tmp_path / "ours")
    assert settings_of(again) == settings_of(theirs)
    state = theirs.state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (AutoencoderKLCosmos, {}),
        (AutoencoderKLWan, {}),
        (AutoencoderKLCogVideoX, {}),
        (
            AutoencoderKLWan,
            {
                "base_dim": 160,
                "decoder_base_dim": 256,
                "z_dim": 48,
                "is_residual": True,
                "in_channels": 12,
                "out_channels": 12,
                "patch_size": 2,
                "scale_factor_spatial": 16,
                "latents_mean": [0.0] * 48,
                "latents_std": [1.0] * 48,
            },
        ),
    ],
)
def test_published_shapes_have_the_same_parameters(kind, settings):
    """CV 8×8×8, Wan 2.1, CogVideoX and Wan 2.2."""
    family = FAMILIES[kind.__name__]
    with torch.device("meta"):
        theirs = kind(**settings)
        ours = CausalVideoCodec(family.from_hf_config(dict(theirs.config)))
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert family.supports(ours.config)


def test_native_format(tmp_path):
    theirs, spatial, _ = make_cosmos(random.Random(0))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs").eval()
    save(ours, tmp_path / "native")
    video = torch.rand(1, 1, 3, spatial, spatial)
    again = load(tmp_path / "native").eval()
    assert again.config == ours.config
    torch.testing.assert_close(again.encode(video).codes, ours.encode(video).codes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("AutoencoderKLCosmos", {"patch_type": "dct"}, "patch_type 'dct'"),
        ("AutoencoderKLCosmos", {"num_layers": 0}, "num_layers"),
        ("AutoencoderKLCosmos", {"out_channels": 4}, "out_channels 4"),
        ("AutoencoderKLCosmos", {"latent_channels": 2**30}, "latent_channels"),
        ("AutoencoderKLWan", {"attn_scales": [0.5]}, "attn_scales"),
        ("AutoencoderKLWan", {"scale_factor_temporal": 8}, "contradict the levels"),
        ("AutoencoderKLWan", {"patch_size": 2}, "in_channels 3"),
        ("AutoencoderKLCogVideoX", {"block_out_channels": [64, 64]}, "do not fit 2 block_out_channels"),
        ("AutoencoderKLCogVideoX", {"up_block_types": ["UpBlock"] * 4}, "UpBlock"),
        ("AutoencoderKLCogVideoX", {"use_quant_conv": True}, "use_quant_conv True"),
        ("AutoencoderKLCogVideoX", {"act_fn": "gelu"}, "act_fn gelu"),
        ("AutoencoderKLCogVideoX", {"temporal_compression_ratio": 1.5}, "temporal_compression_ratio 1.5"),
        ("AutoencoderKLCogVideoX", {"shift_factor": 0.5}, "shift_factor 0.5"),
    ],
)
def test_unsupported_configs_raise(family, changes, message):
    with pytest.raises(CheckpointError, match=message):
        FAMILIES[family].from_hf_config(changes)
