"""Encoder and decoder of Wan's video codecs: causal 3 × 3 × 3 convolutions, channel norms, attention in the middle.

The first frame is coded alone, then every `temporal_factor` frames together. The layers are those of diffusers'
AutoencoderKLWan, for Wan 2.1 and, with residual resampling and patches, 2.2.

Shapes: B batch, T frames, H, W pixels, t, h, w latent frames and positions, C channels, E width of the features.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.codecs.causal_layers import (
    CausalAutoencoderConfig,
    CausalConv,
    CausalSequence,
    ChannelNorm,
    FrameAttention,
    SpatialConv,
    StreamCache,
    TemporalConv,
    is_first_chunk,
    prepend_frames,
    repeat_positions,
    silu,
)
from vitrail.config import LayerCount, PositiveInt
from vitrail.errors import ConfigError


class WanAutoencoderConfig(CausalAutoencoderConfig, tag="wan", tag_field="kind"):
    """Config of `WanEncoder` and `WanDecoder`.

    width               channels of the encoder's first level
    decoder_width       the same for the decoder; 0 for `width`
    multipliers         channels of each level from the finest to the coarsest, as multiples of the width
    layers              ResNet blocks of an encoder level; a decoder level has one more
    latent_channels     channels of the latents
    temporal_steps      for each level but the last, whether it halves the number of frames; all halve the resolution
    resampled_shortcut  add a resampled copy of a level's input to its output (Wan 2.2)
    patch_size          side of the squares of pixels that are channels of the first convolution
    channels            channels of a pixel
    image_size          side of the training frames; other multiples of `spatial_factor` work too
    """

    width: PositiveInt = 96
    decoder_width: int = 0
    multipliers: tuple[PositiveInt, ...] = (1, 2, 4, 4)
    layers: LayerCount = 2
    latent_channels: PositiveInt = 16
    temporal_steps: tuple[bool, ...] = (False, True, True)
    resampled_shortcut: bool = False
    patch_size: PositiveInt = 1
    channels: PositiveInt = 3
    image_size: PositiveInt = 480

    def __post_init__(self) -> None:
        if len(self.temporal_steps) != len(self.multipliers) - 1:
            raise ConfigError(
                f"{len(self.temporal_steps)} temporal_steps do not fit {len(self.multipliers)} multipliers",
                "give one step for each level but the last",
            )
        if self.decoder_width < 0:
            raise ConfigError(f"decoder_width is {self.decoder_width}", "use 0 for the encoder's width, or more")
        if not self.resampled_shortcut:
            odd = [n for n in self.multipliers[1:] if (self.decoder_width or self.width) * n % 2]
            if odd:
                raise ConfigError(
                    f"a level of {odd[0]} × {self.decoder_width or self.width} channels cannot be halved",
                    "use an even width",
                )

    @property
    def spatial_factor(self) -> int:
        """Pixels along a side of one latent position."""
        return self.patch_size * 2 ** len(self.temporal_steps)

    @property
    def temporal_factor(self) -> int:
        """Frames of one latent frame, but for the first."""
        return 2 ** sum(self.temporal_steps)

    @property
    def encoder_channels(self) -> int:
        """Channels that the encoder returns: a mean and a log variance for each latent channel."""
        return 2 * self.latent_channels

    def make_networks(self) -> tuple[nn.Module, nn.Module]:
        """Build the encoder and the decoder."""
        return WanEncoder(self), WanDecoder(self)

    @property
    def encoder_widths(self) -> list[int]:
        """Channels before the first level and of each level, the finest first."""
        return [self.width, *(self.width * n for n in self.multipliers)]

    @property
    def decoder_widths(self) -> list[tuple[int, int]]:
        """Input and output channels of each level, the coarsest first."""
        width = self.decoder_width or self.width
        outputs = [width * n for n in self.multipliers[::-1]]
        inputs = [outputs[0], *(n if self.resampled_shortcut else n // 2 for n in outputs)]
        return list(zip(inputs, outputs, strict=False))


class WanResNetBlock(nn.Module):
    """ResNet block: x + conv(conv(x)), with a norm and SiLU before each convolution."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.norm1, self.conv1 = ChannelNorm(in_channels), CausalConv(in_channels, out_channels)
        self.norm2, self.conv2 = ChannelNorm(out_channels), CausalConv(out_channels, out_channels)
        self.shortcut = nn.Identity() if in_channels == out_channels else nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        y = self.conv1(silu(self.norm1(x)), cache)
        y = self.conv2(silu(self.norm2(y)), cache)
        y += self.shortcut(x)
        return y


