"""Causal convolutional video codec: an encoder, a quantizer and a decoder, built from a config.

An image is a video with one frame. A video of 1 + k·n frames has 1 + n latent frames, k the temporal factor. With a
cache, a video is encoded or decoded chunk by chunk, with the values of the whole video. CogVideoX's networks are causal
between chunks of 8 frames only, and take any number of frames.

Shapes: B batch, T frames, C channels, H, W pixels, t, h, w latent frames and positions, d width of a code.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vitrail.codecs.causal_layers import StreamCache
from vitrail.codecs.codec import BridgeKind, CodecModule, make_bridge
from vitrail.codecs.cogvideox_autoencoder import CogVideoXAutoencoderConfig
from vitrail.codecs.cosmos_autoencoder import CosmosAutoencoderConfig
from vitrail.codecs.quantizers import QuantizerConfig, QuantizerOutput, make_quantizer
from vitrail.codecs.video_codec import uint8_to_pixels
from vitrail.codecs.wan_autoencoder import WanAutoencoderConfig
from vitrail.config import Config
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import Workload, cost
from vitrail.registry import MODELS


class CausalVideoCodecConfig(Config):
    """Config of a `CausalVideoCodec`. `net` configures the encoder and the decoder, `quantizer` the quantizer.

    pre_quant                  projection from features to quantizer input: none or linear
    post_quant                 projection from codes to decoder input: none or linear
    latents_mean               means of the latents for diffusion models, one for each channel, or for each channel and
                               latent frame; the codec does not apply them
    latents_std                standard deviations of the latents, likewise
    scaling_factor             factor that diffusion models apply to latents; the codec does not apply it
    invert_scale_latents       diffusion models divide the latents of a given image by the factor instead
    """

    net: CogVideoXAutoencoderConfig | CosmosAutoencoderConfig | WanAutoencoderConfig
    quantizer: QuantizerConfig
    pre_quant: BridgeKind = "linear"
    post_quant: BridgeKind = "linear"
    latents_mean: tuple[float, ...] = ()
    latents_std: tuple[float, ...] = ()
    scaling_factor: float = 1.0
    invert_scale_latents: bool = False

    def __post_init__(self) -> None:
        if len(self.latents_mean) != len(self.latents_std) or len(self.latents_mean) % self.net.latent_channels:
            raise ConfigError(
                f"{len(self.latents_mean)} latents_mean and {len(self.latents_std)} latents_std do not fit "
                f"{self.net.latent_channels} latent channels",
                "give one of each for each channel, or for each channel and latent frame",
            )

    @property
    def frame_size(self) -> tuple[int, int]:
        """Height and width of the training frames."""
        size = self.net.image_size
        return size if isinstance(size, tuple) else (size, size)

    def count_codes(self, num_frames: int, frame_size: tuple[int, int] | None = None) -> int:
        """Return the codes of a video with frames of `frame_size`, by default that of the training."""
        (height, width), factor = frame_size or self.frame_size, self.net.spatial_factor
        return self.net.count_latent_frames(num_frames) * (height // factor) * (width // factor)


class VideoWorkload(Workload, kw_only=True):
    """Workload of videos of one size: `tokens` are latent positions, frames and sides those of the pixels."""

    num_frames: int
    height: int
    width: int


class VideoCodecCache(NamedTuple):
    """Stream caches of the encoder and the decoder."""

    encoder: StreamCache
    decoder: StreamCache


@MODELS.register("causal-video-codec")
class CausalVideoCodec(CodecModule):
    """Causal video codec. Pixels are floats in −1 … 1 (see `uint8_to_pixels`)."""

    Config = CausalVideoCodecConfig

    def __init__(self, config: CausalVideoCodecConfig):
        super().__init__()
        self.config, net = config, config.net
        self.quantizer = make_quantizer(config.quantizer)
        self.encoder, self.decoder = net.make_networks()
        for name, kind, left, right in (
            ("pre_quant", config.pre_quant, net.encoder_channels, self.quantizer.dim),
            ("post_quant", config.post_quant, self.quantizer.width, net.latent_channels),
        ):
            if kind == "none" and left != right:
                raise ConfigError(
                    f"{name} is 'none', but {left} channels do not match {right}",
                    f"set {name} to 'linear', or use equal widths",
                )
        self.pre_quant_proj = make_bridge(config.pre_quant, net.encoder_channels, self.quantizer.dim, None)
        self.post_quant_proj = make_bridge(config.post_quant, self.quantizer.width, net.latent_channels, None)

    # ---- properties ---------------------------------------------------------------------------------------------

    @property
    def downsample_factor(self) -> int:
        """Pixels along a side of one code."""
        return self.config.net.spatial_factor

    @property
    def temporal_factor(self) -> int:
        """Frames of one latent frame, but for the first."""
        return self.config.net.temporal_factor

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the training frames."""
        return self.config.frame_size

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    def count_latent_frames(self, num_frames: int) -> int:
        """Return the latent frames of a video. `num_frames` must be 1 + k·n, except for CogVideoX's networks."""
        if num_frames < 1:
            raise ImageError(f"a video has {num_frames} frames", "give at least 1 frame")
        return self.config.net.count_latent_frames(num_frames)

    def count_frames(self, num_latent_frames: int) -> int:
        """Return the frames that latent frames decode to."""
        return self.config.net.count_frames(num_latent_frames)

    def workload(
        self, num_frames: int, batch_size: int = 1, frame_size: tuple[int, int] | None = None
    ) -> VideoWorkload:
        """Return the workload of a batch of videos with frames of `frame_size`, by default that of the training."""
        height, width = frame_size or self.image_size
        return VideoWorkload(
            tokens=batch_size * self.config.count_codes(num_frames, (height, width)),
            attention_pairs=0,
            sequences=batch_size,
            num_frames=num_frames,
            height=height,
            width=width,
        )

    def make_cache(self, max_frames: int | None = None) -> VideoCodecCache:
        """Create empty caches for encoding and decoding chunk by chunk.

        A chunk has 1 + k·n frames if it is the first and k·n frames otherwise; n latent frames when decoding. Chunks of
        CogVideoX after the first are multiples of 8 frames, and of 2 latent frames. With `max_frames`, temporal
        attention reads that many latest latent frames only, so that memory is bounded: values differ from those of the
        whole video.
        """
        if max_frames is not None and max_frames < 1:
            raise ConfigError(f"max_frames is {max_frames}", "use at least 1, or None")
        return VideoCodecCache(StreamCache(max_frames), StreamCache(max_frames))

    # ---- encoding and decoding ----------------------------------------------------------------------------------

    def encode(self, video: Tensor, cache: VideoCodecCache | None = None) -> QuantizerOutput:
        """Encode video (B, T, C, H, W) to codes (B, t, h, w, d) and ids (B, t, h, w)."""
        self._check_video(video, cache)
        features = self.encoder(video.movedim(2, -1), None if cache is None else cache.encoder)
        return self.quantizer(self.pre_quant_proj(features))

    def lookup(self, ids: Tensor) -> Tensor:
        """Look up the codes (B, t, h, w, d) of ids (B, t, h, w)."""
        return self.quantizer.lookup(ids).to(next(self.decoder.parameters()).dtype)

    def decode(self, codes: Tensor, cache: VideoCodecCache | None = None) -> Tensor:
        """Decode codes (B, t, h, w, d) to video (B, T, C, H, W), not clamped."""
        if codes.ndim != 5 or codes.shape[-1] != self.quantizer.width or not codes.shape[1]:
            raise ImageError(
                f"codes have shape {tuple(codes.shape)}", f"give codes of shape (B, t, h, w, {self.quantizer.width})"
            )
        return self.decoder(self.post_quant_proj(codes), None if cache is None else cache.decoder).movedim(-1, 2)

    def to_pixels(self, frames: Tensor) -> Tensor:
        """Convert uint8 of any shape to pixels in −1 … 1 on the codec's device, in its dtype."""
        return uint8_to_pixels(frames, next(self.encoder.parameters()))

    def _check_video(self, video: Tensor, cache: VideoCodecCache | None) -> None:
        C, factor = self.config.net.channels, self.downsample_factor
        if video.ndim != 5 or video.shape[2] != C or not video.shape[1]:
            raise ImageError(f"video has shape {tuple(video.shape)}", f"give (B, T, {C}, H, W), at least 1 frame")
        H, W = video.shape[3:]
        if H % factor or W % factor or not H or not W:
            near = " × ".join(str(max(1, round(side / factor)) * factor) for side in (H, W))
            raise ImageError(
                f"frames of {H} × {W} pixels do not divide into codes of {factor} × {factor} pixels",
                f"resize them to {near}, or crop or pad them to multiples of {factor}",
            )
        T, chunk = video.shape[1], self.config.net.chunk_frames
        if not (cache and cache.encoder):
            self.count_latent_frames(T)
        elif T % chunk:
            n = max(1, round(T / chunk))
            raise ImageError(f"a later chunk has {T} frames", f"give a multiple of {chunk} frames, such as {chunk * n}")


# ---- costs ------------------------------------------------------------------------------------------------------


@cost.count_flops.register
def _(module: CausalVideoCodec, work: Workload) -> int:
    """Count the FLOPs of `codec(video)`, one encoding and one decoding, by a pass on the meta device."""
    if not isinstance(work, VideoWorkload):
        raise ConfigError("the cost of a video codec needs a VideoWorkload", "use `codec.workload(num_frames)`")

    config: Any = module.config
    flops = _count_video_flops(config, work.num_frames, work.height, work.width)
    return work.sequences * flops + cost.count_flops(module.quantizer, work)


@functools.lru_cache(maxsize=256)
def _count_video_flops(config: CausalVideoCodecConfig, num_frames: int, height: int, width: int) -> int:
    """Count the FLOPs of the networks and the projections for one video."""
    net = config.net
    with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
        codec = CausalVideoCodec(config)
        features = codec.pre_quant_proj(codec.encoder(torch.empty(1, num_frames, height, width, net.channels)))
        codes = features.new_empty(*features.shape[:-1], codec.quantizer.width)
        codec.decoder(codec.post_quant_proj(codes))
    return counter.get_total_flops()


cost.count_bytes.register(CausalVideoCodec, cost.sum_tensor_bytes)
