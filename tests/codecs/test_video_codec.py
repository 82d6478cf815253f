"""Video codec: causality, video lengths, frame-by-frame encoding, and the codec interface."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.codecs.quantizers import FSQConfig, VQConfig
from vitrail.codecs.video_codec import VideoCodec, VideoCodecConfig, patchify_video, unpatchify_video
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, SpaceTimeConfig, cost

BLOCK = BlockConfig(
    width=16, attention=AttentionConfig(heads=2, qk_norm="rms"), mlp=PlainMLPConfig(intermediate_size=24)
)
TRANSFORMER = SpaceTimeConfig(layers=2, block=BLOCK, context_frames=3)
FSQ = {"quantizer": FSQConfig(levels=(5, 5, 5))}
QUANTIZERS = {"vq": VQConfig(codebook_size=32, dim=4, kmeans_iters=0), "fsq": FSQConfig(levels=(5, 5, 5))}


def codec(kind="fsq") -> VideoCodec:
    config = VideoCodecConfig(
        image_size=8, patch_size=4, encoder=TRANSFORMER, decoder=TRANSFORMER, quantizer=QUANTIZERS[kind]
    )
    made = VideoCodec(config)
    randomize(made)
    return made.eval()


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("at", [1, 4])
def test_codes_are_causal(kind, at):
    ours, video = codec(kind), torch.rand(2, 6, 3, 8, 8) * 2 - 1
    other = video.clone()
    other[:, at:] = torch.rand(2, 6 - at, 3, 8, 8) * 2 - 1
    a, b = ours.encode(video), ours.encode(other)
    assert torch.equal(a.ids[:, :at], b.ids[:, :at]) and not torch.equal(a.ids[:, at:], b.ids[:, at:])
    x, y = ours.decode(a.codes), ours.decode(torch.cat([a.codes[:, :at], b.codes[:, at:]], 1))
    assert relative(x[:, :at], y[:, :at]) < 1e-6 and relative(x[:, at:], y[:, at:]) > 1e-3


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_frame_by_frame_equals_whole_video(kind):
    ours, video = codec(kind), torch.rand(2, 7, 3, 8, 8) * 2 - 1
    whole, cache = ours.encode(video), ours.make_cache()
    for t in range(7):
        found = ours.encode(video[:, t : t + 1], cache.encoder)
        drawn = ours.decode(found.codes, cache.decoder)
        cache.encoder.commit(), cache.decoder.commit()
        assert torch.equal(found.ids, whole.ids[:, t : t + 1])
        assert relative(drawn, ours.decode(whole.codes)[:, t : t + 1]) < 1e-5


@pytest.mark.parametrize("shape", [(1, 8, 8), (9, 8, 8), (2, 12, 4)])
def test_video_lengths_and_sizes(shape):
    ours, (T, H, W) = codec(), shape
    found = ours.encode(torch.zeros(1, T, 3, H, W))
    assert found.ids.shape == (1, T, H // 4, W // 4)
    assert torch.equal(ours.lookup(found.ids), found.codes)
    assert ours.decode(found.codes).shape == (1, T, 3, H, W)
    assert ours.reconstruct(torch.zeros(1, T, 3, H, W)).abs().max() <= 1


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_patchify_round_trip(B, T, h, w, P):
    video = torch.arange(B * T * 3 * h * w * P * P).view(B, T, 3, h * P, w * P).float()
    patches, grid = patchify_video(video, P, 3)
    assert patches.shape == (B, T, h * w, 3 * P * P) and grid == (h, w)
    assert torch.equal(unpatchify_video(patches, P, grid), video)


def test_codec_interface():
    ours = codec()
    assert (ours.downsample_factor, ours.image_size, ours.bits, ours.vocab_sizes) == (4, (8, 8), 7, (125,))
    assert ours.bits_per_pixel == 7 / 16
    bytes = torch.randint(0, 256, (1, 2, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(ours.to_uint8(ours.to_pixels(bytes)), bytes)


def test_flops_match_torch_counter():
    ours = codec("fsq")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        ours(torch.zeros(2, 1, 3, 8, 8))
    assert cost.count_flops(ours, ours.workload(1, 2)) == counter.get_total_flops()
    assert cost.count_bytes(ours, ours.workload(1)).weights == sum(p.numel() * 4 for p in ours.parameters())


def test_training_improves_reconstruction():
    """A few training steps improve the reconstruction, with both quantizers."""
    for kind in QUANTIZERS:
        torch.manual_seed(0)
        config = VideoCodecConfig(
            image_size=8, patch_size=4, encoder=TRANSFORMER, decoder=TRANSFORMER, quantizer=QUANTIZERS[kind]
        )
        ours, video = VideoCodec(config), torch.rand(4, 3, 3, 1, 1).expand(-1, -1, -1, 8, 8) * 2 - 1
        optimizer, losses = torch.optim.Adam(ours.parameters(), lr=3e-3), []
        for _ in range(40):
            drawn, found = ours(video)
            losses.append((drawn - video).square().mean())
            (losses[-1] + 0.25 * sum(found.losses.values())).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < 0.5 * losses[0]


def test_rectangular_frames():
    shape = VideoCodecConfig(image_size=(8, 12), patch_size=4, encoder=TRANSFORMER, decoder=TRANSFORMER, **FSQ)
    ours = VideoCodec(VideoCodecConfig.from_dict(shape.to_dict()))
    assert shape.grid == (2, 3) and ours.image_size == (8, 12) and ours.encoder.positions.grid_size == (2, 3)
    assert ours.encode(torch.zeros(1, 2, 3, 8, 12)).ids.shape == (1, 2, 2, 3)
    with pytest.raises(ConfigError, match="8 × 13 pixels"):
        shape.replace(image_size=(8, 13))


def test_invalid_configs_and_inputs_raise():
    with pytest.raises(ImageError, match="float32"):
        codec().to_pixels(torch.rand(1, 1, 3, 8, 8))
    with pytest.raises(ConfigError, match="patches of 5"):
        VideoCodecConfig(
            image_size=8, patch_size=5, encoder=TRANSFORMER, decoder=TRANSFORMER, quantizer=QUANTIZERS["fsq"]
        )
    with pytest.raises(ImageError, match=r"B, T, 3, H, W"):
        codec().encode(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ImageError):
        codec().encode(torch.zeros(1, 1, 3, 9, 8))
    with pytest.raises(ImageError, match="codes of shape"):
        codec().decode(torch.zeros(1, 2, 2, 3))
