"""The convolutional pair against diffusers' AutoencoderKL and VQModel: codes, variances, pixels and gradients, at odd
sizes."""

import random

import pytest
import torch

from helpers import randomize, relative
from vitrail.codecs.codec import Codec
from vitrail.hub.autoencoders import AUTOENCODER_KL, VQ_MODEL
from vitrail.hub.family import Family

diffusers = pytest.importorskip("diffusers")
KINDS = {AUTOENCODER_KL: diffusers.AutoencoderKL, VQ_MODEL: diffusers.VQModel}  # takes seconds: not in the first test

CASES = 12


def odd_net(draw: random.Random, groups: int) -> dict:
    levels = draw.randint(1, 3)
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
        "mid_block_add_attention": draw.random() < 0.7,
    }


def odd(seed: int) -> dict:
    """Settings that AutoencoderKL takes, and nobody would choose."""
    draw = random.Random(seed)
    return odd_net(draw, draw.choice([1, 2, 4])) | {
        "shift_factor": draw.choice([None, 0.25]),
        "use_quant_conv": (bridge := draw.random() < 0.7),
        "use_post_quant_conv": bridge if draw.random() < 0.7 else not bridge,
    }


def odd_vq(seed: int) -> dict:
    """The same of VQModel, every second with modulated norms, which have 32 groups."""
    draw = random.Random(seed)
    about = odd_net(draw, 32 if seed % 2 else draw.choice([1, 2, 4])) | {"num_vq_embeddings": draw.randint(2, 40)}
    if seed % 2:
        return about | {"norm_type": "spatial"}
    return about | {"vq_embed_dim": draw.choice([None, 1, 3])}


def pair(about: dict, seed: int, family: Family = AUTOENCODER_KL) -> tuple[torch.nn.Module, Codec]:
    theirs = randomize(KINDS[family](**about), seed, spread=0.3).eval()
    config = family.read(about)
    state, ours = theirs.state_dict(), {}
    for move in family.moves(config):
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
    same_slopes(theirs, codec, AUTOENCODER_KL)


def same_slopes(theirs: torch.nn.Module, codec: Codec, family: Family, but: str = "") -> None:
    slopes = {name: p.grad for name, p in codec.named_parameters()}
    state = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in theirs.named_parameters()}
    largest = max(slope.abs().max().item() for slope in state.values())
    for move in family.moves(codec.config):
        if but and but in move.theirs:
            continue
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


@pytest.mark.parametrize("seed", range(CASES))
def test_a_codebook_equals_diffusers_with_gradients(seed):
    """In float64, but for the codes, which are kept in float32."""
    theirs, codec = (model.double() for model in pair(odd_vq(seed), seed, VQ_MODEL))
    pixels = some_pixels(codec, seed).double()
    mine, other = pixels.clone().requires_grad_(), pixels.clone().requires_grad_()
    again, found = codec(mine)
    features = theirs.encode(other).latents
    assert torch.equal(found.ids.flatten(), theirs.quantize(features)[2][2])
    reference = theirs.decode(features)
    assert relative(again, reference.sample) < 1e-11

    # Their quarter is at what moves the codes, where the paper has it at what moves the features.
    (again.square().sum() + found.losses["commit"] + 0.25 * found.losses["codebook"]).backward()
    (reference.sample.square().sum() + reference.commit_loss).backward()
    assert relative(mine.grad, other.grad) < 1e-9
    codes = "quantize.embedding.weight"
    same_slopes(theirs, codec, VQ_MODEL, but=codes)
    assert relative(codec.quantizer.learned.grad, theirs.quantize.embedding.weight.grad) < 1e-5


def test_a_code_scales_and_shifts_the_places_that_it_stands_for_and_no_others():
    _, codec = pair(odd_vq(1), 1, VQ_MODEL)
    norm = codec.decoder.norm
    x, codes = torch.randn(1, norm.norm.num_channels, 4, 6), torch.randn(1, norm.scale.in_channels, 2, 3)
    moved = codes.clone()
    moved[..., 1, 2] += 1
    changed = (norm(x, codes) != norm(x, moved)).any(1)[0]
    assert changed[2:, 4:].all() and changed.sum() == 4


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
    for family, settings in ((AUTOENCODER_KL, odd), (VQ_MODEL, odd_vq)):
        for seed in range(40):
            config = family.read(settings(seed))
            assert family.fits(config), settings(seed)
            assert family.read(family.write(config)) == config
