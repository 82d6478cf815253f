"""Video codec pipeline: whole videos, chunks, folders of diffusers, errors."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from helpers import randomize
from vitrail.codecs import (
    CausalVideoCodec,
    CausalVideoCodecConfig,
    Codec,
    CodecConfig,
    CogVideoXAutoencoderConfig,
    ConvAutoencoderConfig,
    CosmosAutoencoderConfig,
    WanAutoencoderConfig,
)
from vitrail.codecs.quantizers import FSQConfig, KLConfig
from vitrail.codecs.quantizers.continuous import IdentityQuantizerConfig
from vitrail.errors import CheckpointError, ConfigError, ImageError
from vitrail.hub import save, to_hf
from vitrail.pipelines import CodecPipeline, VideoCodecPipeline

NETS = {
    "cosmos": CosmosAutoencoderConfig(
        encoder_widths=(4, 4, 8),
        decoder_widths=(4, 4, 8),
        layers=1,
        latent_channels=4,
        spatial_factor=4,
        temporal_factor=2,
        patch_size=2,
    ),
    "wan": WanAutoencoderConfig(
        width=4, multipliers=(1, 2, 2), layers=1, latent_channels=4, temporal_steps=(True, True)
    ),
    "cogvideox": CogVideoXAutoencoderConfig(
        widths=(4, 4, 8), layers=1, latent_channels=4, temporal_factor=4, norm_groups=2
    ),
}


def make_codec(name: str, discrete: bool = False) -> CausalVideoCodec:
    quantizer = FSQConfig(levels=(5, 4, 3)) if discrete else IdentityQuantizerConfig(dim=4)
    if name != "cosmos" and not discrete:
        quantizer = KLConfig(width=4)
    return randomize(CausalVideoCodec(CausalVideoCodecConfig(net=NETS[name], quantizer=quantizer))).eval()


def make_frames(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 8, 12, 3), dtype=np.uint8)


@torch.no_grad()
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("chunk_frames", [1, 16, 100])
@pytest.mark.parametrize("count", [1, 6, 33])
def test_chunks_restore_the_whole_video(name, chunk_frames, count):
    codec, frames = make_codec(name), make_frames(count)
    pipeline = VideoCodecPipeline(codec, chunk_frames=chunk_frames)
    padded = codec.config.net.round_up_frames(count)
    assert padded - count < 8 and codec.count_frames(codec.count_latent_frames(padded)) == padded
    whole = np.concatenate([frames, frames[-1:].repeat(padded - count, 0)])
    pixels = codec.to_pixels(torch.from_numpy(whole).movedim(-1, 1)[None])
    expected = codec.encode(pixels).codes
    latents = pipeline.encode_latents(frames)
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-5)
    found, restored = pipeline.reconstruct(frames), codec.to_uint8(codec.decode(expected))[0].movedim(1, -1).numpy()
    assert found.shape == frames.shape and found.dtype == np.uint8
    assert np.abs(found.astype(int) - restored[:count].astype(int)).max() <= 1
    assert pipeline.decode(latents).shape == whole.shape


def test_ids():
    pipeline, frames = VideoCodecPipeline(make_codec("wan", discrete=True)), make_frames(5)
    ids = pipeline.encode([Image.fromarray(frame) for frame in frames])
    assert ids.shape == (1, 2, 2, 3) and ids.max() < 60
    assert np.array_equal(pipeline.decode(ids), pipeline.reconstruct(torch.from_numpy(frames)))


@pytest.mark.parametrize("name", NETS)
def test_folders_of_diffusers(name, tmp_path):
    codec, frames = make_codec(name), make_frames(9)
    if name == "cogvideox":
        config = codec.config.replace(pre_quant="none", post_quant="none")
        codec = randomize(CausalVideoCodec(config)).eval()
    to_hf(codec, tmp_path / "vae")
    parts = {"_class_name": "SomePipeline", "vae": ["diffusers", type(codec).__name__]}
    parts["vae"][1] = json.loads((tmp_path / "vae/config.json").read_text())["_class_name"]
    (tmp_path / "model_index.json").write_text(json.dumps(parts))
    expected = VideoCodecPipeline(codec).reconstruct(frames)
    for folder in (tmp_path, tmp_path / "vae"):
        pipeline = vitrail.load(folder, device="cpu")
        assert isinstance(pipeline, VideoCodecPipeline)
        assert np.array_equal(pipeline.reconstruct(frames), expected)
    with pytest.raises(CheckpointError, match="is a codec of videos, not of images"):
        CodecPipeline.load(tmp_path)


def test_bounded_attention_changes_long_videos_only():
    codec, frames = make_codec("cosmos"), make_frames(17)
    whole = VideoCodecPipeline(codec).encode_latents(frames)
    for window, is_equal in ((9, True), (2, False)):
        latents = VideoCodecPipeline(codec, max_frames=window, chunk_frames=2).encode_latents(frames)
        assert torch.allclose(latents, whole, rtol=1e-4, atol=1e-5) == is_equal


def test_errors(tmp_path):
    pipeline = VideoCodecPipeline(make_codec("wan"))
    for video in ([], make_frames(3).astype(np.float32), make_frames(3)[0]):
        with pytest.raises(ImageError, match="a video has shape"):
            pipeline.reconstruct(video)
    with pytest.raises(ImageError, match="frames of 7 × 12 pixels"):
        pipeline.reconstruct(make_frames(3)[:, 1:])
    with pytest.raises(ConfigError, match="no ids"):
        pipeline.encode(make_frames(3))
    with pytest.raises(ConfigError, match="chunk_frames is 0"):
        VideoCodecPipeline(pipeline.model, chunk_frames=0)
    net = ConvAutoencoderConfig(widths=(4,), layers=1, norm_groups=2, latent_channels=2)
    save(Codec(CodecConfig(net=net, quantizer=KLConfig(width=2))), tmp_path)
    with pytest.raises(CheckpointError, match="is a Codec, not a causal video codec"):
        VideoCodecPipeline.load(tmp_path)
