"""The video codec: causal in time, of any length, the same frame by frame, and the interface of the others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.codecs.quantizers import FSQConfig, VQConfig
from vitrail.codecs.video import VideoCodec, VideoCodecConfig, cut, mend
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig, SpaceTimeConfig, cost

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2, qk_norm="rms"), mlp=PlainConfig(hidden=24))
TRANSFORMER = SpaceTimeConfig(layers=2, block=BLOCK, memory=3)
FSQ = {"quantizer": FSQConfig(levels=(5, 5, 5))}
QUANTIZERS = {"vq": VQConfig(codes=32, dim=4, start=0), "fsq": FSQConfig(levels=(5, 5, 5))}


def codec(kind="fsq") -> VideoCodec:
    config = VideoCodecConfig(image=8, patch=4, encoder=TRANSFORMER, decoder=TRANSFORMER, quantizer=QUANTIZERS[kind])
    made = VideoCodec(config)
    randomize(made)
    return made.eval()


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("at", [1, 4])
def test_the_future_does_not_reach_the_past(kind, at):
    ours, video = codec(kind), torch.rand(2, 6, 3, 8, 8) * 2 - 1
    other = video.clone()
    other[:, at:] = torch.rand(2, 6 - at, 3, 8, 8) * 2 - 1
    a, b = ours.encode(video), ours.encode(other)
    assert torch.equal(a.ids[:, :at], b.ids[:, :at]) and not torch.equal(a.ids[:, at:], b.ids[:, at:])
    x, y = ours.decode(a.codes), ours.decode(torch.cat([a.codes[:, :at], b.codes[:, at:]], 1))
    assert relative(x[:, :at], y[:, :at]) < 1e-6 and relative(x[:, at:], y[:, at:]) > 1e-3


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_frame_by_frame_is_all_at_once(kind):
    ours, video = codec(kind), torch.rand(2, 7, 3, 8, 8) * 2 - 1
    whole, cache = ours.encode(video), ours.cache()
    for t in range(7):
        found = ours.encode(video[:, t : t + 1], cache.encoder)
        drawn = ours.decode(found.codes, cache.decoder)
        cache.encoder.keep(), cache.decoder.keep()
        assert torch.equal(found.ids, whole.ids[:, t : t + 1])
        assert relative(drawn, ours.decode(whole.codes)[:, t : t + 1]) < 1e-5


@pytest.mark.parametrize("shape", [(1, 8, 8), (9, 8, 8), (2, 12, 4)])
def test_any_number_of_frames_and_any_size(shape):
    ours, (T, H, W) = codec(), shape
    found = ours.encode(torch.zeros(1, T, 3, H, W))
    assert found.ids.shape == (1, T, H // 4, W // 4)
    assert torch.equal(ours.lookup(found.ids), found.codes)
    assert ours.decode(found.codes).shape == (1, T, 3, H, W)
    assert ours.reconstruct(torch.zeros(1, T, 3, H, W)).abs().max() <= 1


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_cut_and_mend(B, T, h, w, P):
    video = torch.arange(B * T * 3 * h * w * P * P).view(B, T, 3, h * P, w * P).float()
    patches, grid = cut(video, P, 3)
    assert patches.shape == (B, T, h * w, 3 * P * P) and grid == (h, w)
    assert torch.equal(mend(patches, P, grid), video)


def test_it_is_what_codecs_are():
    ours = codec()
    assert (ours.factor, ours.size, ours.bits, ours.sizes) == (4, (8, 8), 7, (125,))
    assert ours.bits_per_pixel == 7 / 16
    bytes = torch.randint(0, 256, (1, 2, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(ours.bytes(ours.pixels(bytes)), bytes)


def test_operations_are_those_that_run():
    ours = codec("fsq")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        ours(torch.zeros(2, 1, 3, 8, 8))
    assert cost.flops(ours, ours.work(1, 2)) == counter.get_total_flops()
    assert cost.bytes(ours, ours.work(1)).weights == sum(p.numel() * 4 for p in ours.parameters())


def test_it_learns_what_moves():
    """A few steps make a reconstruction better, through both quantizers."""
    for kind in QUANTIZERS:
        torch.manual_seed(0)
        config = VideoCodecConfig(
            image=8, patch=4, encoder=TRANSFORMER, decoder=TRANSFORMER, quantizer=QUANTIZERS[kind]
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


def test_frames_need_not_be_square():
    shape = VideoCodecConfig(image=(8, 12), patch=4, encoder=TRANSFORMER, decoder=TRANSFORMER, **FSQ)
    ours = VideoCodec(VideoCodecConfig.read(shape.plain()))
    assert shape.grid == (2, 3) and ours.size == (8, 12) and ours.encoder.positions.grid == (2, 3)
    assert ours.encode(torch.zeros(1, 2, 3, 8, 12)).ids.shape == (1, 2, 2, 3)
    with pytest.raises(ConfigError, match="8 × 13 pixels"):
        shape.with_(image=(8, 13))


def test_what_cannot_be_is_refused():
    with pytest.raises(ImageError, match="float32"):
        codec().pixels(torch.rand(1, 1, 3, 8, 8))
    with pytest.raises(ConfigError, match="patches of 5"):
        VideoCodecConfig(image=8, patch=5, encoder=TRANSFORMER, decoder=TRANSFORMER, quantizer=QUANTIZERS["fsq"])
    with pytest.raises(ImageError, match=r"B, T, 3, H, W"):
        codec().encode(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ImageError):
        codec().encode(torch.zeros(1, 1, 3, 9, 8))
    with pytest.raises(ImageError, match="codes of shape"):
        codec().decode(torch.zeros(1, 2, 2, 3))
