"""Encoder and decoder of the Cosmos video tokenizers: Haar wavelets, factorized causal convolutions, causal attention.

The first frame is coded alone, then every `temporal_factor` frames together: T frames, T = 1 + k·n, become 1 + n latent
frames. The layers are those of diffusers' AutoencoderKLCosmos.

Shapes: B batch, T frames, H, W pixels, t, h, w latent frames and positions, C channels, E width of the features.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.codecs.causal_layers import (
    CausalAutoencoderConfig,
    CausalSequence,
    FactorizedConv,
    FrameAttention,
    FrameNorm,
    SpatialConv,
    StreamCache,
    TemporalAttention,
    TemporalConv,
    is_first_chunk,
    patch_haar,
    patch_pixels,
    repeat_positions,
    silu,
    unpatch_haar,
    unpatch_pixels,
)
from vitrail.config import LayerCount, PositiveInt
from vitrail.errors import ConfigError


class CosmosAutoencoderConfig(CausalAutoencoderConfig, tag="cosmos", tag_field="kind"):
    """Config of `CosmosEncoder` and `CosmosDecoder`.

    encoder_widths    channels after the first convolution, then of each level from the finest to the coarsest
    decoder_widths    the same for the decoder, also from the finest to the coarsest
    layers            ResNet blocks of an encoder level; a decoder level has one more
    latent_channels   channels between encoder and quantizer, and between quantizer and decoder
    spatial_factor    pixels along a side of a latent position
    temporal_factor   frames of a latent frame, but for the first
    patch_size        side of the cubes of pixels that are transformed before the first convolution: a power of 2
    wavelets          Haar wavelets; else the pixels of a cube are channels
    attention_levels  levels with attention after each ResNet block, 0 the finest; the middle always has it
    channels          channels of a pixel
    image_size        side of the training frames; other multiples of `spatial_factor` work too
    """

    encoder_widths: tuple[PositiveInt, ...] = (128, 256, 512, 512)
    decoder_widths: tuple[PositiveInt, ...] = (256, 512, 512, 512)
    layers: LayerCount = 2
    latent_channels: PositiveInt = 16
    spatial_factor: PositiveInt = 8
    temporal_factor: PositiveInt = 8
    patch_size: PositiveInt = 4
    wavelets: bool = True
    attention_levels: tuple[int, ...] = ()
    channels: PositiveInt = 3
    image_size: PositiveInt = 1024

    def __post_init__(self) -> None:
        sizes = {
            "patch_size": self.patch_size,
            "spatial_factor": self.spatial_factor,
            "temporal_factor": self.temporal_factor,
        }
        for name, value in sizes.items():
            if value & (value - 1):
                raise ConfigError(f"{name} is {value}", "use a power of 2")
        if self.patch_size < 2 or self.patch_size > min(self.spatial_factor, self.temporal_factor):
            raise ConfigError(
                f"patch_size {self.patch_size} does not fit factors {self.spatial_factor} and {self.temporal_factor}",
                "use a patch_size from 2 to the smaller factor",
            )
        if len(self.encoder_widths) != len(self.decoder_widths) or len(self.encoder_widths) < 2:
            raise ConfigError(
                f"encoder_widths {self.encoder_widths} and decoder_widths {self.decoder_widths} differ in length",
                "give the same number of widths, at least 2",
            )
        steps, needed = len(self.encoder_widths) - 2, max(self.num_spatial_steps, self.num_temporal_steps)
        if (
            needed > steps
            or self.num_temporal_steps > max(0, steps - 1)
            or self.decoder_steps.count((True, True)) + (self.decoder_steps.count((True, False)))
            != self.num_spatial_steps
        ):
            raise ConfigError(
                f"{len(self.encoder_widths)} widths have {steps} levels that can change the resolution, which is not "
                f"enough for factors {self.spatial_factor} and {self.temporal_factor}",
                "give more widths, lower factors or a larger patch_size",
            )
        if any(not 0 <= level <= steps for level in self.attention_levels):
            raise ConfigError(
                f"attention_levels {self.attention_levels} do not all exist", f"give levels from 0 to {steps}"
            )

    @property
    def encoder_channels(self) -> int:
        """Channels that the encoder returns."""
        return self.latent_channels

    def make_networks(self) -> tuple[nn.Module, nn.Module]:
        """Build the encoder and the decoder."""
        return CosmosEncoder(self), CosmosDecoder(self)

    @property
    def num_spatial_steps(self) -> int:
        """Number of levels that halve the height and the width."""
        return (self.spatial_factor // self.patch_size).bit_length() - 1

    @property
    def num_temporal_steps(self) -> int:
        """Number of levels that halve the number of frames."""
        return (self.temporal_factor // self.patch_size).bit_length() - 1

    @property
    def encoder_steps(self) -> list[tuple[bool, bool]]:
        """For each level but the last, whether space and whether time is halved after it, the finest level first."""
        return [(i < self.num_spatial_steps, i < self.num_temporal_steps) for i in range(len(self.encoder_widths) - 2)]

    @property
    def decoder_steps(self) -> list[tuple[bool, bool]]:
        """For each level but the last, whether space and whether time is doubled after it, the coarsest level first."""
        steps = []
        for i in range(len(self.decoder_widths) - 2):
            time = 0 < i < self.num_temporal_steps + 1
            steps.append((time or self.num_temporal_steps < self.num_spatial_steps > i, time))
        return steps


class CosmosResNetBlock(nn.Module):
    """ResNet block: x + conv(conv(x)), with a norm and SiLU before each convolution."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.norm1, self.conv1 = FrameNorm(1, in_channels, eps=1e-6), FactorizedConv(in_channels, out_channels)
        self.norm2, self.conv2 = FrameNorm(1, out_channels, eps=1e-6), FactorizedConv(out_channels, out_channels)
        self.shortcut = nn.Identity() if in_channels == out_channels else nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        y = self.conv1(silu(self.norm1(x)), cache)
        y = self.conv2(silu(self.norm2(y)), cache)
        y += self.shortcut(x)
        return y


