"""Causal video codec: causality, streaming, wavelets, frame arithmetic and errors."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import randomize, relative
from vitrail.codecs import (
    CausalVideoCodec,
    CausalVideoCodecConfig,
    CogVideoXAutoencoderConfig,
    CosmosAutoencoderConfig,
    WanAutoencoderConfig,
    causal_layers,
)
from vitrail.codecs.causal_layers import group_norm, patch_haar, patch_pixels, unpatch_haar, unpatch_pixels
from vitrail.codecs.quantizers import FSQConfig
from vitrail.codecs.quantizers.continuous import IdentityQuantizerConfig
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import Workload, cost

NET = {"encoder_widths": (8, 8, 12), "decoder_widths": (8, 8, 12), "layers": 1, "latent_channels": 4, "image_size": 16}
FACTORS = [
    {"spatial_factor": 4, "temporal_factor": 4, "patch_size": 4},
    {"spatial_factor": 4, "temporal_factor": 2, "patch_size": 2},
    {"spatial_factor": 2, "temporal_factor": 2, "patch_size": 2, "attention_levels": (1,), "wavelets": False},
    {
        "spatial_factor": 8,
        "temporal_factor": 8,
        "patch_size": 4,
        "encoder_widths": (4, 4, 8, 8),
        "decoder_widths": (4, 4, 8, 8),
    },
]


WAN = {"width": 4, "multipliers": (1, 2, 2), "layers": 1, "latent_channels": 4, "temporal_steps": (True, True)}
FACTORS += [WAN, WAN | {"temporal_steps": (False, True), "resampled_shortcut": True, "patch_size": 2}]


COGVIDEOX = {"widths": (4, 8), "layers": 1, "latent_channels": 4, "temporal_factor": 2, "norm_groups": 2}


def make_codec(discrete: bool = False, **net) -> CausalVideoCodec:
    torch.manual_seed(0)
    if "widths" in net:
        config = CogVideoXAutoencoderConfig(**net)
    elif "multipliers" in net:
        config = WanAutoencoderConfig(**net)
    else:
        config = CosmosAutoencoderConfig(**NET | net)
    config = CausalVideoCodecConfig(
        net=config,
        quantizer=FSQConfig(levels=(5, 4, 3)) if discrete else IdentityQuantizerConfig(dim=4),
    )
    return randomize(CausalVideoCodec(config), spread=0.3).eval()


def make_video(codec: CausalVideoCodec, latent_frames: int, batch: int = 1) -> torch.Tensor:
    side = codec.downsample_factor
    return torch.rand(batch, codec.count_frames(latent_frames), 3, 2 * side, side) * 2 - 1


@torch.no_grad()
@pytest.mark.parametrize("net", FACTORS)
@pytest.mark.usefixtures("few_channels")
def test_later_frames_change_no_earlier_latent(net):
    codec = make_codec(**net)
    video = make_video(codec, 4)
    codes = codec.encode(video).codes
    for n in range(4):
        changed = video.clone()
        changed[:, codec.count_frames(n) if n else 0 :] = torch.rand(())
        again = codec.encode(changed).codes
        assert torch.equal(again[:, :n], codes[:, :n])
        assert not torch.equal(again[:, n], codes[:, n])
    pixels = codec.decode(codes)
    assert pixels.shape == video.shape
    codes[:, 2:] += 1
    again = codec.decode(codes)
    assert torch.equal(again[:, : codec.count_frames(2)], pixels[:, : codec.count_frames(2)])
    assert not torch.equal(again[:, codec.count_frames(2)], pixels[:, codec.count_frames(2)])


@pytest.fixture(params=[1, 16])
def few_channels(request, monkeypatch):
    """Convolve small networks in both ways."""
    monkeypatch.setattr(causal_layers, "FEW_CHANNELS", request.param)


@torch.no_grad()
@pytest.mark.parametrize("net", FACTORS)
@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.usefixtures("few_channels")
def test_chunks_equal_the_whole_video(net, discrete):
    codec = make_codec(discrete, **net)
    video = make_video(codec, 6, batch=2)
    whole = codec.encode(video)
    for cuts in ((1, 2, 3, 4, 5), (3,), (2, 5), ()):
        bounds = [0, *cuts, 6]
        cache, codes, pixels = codec.make_cache(), [], []
        for start, end in itertools.pairwise(bounds):
            frames = slice(codec.count_frames(start) if start else 0, codec.count_frames(end))
            codes.append(codec.encode(video[:, frames], cache).codes)
            pixels.append(codec.decode(whole.codes[:, start:end], cache))
        torch.testing.assert_close(torch.cat(codes, 1), whole.codes, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.cat(pixels, 1), codec.decode(whole.codes), rtol=1e-4, atol=1e-4)
    if discrete:
        assert whole.ids is not None and torch.equal(codec.lookup(whole.ids), whole.codes)


@torch.no_grad()
@pytest.mark.parametrize("frames", [16, 17, 19, 24])
@pytest.mark.usefixtures("few_channels")
def test_chunks_of_cogvideox_equal_the_whole_video(frames):
    codec = make_codec(**COGVIDEOX | {"widths": (4, 4, 8), "temporal_factor": 4})
    video, rest = torch.rand(2, frames, 3, 8, 4) * 2 - 1, frames % 8
    whole = codec.encode(video)
    cache, codes, pixels = codec.make_cache(), [], []
    for start, end in itertools.pairwise([0, *range(8 + rest, frames + 1, 8)]):
        codes.append(codec.encode(video[:, start:end], cache).codes)
    torch.testing.assert_close(torch.cat(codes, 1), whole.codes, rtol=1e-4, atol=1e-5)
    count = whole.codes.shape[1]
    for start, end in itertools.pairwise([0, *range(2 + count % 2, count + 1, 2)]):
        pixels.append(codec.decode(whole.codes[:, start:end], cache))
    torch.testing.assert_close(torch.cat(pixels, 1), codec.decode(whole.codes), rtol=1e-4, atol=1e-4)
    with pytest.raises(ImageError, match="a later chunk has 9 frames"):
        codec.encode(video[:, :9], cache)
    cache = codec.make_cache()
    codec.encode(video[:, :1], cache)
    with pytest.raises(ImageError, match=r"chunks of 1 and then 8 frames.*\n?.*give at least 8 frames first"):
        codec.encode(video[:, 1:9], cache)


@torch.no_grad()
def test_later_frames_of_a_chunk_change_earlier_latents_of_cogvideox():
    """Norms of the published network read all frames of a chunk. Chunks do not depend on later chunks."""
    codec = make_codec(**COGVIDEOX)
    video = torch.rand(1, 17, 3, 4, 4) * 2 - 1
    codes = codec.encode(video).codes
    assert codes.shape[1] == 9
    changed = video.clone()
    changed[:, 8] = 0  # the last frame of the first chunk
    assert not torch.equal(codec.encode(changed).codes[:, 0], codes[:, 0])
    changed = video.clone()
    changed[:, 9:] = 0
    again = codec.encode(changed).codes
    assert torch.equal(again[:, :5], codes[:, :5]) and not torch.equal(again[:, 5], codes[:, 5])


@torch.no_grad()
def test_frame_counts_of_cogvideox():
    """Multiples of 8 frames, and one frame more, have as many frames after decoding."""
    codec = make_codec(**COGVIDEOX | {"widths": (4, 4, 8), "temporal_factor": 4})
    for frames in range(1, 26):
        codes = codec.encode(torch.zeros(1, frames, 3, 4, 4)).codes
        assert codes.shape[1] == codec.count_latent_frames(frames)
        decoded = codec.count_frames(codes.shape[1])
        assert codec.decode(codes).shape[1] == decoded
        assert (decoded == frames) == (frames % 8 in (0, 1))
    with pytest.raises(ImageError, match="0 frames"):
        codec.count_latent_frames(0)


@torch.no_grad()
def test_bounded_cache():
    """A window of all frames changes nothing; a shorter one bounds the memory and changes later frames only."""
    codec = make_codec(**FACTORS[1])
    video, k = make_video(codec, 6), codec.temporal_factor
    whole = codec.encode(video).codes
    for window in (6, 2):
        cache = codec.make_cache(window)
        codes = [codec.encode(video[:, :1], cache).codes]
        codes += [codec.encode(video[:, 1 + i * k : 1 + (i + 1) * k], cache).codes for i in range(5)]
        kept = max(state[0].shape[2] for state in cache.encoder.values() if isinstance(state, tuple))
        assert kept <= window
        found = torch.cat(codes, 1)
        torch.testing.assert_close(found[:, :window], whole[:, :window], rtol=1e-4, atol=1e-5)
        assert torch.allclose(found, whole, rtol=1e-4, atol=1e-5) == (window == 6)
    with pytest.raises(ConfigError, match="max_frames is 0"):
        codec.make_cache(0)


@given(st.sampled_from([2, 4, 8]), st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4))
@settings(max_examples=25)
def test_patches_can_be_inverted(p, t, h, w, channels):
    video = torch.randn(2, t * p, h * p, w * p, channels)
    for forward, inverse in ((patch_haar, unpatch_haar), (patch_pixels, unpatch_pixels)):
        patches = forward(video, p)
        assert patches.shape == (2, t, h, w, channels * p**3)
        torch.testing.assert_close(inverse(patches, p), video, rtol=1e-4, atol=1e-5)


def test_haar_levels():
    """A level is the mean and the half difference of pairs over time, then height, then width; a second repeats it."""
    video = torch.randn(1, 4, 4, 4, 2)
    x = video
    for _ in range(2):
        low, high = (x[:, ::2] + x[:, 1::2]) / 2, (x[:, ::2] - x[:, 1::2]) / 2
        bands = [
            y
            for part in (low, high)
            for y in ((part[:, :, ::2] + part[:, :, 1::2]) / 2, (part[:, :, ::2] - part[:, :, 1::2]) / 2)
        ]
        bands = [
            y
            for part in bands
            for y in ((part[:, :, :, ::2] + part[:, :, :, 1::2]) / 2, (part[:, :, :, ::2] - part[:, :, :, 1::2]) / 2)
        ]
        x = torch.cat(bands, -1)
    torch.testing.assert_close(patch_haar(video, 4), x)


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 2, 3, 5])
@pytest.mark.parametrize("channels", [(3, 20), (20, 3), (20, 18)])
@pytest.mark.parametrize("repeat_first", [False, True])
def test_causal_convolution(channels, frames, repeat_first):
    """Few input and few output channels take other ways; chunks of any length equal the whole."""
    layer = causal_layers.CausalConv(*channels, repeat_first=repeat_first)
    x = torch.randn(2, frames + 4, 3, 5, channels[0])
    first = x[:, :1] if repeat_first else torch.zeros_like(x[:, :1])
    padded = torch.cat([first, first, x], 1).movedim(-1, 1)
    expected = torch.nn.functional.conv3d(padded, layer.weight, layer.bias, padding=(0, 1, 1)).movedim(1, -1)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    cache = causal_layers.StreamCache()
    chunks = [layer(part, cache) for part in x.split([1, 2, frames, 1], 1)]
    torch.testing.assert_close(torch.cat(chunks, 1), expected, rtol=1e-4, atol=1e-5)


def test_a_constant_video_has_one_subband():
    subbands = patch_haar(torch.full((1, 4, 4, 4, 3), 0.7), 4)
    torch.testing.assert_close(subbands[..., :3], torch.full((1, 1, 1, 1, 3), 0.7))
    assert subbands[..., 3:].abs().max() < 1e-6


def test_frame_counts():
    codec = make_codec(**FACTORS[0])
    assert [codec.count_latent_frames(n) for n in (1, 5, 49)] == [1, 2, 13]
    assert [codec.count_frames(n) for n in (1, 2, 13)] == [1, 5, 49]
    with pytest.raises(ImageError, match=r"6 frames does not divide into 1 \+ 4·n frames.*\n?.*use 5 or 9"):
        codec.encode(torch.zeros(1, 6, 3, 8, 8))
    with pytest.raises(ImageError, match="frames of 8 × 9 pixels"):
        codec.encode(torch.zeros(1, 5, 3, 8, 9))
    with pytest.raises(ImageError, match="video has shape"):
        codec.encode(torch.zeros(1, 5, 8, 8))
    with pytest.raises(ImageError, match="codes have shape"):
        codec.decode(torch.zeros(1, 2, 2, 2, 9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temporal_factor": 3}, "temporal_factor is 3"),
        ({"patch_size": 8}, "patch_size 8 does not fit"),
        ({"decoder_widths": (8, 8)}, "differ in length"),
        ({"spatial_factor": 32, "temporal_factor": 4}, "not enough for factors"),
        ({"attention_levels": (2,)}, "do not all exist"),
    ],
)
def test_invalid_configs_raise(changes, message):
    with pytest.raises(ConfigError, match=message):
        CosmosAutoencoderConfig(**NET | FACTORS[0] | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temporal_steps": (True,)}, "1 temporal_steps do not fit 3 multipliers"),
        ({"decoder_width": -1}, "decoder_width is -1"),
        ({"decoder_width": 3, "multipliers": (1, 1, 1)}, "cannot be halved"),
    ],
)
def test_invalid_configs_of_wan_raise(changes, message):
    with pytest.raises(ConfigError, match=message):
        WanAutoencoderConfig(**WAN | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temporal_factor": 3}, "temporal_factor is 3"),
        ({"temporal_factor": 4}, "at most 2 for 2 widths"),
        ({"norm_groups": 3}, "width 4 does not divide into 3"),
    ],
)
def test_invalid_configs_of_cogvideox_raise(changes, message):
    with pytest.raises(ConfigError, match=message):
        CogVideoXAutoencoderConfig(**COGVIDEOX | changes)


@pytest.mark.parametrize("shape", [(2, 3, 6), (3, 2, 2, 3, 12)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_group_norm(shape, dtype, tolerance):
    x = (torch.randn(shape) * 3 + 2).requires_grad_()
    weight, bias = torch.rand(shape[-1]) + 0.5, torch.randn(shape[-1])
    expected = torch.nn.functional.group_norm(x.movedim(-1, 1), 3, weight, bias).movedim(1, -1)
    direction = torch.randn(shape)
    found = group_norm(x.to(dtype), 3, weight, bias, 1e-5)
    assert found.dtype == dtype and relative(found, expected) < tolerance
    grads = [torch.autograd.grad((y.float() * direction).sum(), x)[0] for y in (found, expected)]
    assert relative(*grads) < 2 * tolerance


@pytest.mark.parametrize("net", [FACTORS[3], WAN, COGVIDEOX])
def test_gradients_reach_every_parameter(net):
    codec = make_codec(True, **net)
    video = make_video(codec, 3)
    pixels, quantized = codec(video)
    ((pixels - video).square().mean() + sum(quantized.losses.values(), torch.zeros(()))).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in codec.parameters())


@torch.no_grad()
def test_flops_match_a_hand_count():
    codec = make_codec(**COGVIDEOX)  # 9 frames, 5 latent frames, in one chunk each; sides halved once
    work = codec.workload(9, batch_size=3, frame_size=(4, 8))
    assert work.tokens == 3 * 5 * 2 * 4 == 3 * codec.config.count_codes(9, (4, 8))
    fine, small = 9 * 4 * 8, 5 * 2 * 4  # positions: frames × height × width
    conv = 2 * 27
    encoder = conv * fine * 3 * 4 + 2 * conv * fine * 4 * 4  # first convolution, level 0
    encoder += 2 * 9 * small * 4 * 4  # the pairs of frames are averaged before the convolution
    encoder += conv * small * (4 * 8 + 8 * 8) + 2 * small * 4 * 8  # level 1, with a shortcut
    encoder += 4 * conv * small * 8 * 8 + conv * small * 8 * 8  # middle; 2 · 4 channels
    bridges = 2 * small * (8 * 4 + 4 * 4)  # pre_quant takes a mean and a log variance, post_quant a code
    decoder = conv * small * 4 * 8 + 4 * conv * small * 8 * 8 + 4 * conv * small * 8 * 8  # middle, level 0
    upsample = 2 * 9 * (5 * 4 * 8) * 8 * 8  # before the frames are repeated
    decoder += upsample + conv * fine * (8 * 4 + 3 * 4 * 4) + 2 * fine * 8 * 4 + conv * fine * 4 * 3
    modulation = 2 * small * 4 * (2 * 8) * 8 + 2 * small * 4 * (2 * 8 + 3 * 2 * 4) + 2 * small * 4 * 2 * 4
    assert cost.count_flops(codec, work) == 3 * (encoder + bridges + decoder + modulation)
    size = sum(p.nbytes for p in codec.parameters())
    assert cost.count_bytes(codec, work) == cost.MemoryBytes(weights=size, read=size)
    with pytest.raises(ConfigError, match="needs a VideoWorkload"):
        cost.count_flops(codec, Workload.full_attention(4))


@torch.no_grad()
def test_flops_of_attention_are_counted():
    """Two spatial and two temporal attentions in the middle of Cosmos, of encoder and decoder."""
    small, large = (make_codec(**FACTORS[0]).workload(5, frame_size=size) for size in ((8, 8), (16, 16)))
    codec = make_codec(**FACTORS[0])
    width, frames = 12, 2
    frame_attention = [2 * 4 * width * frames * n * n for n in (4, 16)]
    linear = [cost.count_flops(codec, work) - core for work, core in zip((small, large), frame_attention, strict=True)]
    assert linear[1] == 4 * linear[0]