class WanDownsample(nn.Module):
    """Halve the resolution with a strided convolution, and then, if `time` is set, the number of frames.

    The convolution over time passes the first frame unchanged.
    """

    def __init__(self, width: int, time: bool):
        super().__init__()
        self.space = SpatialConv(width, width, 3, stride=2)
        self.time = TemporalConv(width, width, stride=2) if time else None

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        x = self.space(F.pad(x, (0, 0, 0, 1, 0, 1)))
        if self.time is None:
            return x
        if not is_first_chunk(self.time, cache):
            return self.time.convolve(prepend_frames(self.time, x, 1, cache))
        if cache is not None:
            cache[self.time] = x[:, -1:].clone()
        return torch.cat([x[:, :1], self.time.convolve(x)], 1) if x.shape[1] > 1 else x


class WanUpsample(nn.Module):
    """Double the number of frames, if `time` is set, and then the resolution.

    The first frame stays one frame, and the convolution over time does not read it.
    """

    def __init__(self, in_channels: int, out_channels: int, time: bool):
        super().__init__()
        self.time = TemporalConv(in_channels, 2 * in_channels) if time else None
        self.space = SpatialConv(in_channels, out_channels, 3, padding=1)

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        if self.time is not None:
            is_first = is_first_chunk(self.time, cache)
            later = x[:, 1:] if is_first else x
            if is_first and cache is not None:  # zeros stand before the second frame
                cache[self.time] = x.new_zeros(x.shape[0], 2, *x.shape[2:])
            if later.shape[1]:
                pairs = self.time.convolve(prepend_frames(self.time, later, 2, cache, repeat_first=False))
                later = pairs.unflatten(-1, (2, -1)).movedim(-2, 2).flatten(1, 2)
            x = torch.cat([x[:, :1], later], 1) if is_first else later
        return self.space(repeat_positions(x))


