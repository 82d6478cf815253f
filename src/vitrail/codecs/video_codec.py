"""Causal video codec: the codes of a frame depend on this frame and earlier ones (Genie's tokenizer).

An ST-transformer on patches of pixels, a quantizer, and an ST-transformer on the codes. An image is a video with one
frame. With a cache, encoding frame by frame equals encoding all frames at once.

Shapes: B batch, T frames, C channels, H, W pixels, P patch, h, w codes along a side, d width of a code.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.codecs.codec import CodecModule
from vitrail.codecs.quantizers import QuantizerConfig, QuantizerOutput, make_quantizer
from vitrail.config import Config
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import (
    AnyFrameCache,
    FrameCache,
    FramesWorkload,
    SpaceTimeConfig,
    SpaceTimeTransformer,
    cost,
    patchify,
    unpatchify,
)
from vitrail.registry import MODELS


class VideoCodecConfig(Config):
    """Config of a `VideoCodec`. `image_size` is the side, or the height and width, of the training frames; other
    multiples of `patch_size` work too.
    """

    image_size: int | tuple[int, int]
    patch_size: int
    encoder: SpaceTimeConfig
    decoder: SpaceTimeConfig
    quantizer: QuantizerConfig
    channels: int = 3

    @property
    def grid(self) -> tuple[int, int]:
        """Codes of a frame: rows and columns."""
        return patch_grid(self.image_size, self.patch_size)

    def __post_init__(self) -> None:
        patch_grid(self.image_size, self.patch_size)


def patch_grid(image_size: int | tuple[int, int], patch_size: int) -> tuple[int, int]:
    """Patches of a frame: rows and columns."""
    height, width = image_size if isinstance(image_size, tuple) else (image_size, image_size)
    if patch_size < 1 or min(height, width) < patch_size or height % patch_size or width % patch_size:
        size = f"{height} × {width}" if isinstance(image_size, tuple) else image_size
        raise ConfigError(f"frames of {size} pixels do not divide into patches of {patch_size}", "choose a multiple")
    return height // patch_size, width // patch_size


class VideoCache(NamedTuple):
    """Frame caches of the encoder and the decoder."""

    encoder: FrameCache
    decoder: FrameCache


@MODELS.register("video-codec")
class VideoCodec(CodecModule):
    """Causal video codec. Pixels are floats in −1 … 1 (see `uint8_to_pixels`)."""

    Config = VideoCodecConfig
    temporal_factor = 1  # every frame has a latent frame

    def __init__(self, config: VideoCodecConfig):
        super().__init__()
        self.config = config
        P, C, grid = config.patch_size, config.channels, config.grid
        self.quantizer = make_quantizer(config.quantizer)
        encoder_width, decoder_width = config.encoder.block.width, config.decoder.block.width
        self.embed, self.encoder = nn.Linear(C * P * P, encoder_width), SpaceTimeTransformer(config.encoder, grid)
        self.pre_quant_proj = nn.Linear(encoder_width, self.quantizer.dim)
        self.post_quant_proj = nn.Linear(self.quantizer.width, decoder_width)
        self.decoder, self.last = SpaceTimeTransformer(config.decoder, grid), nn.Linear(decoder_width, C * P * P)

    # ---- properties ---------------------------------------------------------------------------------------------

    @property
    def downsample_factor(self) -> int:
        """Pixels along a side of one code."""
        return self.config.patch_size

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the training frames."""
        h, w = self.config.grid
        return h * self.downsample_factor, w * self.downsample_factor

    @property
    def device(self) -> torch.device:
        return self.last.weight.device

    def make_cache(self) -> VideoCache:
        """Create empty caches for frame-by-frame encoding and decoding; frames enter a cache when it is committed."""
        return VideoCache(self.encoder.make_cache(), self.decoder.make_cache())

    # ---- encoding and decoding ----------------------------------------------------------------------------------

    def encode(self, video: Tensor, cache: AnyFrameCache | None = None) -> QuantizerOutput:
        """Encode video (B, T, C, H, W) to codes (B, T, h, w, d) and ids (B, T, h, w)."""
        patches, grid = patchify_video(video, self.config.patch_size, self.config.channels)
        x = self.encoder(self.embed(patches), grid, cache)  # (B, T, h·w, width)
        return self.quantizer(self.pre_quant_proj(x).unflatten(2, grid))

    def lookup(self, ids: Tensor) -> Tensor:
        """Look up the codes (B, T, h, w, d) of ids (B, T, h, w)."""
        return self.quantizer.lookup(ids).to(self.last.weight.dtype)

    def decode(self, codes: Tensor, cache: AnyFrameCache | None = None) -> Tensor:
        """Decode codes (B, T, h, w, d) to video (B, T, C, H, W), not clamped."""
        if codes.ndim != 5 or codes.shape[-1] != self.quantizer.width:
            raise ImageError(
                f"codes have shape {tuple(codes.shape)}", f"give codes of shape (B, T, h, w, {self.quantizer.width})"
            )
        h, w = codes.shape[2:4]
        x = self.decoder(self.post_quant_proj(codes.flatten(2, 3)), (h, w), cache)
        return unpatchify_video(self.last(x), self.config.patch_size, (h, w))

    def to_pixels(self, frames: Tensor) -> Tensor:
        """Convert uint8 of any shape to pixels in −1 … 1 on the codec's device, in its dtype."""
        return uint8_to_pixels(frames, self.last.weight)

    def workload(self, num_frames: int, batch_size: int = 1) -> FramesWorkload:
        """Return the workload of a batch of videos of the codec's own frame size."""
        return self.encoder.workload(num_frames, batch_size)


def uint8_to_pixels(frames: Tensor, like: Tensor) -> Tensor:
    """Convert uint8 to pixels in −1 … 1, with the device and dtype of `like`."""
    if frames.dtype != torch.uint8:
        raise ImageError(f"frames have dtype {frames.dtype}", "give uint8 frames")
    return (frames.to(like.device).float() / 127.5 - 1).to(like.dtype)


def patchify_video(video: Tensor, patch_size: int, channels: int) -> tuple[Tensor, tuple[int, int]]:
    """Cut video (B, T, C, H, W) into patches (B, T, h·w, C·P·P); also return the grid (h, w)."""
    if video.ndim != 5 or video.shape[2] != channels or not video.shape[1]:
        raise ImageError(f"video has shape {tuple(video.shape)}", f"give (B, T, {channels}, H, W), at least 1 frame")
    B, T, _, H, W = video.shape
    patches = patchify(video.flatten(0, 1), (1, patch_size, patch_size))
    return patches.unflatten(0, (B, T)), (H // patch_size, W // patch_size)


def unpatchify_video(patches: Tensor, patch_size: int, grid: tuple[int, int]) -> Tensor:
    """Assemble patches to video: the inverse of `patchify_video`."""
    B, T = patches.shape[:2]
    return unpatchify(patches.flatten(0, 1), (1, patch_size, patch_size), (1, *grid))[:, :, 0].unflatten(0, (B, T))


cost.count_flops.register(VideoCodec, cost.sum_child_flops)  # one encoding and one decoding
cost.count_bytes.register(VideoCodec, cost.sum_child_bytes)
