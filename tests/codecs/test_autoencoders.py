"""Compare the convolutional autoencoder with diffusers' AutoencoderKL and VQModel: codes, pixels and gradients."""

import random

import pytest
import torch

from helpers import randomize, relative
from vitrail.codecs.codec import Codec
from vitrail.hub.autoencoders import AUTOENCODER_KL, VQ_MODEL
from vitrail.hub.checkpoint_family import CheckpointFamily

diffusers = pytest.importorskip("diffusers")
KINDS = {
    AUTOENCODER_KL.name: diffusers.AutoencoderKL,
    VQ_MODEL.name: diffusers.VQModel,
}  # takes seconds: not in the first test

CASES = 12


def draw_net_config(draw: random.Random, groups: int) -> dict:
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


def draw_kl_config(seed: int) -> dict:
    """Draw unusual but valid settings of AutoencoderKL."""
    draw = random.Random(seed)
    return draw_net_config(draw, draw.choice([1, 2, 4])) | {
        "shift_factor": draw.choice([None, 0.25]),
        "use_quant_conv": (bridge := draw.random() < 0.7),
        "use_post_quant_conv": bridge if draw.random() < 0.7 else not bridge,
    }


def draw_vq_config(seed: int) -> dict:
    """Draw settings of VQModel; every second has spatial norms, which need 32 groups."""
    draw = random.Random(seed)
    about = draw_net_config(draw, 32 if seed % 2 else draw.choice([1, 2, 4])) | {
        "num_vq_embeddings": draw.randint(2, 40)
    }
    if seed % 2:
        return about | {"norm_type": "spatial"}
    return about | {"vq_embed_dim": draw.choice([None, 1, 3])}


def make_pair(about: dict, seed: int, family: CheckpointFamily = AUTOENCODER_KL) -> tuple[torch.nn.Module, Codec]:
    theirs = randomize(KINDS[family.name](**about), seed, spread=0.3).eval()
    config = family.from_hf_config(about)
    state, ours = theirs.state_dict(), {}
    for move in family.tensor_rules(config):
        ours |= zip(move.native, move.load([state.pop(name) for name in move.hf]), strict=True)
    assert not state
    codec = Codec(config).eval()
    codec.load_state_dict(ours)
    return theirs, codec


@pytest.mark.parametrize("seed", range(CASES))
def test_matches_diffusers_with_gradients(seed):
    """Compare in float64, so that rounding does not matter."""
    about = draw_kl_config(seed)
    theirs, codec = (model.double() for model in make_pair(about, seed))
    pixels = draw_pixels(codec, seed).double()
    mine, other = pixels.clone().requires_grad_(), pixels.clone().requires_grad_()

    read = codec.pre_quant_proj(codec.forward_features(mine))  # mean and log-variance, (B, h, w, 2d)
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
    assert_same_gradients(theirs, codec, AUTOENCODER_KL)


def assert_same_gradients(theirs: torch.nn.Module, codec: Codec, family: CheckpointFamily, but: str = "") -> None:
    slopes = {name: p.grad for name, p in codec.named_parameters()}
    state = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in theirs.named_parameters()}
    largest = max(slope.abs().max().item() for slope in state.values())
    for move in family.tensor_rules(codec.config):
        if but and but in move.hf:
            continue
        for name, slope in zip(move.native, move.load([state[name] for name in move.hf]), strict=True):
            own = slopes[name] if slopes[name] is not None else torch.zeros_like(slope)
            assert (own - slope).abs().max().item() < 1e-9 * largest, name


@torch.no_grad()
def test_matches_diffusers_in_float32():
    for seed in range(CASES):
        theirs, codec = make_pair(draw_kl_config(seed), seed)
        pixels = draw_pixels(codec, seed)
        drawn = theirs.encode(pixels).latent_dist
        codes = codec.encode(pixels).codes
        assert relative(codes.movedim(-1, 1), drawn.mean) < 1e-5
        assert relative(codec.decode(codes), theirs.decode(drawn.mean).sample) < 1e-5


@pytest.mark.parametrize("seed", range(CASES))
def test_vq_matches_diffusers_with_gradients(seed):
    """Compare in float64, except for codes, which stay in float32."""
    theirs, codec = (model.double() for model in make_pair(draw_vq_config(seed), seed, VQ_MODEL))
    pixels = draw_pixels(codec, seed).double()
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
    assert_same_gradients(theirs, codec, VQ_MODEL, but=codes)
    assert relative(codec.quantizer.learned.grad, theirs.quantize.embedding.weight.grad) < 1e-5


def test_spatial_norm_modulates_only_its_positions():
    _, codec = make_pair(draw_vq_config(1), 1, VQ_MODEL)
    norm = codec.decoder.norm
    x, codes = torch.randn(1, norm.norm.num_channels, 4, 6), torch.randn(1, norm.scale.in_channels, 2, 3)
    moved = codes.clone()
    moved[..., 1, 2] += 1
    changed = (norm(x, codes) != norm(x, moved)).any(1)[0]
    assert changed[2:, 4:].all() and changed.sum() == 4


def draw_pixels(codec: Codec, seed: int) -> torch.Tensor:
    h, w = random.Random(seed).choice([(2, 2), (2, 3), (5, 2)])
    return torch.randn(2, codec.config.net.channels, h * codec.downsample_factor, w * codec.downsample_factor)


def test_kl_samples_have_predicted_mean_and_variance():
    _, codec = make_pair(draw_kl_config(3), 3)
    pixels = torch.randn(1, codec.config.net.channels, codec.downsample_factor, codec.downsample_factor).expand(
        4000, -1, -1, -1
    )
    with torch.no_grad():
        features = codec.pre_quant_proj(codec.forward_features(pixels[:1])).expand(4000, -1, -1, -1)
        mean, log = features.chunk(2, -1)
        codec.quantizer.train()
        drawn = codec.quantizer(features).codes
    torch.testing.assert_close(drawn.mean(0), mean[0], atol=0.1 * (log[0] / 2).exp().max().item(), rtol=0)
    torch.testing.assert_close(drawn.std(0), (log[0] / 2).exp(), rtol=0.1, atol=1e-6)


def test_config_round_trip():
    for family, settings in ((AUTOENCODER_KL, draw_kl_config), (VQ_MODEL, draw_vq_config)):
        for seed in range(40):
            config = family.from_hf_config(settings(seed))
            assert family.supports(config), settings(seed)
            assert family.from_hf_config(family.to_hf_config(config)) == config