class PooledShortcut(nn.Module):
    """Halve the resolution by averaging pixels and groups of channels. Zeros stand before the first frame."""

    def __init__(self, out_channels: int, space: bool, time: bool):
        super().__init__()
        self.out_channels, self.space, self.time = out_channels, 1 + space, 1 + time

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        if self.time > 1 and is_first_chunk(self, cache):
            x = torch.cat([torch.zeros_like(x[:, :1]), x], 1)
        if cache is not None:
            cache[self] = True
        B, T, H, W, C = x.shape
        s, t = self.space, self.time
        x = x.reshape(B, T // t, t, H // s, s, W // s, s, C).permute(0, 1, 3, 5, 7, 2, 4, 6)
        return x.flatten(4).unflatten(-1, (self.out_channels, -1)).mean(-1)


class RepeatedShortcut(nn.Module):
    """Double the resolution by repeating channels and making them positions. The first frame stays one frame."""

    def __init__(self, in_channels: int, out_channels: int, time: bool):
        super().__init__()
        self.out_channels, self.time = out_channels, 1 + time
        self.repeats = out_channels * self.time * 4 // in_channels

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        is_first = is_first_chunk(self, cache)
        if cache is not None:
            cache[self] = True
        x = x.repeat_interleave(self.repeats, -1).unflatten(-1, (self.out_channels, self.time, 2, 2))
        x = x.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(5, 6).flatten(3, 4).flatten(1, 2)
        return x[:, self.time - 1 :] if is_first else x


class WanLevel(nn.Module):
    """ResNet blocks of one resolution and a resampling step, with a resampled shortcut around them in Wan 2.2."""

    def __init__(self, blocks: list[nn.Module], step: nn.Module | None, shortcut: nn.Module | None):
        super().__init__()
        self.blocks, self.step, self.shortcut = CausalSequence(blocks), step, shortcut

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        y = self.blocks(x, cache)
        if self.step is not None:
            y = self.step(y, cache)
        return y if self.shortcut is None else y + self.shortcut(x, cache)


def _make_blocks(in_channels: int, out_channels: int, layers: int) -> list[nn.Module]:
    return [WanResNetBlock(out_channels if i else in_channels, out_channels) for i in range(layers)]


def _make_middle(width: int) -> CausalSequence:
    attention = FrameAttention(width, ChannelNorm(width))
    return CausalSequence([WanResNetBlock(width, width), attention, WanResNetBlock(width, width)])


class WanEncoder(nn.Module):
    """Encode video (B, T, H, W, C) to features (B, t, h, w, 2·E): means and log variances."""

    def __init__(self, config: WanAutoencoderConfig):
        super().__init__()
        self.config, widths = config, config.encoder_widths
        self.first = CausalConv(config.channels * config.patch_size**2, widths[0])
        self.levels = nn.ModuleList()
        for i, (before, after) in enumerate(itertools.pairwise(widths)):
            is_last = i == len(config.temporal_steps)
            time = not is_last and config.temporal_steps[i]
            step = None if is_last else WanDownsample(after, time)
            shortcut = PooledShortcut(after, not is_last, time) if config.resampled_shortcut else None
            self.levels.append(WanLevel(_make_blocks(before, after, config.layers), step, shortcut))
        self.middle = _make_middle(widths[-1])
        self.norm, self.last = ChannelNorm(widths[-1]), CausalConv(widths[-1], 2 * config.latent_channels)

    def forward(self, video: Tensor, cache: StreamCache | None = None) -> Tensor:
        p = self.config.patch_size
        if p > 1:  # channels in the order colour, column, row
            video = video.unflatten(3, (-1, p)).unflatten(2, (-1, p)).permute(0, 1, 2, 4, 6, 5, 3).flatten(4)
        x = self.first(video, cache)
        for level in self.levels:
            x = level(x, cache)
        return self.last(silu(self.norm(self.middle(x, cache))), cache)


class WanDecoder(nn.Module):
    """Decode features (B, t, h, w, E) to video (B, T, H, W, C)."""

    def __init__(self, config: WanAutoencoderConfig):
        super().__init__()
        self.config, widths = config, config.decoder_widths
        self.first, self.middle = CausalConv(config.latent_channels, widths[0][0]), _make_middle(widths[0][0])
        self.levels = nn.ModuleList()
        for i, (before, after) in enumerate(widths):
            is_last = i == len(widths) - 1
            time = not is_last and config.temporal_steps[::-1][i]
            step = None if is_last else WanUpsample(after, after if config.resampled_shortcut else after // 2, time)
            has_shortcut = config.resampled_shortcut and not is_last
            shortcut = RepeatedShortcut(before, after, time) if has_shortcut else None
            self.levels.append(WanLevel(_make_blocks(before, after, config.layers + 1), step, shortcut))
        self.norm = ChannelNorm(widths[-1][1])
        self.last = CausalConv(widths[-1][1], config.channels * config.patch_size**2)

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        x = self.middle(self.first(x, cache), cache)
        for level in self.levels:
            x = level(x, cache)
        x, p = self.last(silu(self.norm(x)), cache), self.config.patch_size
        if p == 1:
            return x
        x = x.unflatten(-1, (-1, p, p))  # (B, T, H, W, C, column, row)
        return x.permute(0, 1, 2, 6, 3, 5, 4).flatten(4, 5).flatten(2, 3)
