"""The convolutional pair against diffusers' AutoencoderKL: codes, variances, pixels and gradients, at odd sizes."""

import random

import pytest
import torch

from helpers import randomize, relative
from vitrail.codecs.codec import Codec
from vitrail.hub.autoencoders import AUTOENCODER_KL

diffusers = pytest.importorskip("diffusers")
AutoencoderKL = diffusers.AutoencoderKL  # the import takes seconds: here, not in the first test

CASES = 12


def odd(seed: int) -> dict:
    """Settings that AutoencoderKL takes, and nobody would choose."""
    draw = random.Random(seed)
    levels, groups = draw.randint(1, 3), draw.choice([1, 2, 4])
    attention = [draw.random() < 0.3 for _ in range(levels)]
    channels = draw.choice([1, 3])
    return {
        "in_channels": channels,
        "out_channels": channels,
        "down_block_types": ["AttnDownEncoderBlock2D" if a else "DownEncoderBlock2D" for a in attention],
        "up_block_types": ["AttnUpDecoderBlock2D" if a else "UpDecoderBlock2D" for a in reversed(attention)],
        "block_out_channels": [groups * draw.choice([2, 4]) for _ in range(levels)],
        "layers_per_block": draw.randint(1, 3),
        "latent_channels": draw.randint(1, 5),
        "norm_num_groups": groups,
        "sample_size": 32,
        "scaling_factor": draw.choice([0.18215, 0.5]),
        "shift_factor": draw.choice([None, 0.25]),
        "use_quant_conv": (bridge := draw.random() < 0.7),
        "use_post_quant_conv": bridge if draw.random() < 0.7 else not bridge,
        "mid_block_add_attention": draw.random() < 0.7,
    }


def pair(about: dict, seed: int) -> tuple[torch.nn.Module, Codec]:
    theirs = randomize(AutoencoderKL(**about), seed, spread=0.3).eval()
    config = AUTOENCODER_KL.read(about)
    state, ours = theirs.state_dict(), {}
    for move in AUTOENCODER_KL.moves(config):
        ours |= zip(move.ours, move.pull([state.pop(name) for name in move.theirs]), strict=True)
    assert not state
    codec = Codec(config).eval()
    codec.load_state_dict(ours)
    return theirs, codec


@pytest.mark.parametrize("seed", range(CASES))
def test_equals_diffusers_with_gradients(seed):
    """In float64, where what differs is not rounding."""
    about = odd(seed)
    theirs, codec = (model.double() for model in pair(about, seed))
    pixels = some_pixels(codec, seed).double()
    mine, other = pixels.clone().requires_grad_(), pixels.clone().requires_grad_()

    read = codec.into(codec.features(mine))  # mean and log-variance, (B, h, w, 2d)
    drawn = theirs.encode(other).latent_dist
    mean, log = read.movedim(-1, 1).chunk(2, 1)
    assert relative(mean, drawn.mean) < 1e-11
    assert relative(log.clamp(-30, 20), drawn.logvar) < 1e-11
    assert torch.equal(codec.encode(mine).codes.movedim(-1, 1), mean)
    again, reference = codec.decode(mean.movedim(1, -1)), theirs.decode(drawn.mean).sample
    assert relative(again, reference) < 1e-11

    again.square().sum().backward()
    reference.square().sum().backward()
    assert relative(mine.grad, other.grad) < 1e-9
    slopes = {name: p.grad for name, p in codec.named_parameters()}
    state = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in theirs.named_parameters()}
    largest = max(slope.abs().max().item() for slope in state.values())
    for move in AUTOENCODER_KL.moves(codec.config):
        for name, slope in zip(move.ours, move.pull([state[name] for name in move.theirs]), strict=True):
            own = slopes[name] if slopes[name] is not None else torch.zeros_like(slope)
            assert (own - slope).abs().max().item() < 1e-9 * largest, name


@torch.no_grad()
def test_equals_diffusers_in_float32():
    for seed in range(CASES):
        theirs, codec = pair(odd(seed), seed)
        pixels = some_pixels(codec, seed)
        drawn = theirs.encode(pixels).latent_dist
        codes = codec.encode(pixels).codes
        assert relative(codes.movedim(-1, 1), drawn.mean) < 1e-5
        assert relative(codec.decode(codes), theirs.decode(drawn.mean).sample) < 1e-5


def some_pixels(codec: Codec, seed: int) -> torch.Tensor:
    h, w = random.Random(seed).choice([(2, 2), (2, 3), (5, 2)])
    return torch.randn(2, codec.config.net.channels, h * codec.factor, w * codec.factor)


def test_a_sample_has_the_mean_and_the_variance():
    _, codec = pair(odd(3), 3)
    pixels = torch.randn(1, codec.config.net.channels, codec.factor, codec.factor).expand(4000, -1, -1, -1)
    with torch.no_grad():
        features = codec.into(codec.features(pixels[:1])).expand(4000, -1, -1, -1)
        mean, log = features.chunk(2, -1)
        codec.quantizer.train()
        drawn = codec.quantizer(features).codes
    torch.testing.assert_close(drawn.mean(0), mean[0], atol=0.1 * (log[0] / 2).exp().max().item(), rtol=0)
    torch.testing.assert_close(drawn.std(0), (log[0] / 2).exp(), rtol=0.1, atol=1e-6)


def test_settings_survive_the_way_there_and_back():
    for seed in range(40):
        config = AUTOENCODER_KL.read(odd(seed))
        assert AUTOENCODER_KL.fits(config), odd(seed)
        assert AUTOENCODER_KL.read(AUTOENCODER_KL.write(config)) == config