class HybridDownsample(nn.Module):
    """Halve the resolution of space, time or both: strided convolution plus average pooling."""

    def __init__(self, width: int, space: bool, time: bool):
        super().__init__()
        self.space = SpatialConv(width, width, 3, stride=2) if space else None
        self.time = TemporalConv(width, width, stride=2) if time else None
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        if self.space is not None:
            B, T, H, W, C = x.shape
            pooled = x[:, :, : H // 2 * 2, : W // 2 * 2].reshape(B, T, H // 2, 2, W // 2, 2, C).mean((3, 5))
            x = self.space(F.pad(x, (0, 0, 0, 1, 0, 1))) + pooled
        if self.time is not None:
            if is_first_chunk(self.time, cache):  # the first frame is a pair with itself
                x = torch.cat([x[:, :1], x], 1)
            x = self.time(x, cache) + x.unflatten(1, (-1, 2)).mean(2)
        return self.out(x)


class HybridUpsample(nn.Module):
    """Double the resolution of space, time or both: repetition plus a convolution of the result."""

    def __init__(self, width: int, space: bool, time: bool):
        super().__init__()
        self.time = TemporalConv(width, width) if time else None
        self.space = SpatialConv(width, width, 3, padding=1) if space else None
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        if self.time is not None:
            is_first = is_first_chunk(self.time, cache)
            x = x.repeat_interleave(2, 1)[:, int(is_first) :]  # the first frame stays one frame
            x = self.time(x, cache) + x
        if self.space is not None:
            x = repeat_positions(x)
            x = self.space(x) + x
        return self.out(x)


def _make_level(in_channels: int, out_channels: int, layers: int, attention: bool) -> CausalSequence:
    parts: list[nn.Module] = []
    for i in range(layers):
        parts.append(CosmosResNetBlock(out_channels if i else in_channels, out_channels))
        if attention:
            parts += [FrameAttention(out_channels), TemporalAttention(out_channels)]
    return CausalSequence(parts)


def _make_middle(width: int) -> CausalSequence:
    attention = [FrameAttention(width), TemporalAttention(width)]
    return CausalSequence([CosmosResNetBlock(width, width), *attention, CosmosResNetBlock(width, width)])


class CosmosEncoder(nn.Module):
    """Encode video (B, T, H, W, C) to features (B, t, h, w, E)."""

    def __init__(self, config: CosmosAutoencoderConfig):
        super().__init__()
        self.config, widths = config, config.encoder_widths
        self.first = FactorizedConv(config.channels * config.patch_size**3, widths[0])
        self.levels, self.steps = nn.ModuleList(), nn.ModuleList()
        for i, (before, after) in enumerate(itertools.pairwise(widths)):
            self.levels.append(_make_level(before, after, config.layers, i in config.attention_levels))
        for i, (space, time) in enumerate(config.encoder_steps):
            self.steps.append(HybridDownsample(widths[i + 1], space, time) if space or time else CausalSequence())
        self.middle = _make_middle(widths[-1])
        self.norm, self.last = FrameNorm(1, widths[-1], eps=1e-6), FactorizedConv(widths[-1], config.latent_channels)

    def forward(self, video: Tensor, cache: StreamCache | None = None) -> Tensor:
        p = self.config.patch_size
        if is_first_chunk(self.first.time, cache):  # the first frame fills a cube of its own
            video = torch.cat([video[:, :1].expand(-1, p - 1, -1, -1, -1), video], 1)
        x = self.first((patch_haar if self.config.wavelets else patch_pixels)(video, p), cache)
        for i, level in enumerate(self.levels):
            x = level(x, cache)
            if i < len(self.steps):
                x = self.steps[i](x, cache)
        return self.last(silu(self.norm(self.middle(x, cache))), cache)


class CosmosDecoder(nn.Module):
    """Decode features (B, t, h, w, E) to video (B, T, H, W, C)."""

    def __init__(self, config: CosmosAutoencoderConfig):
        super().__init__()
        self.config, widths = config, config.decoder_widths[::-1]
        self.first, self.middle = FactorizedConv(config.latent_channels, widths[0]), _make_middle(widths[0])
        self.levels, self.steps = nn.ModuleList(), nn.ModuleList()
        top = len(widths) - 2
        for i, (before, after) in enumerate(itertools.pairwise(widths)):
            self.levels.append(_make_level(before, after, config.layers + 1, top - i in config.attention_levels))
        for i, (space, time) in enumerate(config.decoder_steps):
            self.steps.append(HybridUpsample(widths[i + 1], space, time) if space or time else CausalSequence())
        self.norm = FrameNorm(1, widths[-1], eps=1e-6)
        self.last = FactorizedConv(widths[-1], config.channels * config.patch_size**3)

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        is_first = is_first_chunk(self.first.time, cache)
        x = self.middle(self.first(x, cache), cache)
        for i, level in enumerate(self.levels):
            x = level(x, cache)
            if i < len(self.steps):
                x = self.steps[i](x, cache)
        x = self.last(silu(self.norm(x)), cache)
        video = (unpatch_haar if self.config.wavelets else unpatch_pixels)(x, self.config.patch_size)
        return video[:, self.config.patch_size - 1 :] if is_first else video
