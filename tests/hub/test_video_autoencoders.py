"""Causal video codecs of diffusers: values, gradients, export."""

import random

import pytest
import torch

from helpers import randomize, relative
from vitrail.codecs import CausalVideoCodec
from vitrail.errors import CheckpointError
from vitrail.hub import from_hf, load, save, to_hf

diffusers = pytest.importorskip("diffusers")
AutoencoderKLCosmos = diffusers.AutoencoderKLCosmos  # the import takes seconds: here, not in the first test


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
    return randomize(model, spread=0.3).eval(), spatial, temporal


def settings_of(model) -> dict:
    """Return the settings of a model of diffusers, without the version."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in model.config.items()}
    return {name: value for name, value in plain.items() if not name.startswith("_")}


@pytest.mark.parametrize("seed", range(12))
def test_cosmos_agrees_with_diffusers(seed, tmp_path):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    theirs, spatial, temporal = make_cosmos(draw)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs").eval()
    assert isinstance(ours, CausalVideoCodec)
    frames = 1 + temporal * draw.randint(0, 2)
    video = torch.rand(2, frames, 3, spatial * draw.randint(1, 3), spatial * draw.randint(1, 2)) * 2 - 1
    inputs = [video.clone().requires_grad_(), video.transpose(1, 2).clone().requires_grad_()]
    latents = theirs.encode(inputs[1]).latent_dist.mode()
    codes = ours.encode(inputs[0]).codes
    assert relative(codes, latents.permute(0, 2, 3, 4, 1)) < 1e-4
    pixels, expected = ours.decode(codes), theirs.decode(latents).sample
    assert pixels.shape == video.shape
    assert relative(pixels, expected.transpose(1, 2)) < 1e-4
    pixels.square().mean().backward()
    expected.square().mean().backward()
    assert relative(inputs[0].grad, inputs[1].grad.transpose(1, 2)) < 1e-3
    assert relative(ours.encoder.first.space.weight.grad, theirs.encoder.conv_in.conv_s.weight.grad[:, :, 0]) < 1e-3
    to_hf(ours, tmp_path / "ours")
    again = AutoencoderKLCosmos.from_pretrained(tmp_path / "ours")
    assert settings_of(again) == settings_of(theirs)
    state = theirs.state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())


def test_published_shape_has_the_same_parameters():
    """The defaults of the class: CV 8×8×8."""
    from vitrail.hub.video_autoencoders import AUTOENCODER_COSMOS as family

    with torch.device("meta"):
        theirs = AutoencoderKLCosmos()
        ours = CausalVideoCodec(family.from_hf_config(dict(theirs.config)))
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert family.supports(ours.config)


def test_native_format(tmp_path):
    theirs, spatial, _ = make_cosmos(random.Random(0))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs").eval()
    save(ours, tmp_path / "native")
    video = torch.rand(1, 1, 3, spatial, spatial)
    assert torch.equal(load(tmp_path / "native").eval().encode(video).codes, ours.encode(video).codes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_type": "dct"}, "patch_type 'dct'"),
        ({"num_layers": 0}, "num_layers"),
        ({"out_channels": 4}, "out_channels 4"),
        ({"latent_channels": 2**30}, "latent_channels"),
    ],
)
def test_unsupported_configs_raise(changes, message):
    from vitrail.hub.video_autoencoders import AUTOENCODER_COSMOS as family

    with pytest.raises(CheckpointError, match=message):
        family.from_hf_config(changes)
