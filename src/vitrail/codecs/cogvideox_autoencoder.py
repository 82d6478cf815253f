"""Encoder and decoder of CogVideoX's video codec: causal 3 × 3 × 3 convolutions, norms over the frames of a chunk.

Group norms compute their statistics over all frames of a chunk, so the chunks define the codec. The encoder processes 8
frames at a time and the decoder 2 latent frames; the first chunk also takes the remainder. Within a chunk, a later
frame changes earlier latents. The layers are those of diffusers' AutoencoderKLCogVideoX.

Shapes: B batch, T frames, H, W pixels, t, h, w latent frames and positions, C channels, E width of the features.
"""

import itertools
from typing import Annotated

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from vitrail.codecs.causal_layers import (
    CausalAutoencoderConfig,
    CausalConv,
    SpatialConv,
    StreamCache,
    compute_group_norm,
    group_norm,
    repeat_positions,
    silu,
)
from vitrail.config import LayerCount, PositiveInt
from vitrail.errors import ConfigError, ImageError

CHUNK_FRAMES = 8
"""Frames that the encoder processes at a time. The first chunk also takes the remainder."""
CHUNK_LATENT_FRAMES = 2
"""Latent frames that the decoder processes at a time. The first chunk also takes the remainder."""


class CogVideoXAutoencoderConfig(CausalAutoencoderConfig, tag="cogvideox", tag_field="kind"):
    """Config of `CogVideoXEncoder` and `CogVideoXDecoder`.

    widths           channels of each level from the finest to the coarsest; all but the last halve the resolution
    layers           ResNet blocks of an encoder level; a decoder level has one more
    latent_channels  channels of the latents
    temporal_factor  frames of a latent frame: a power of 2
    norm_groups      groups of channels of the norms
    norm_eps         epsilon of the norms of the encoder's ResNet blocks
    channels         channels of a pixel
    image_size       height and width of the training frames; other multiples of `spatial_factor` work too
    """

    widths: Annotated[tuple[PositiveInt, ...], Meta(min_length=2)] = (128, 256, 256, 512)
    layers: LayerCount = 3
    latent_channels: PositiveInt = 16
    temporal_factor: PositiveInt = 4
    norm_groups: PositiveInt = 32
    norm_eps: float = 1e-6
    channels: PositiveInt = 3
    image_size: tuple[PositiveInt, PositiveInt] = (480, 720)

    def __post_init__(self) -> None:
        if self.temporal_factor & (self.temporal_factor - 1) or self.num_temporal_steps > len(self.widths) - 1:
            raise ConfigError(
                f"temporal_factor is {self.temporal_factor}",
                f"use a power of 2, at most {2 ** (len(self.widths) - 1)} for {len(self.widths)} widths",
            )
        odd = [width for width in self.widths if width % self.norm_groups]
        if odd:
            raise ConfigError(
                f"width {odd[0]} does not divide into {self.norm_groups} norm_groups", "use a multiple, or fewer groups"
            )

    @property
    def spatial_factor(self) -> int:
        """Pixels along a side of one latent position."""
        return 2 ** (len(self.widths) - 1)

    @property
    def num_temporal_steps(self) -> int:
        """Number of levels that halve the number of frames."""
        return self.temporal_factor.bit_length() - 1

    @property
    def encoder_channels(self) -> int:
        """Channels that the encoder returns: a mean and a log variance for each latent channel."""
        return 2 * self.latent_channels

    @property
    def chunk_frames(self) -> int:
        """Frames of which a chunk after the first must be a multiple."""
        return CHUNK_FRAMES

    @property
    def chunk_latent_frames(self) -> int:
        """Latent frames of which a chunk after the first must be a multiple."""
        return CHUNK_LATENT_FRAMES

    def count_latent_frames(self, num_frames: int) -> int:
        """Return the latent frames of a video. Every number of frames is valid."""
        chunks = split_chunks(num_frames, CHUNK_FRAMES)
        for _ in range(self.num_temporal_steps):
            chunks = [(frames + 1) // 2 for frames in chunks]
        return sum(chunks)

    def count_frames(self, num_latent_frames: int) -> int:
        """Return the frames that latent frames decode to."""
        chunks = split_chunks(num_latent_frames, CHUNK_LATENT_FRAMES)
        for _ in range(self.num_temporal_steps):
            chunks = [2 * frames - frames % 2 for frames in chunks]
        return sum(chunks)

    def round_up_frames(self, num_frames: int) -> int:
        """Return the smallest number of frames, at least `num_frames`, that is restored by decoding."""
        while self.count_frames(self.count_latent_frames(num_frames)) != num_frames:
            num_frames += 1
        return num_frames

    def make_networks(self) -> tuple[nn.Module, nn.Module]:
        """Build the encoder and the decoder."""
        return CogVideoXEncoder(self), CogVideoXDecoder(self)


def split_chunks(num_frames: int, chunk_frames: int) -> list[int]:
    """Split frames into chunks, of which the first also takes the remainder."""
    count, rest = divmod(num_frames, chunk_frames)
    return [chunk_frames + rest, *[chunk_frames] * (count - 1)] if count else [rest]


class ChunkNorm(nn.GroupNorm):
    """Group norm of (B, T, H, W, C) with statistics over all frames. The latents are not used."""

    def forward(self, input: Tensor, latents: Tensor | None = None) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class LatentModulatedNorm(ChunkNorm):
    """Group norm whose result is scaled and shifted by linear functions of the latents (B, t, h, w, E).

    A latent modulates all frames and positions that it decodes to. The first of an odd number of latent frames decodes
    to one frame.
    """

    def __init__(self, groups: int, width: int, latent_channels: int):
        super().__init__(groups, width, eps=1e-6)
        self.modulation = nn.Linear(latent_channels, 2 * width)

    def forward(self, input: Tensor, latents: Tensor | None = None) -> Tensor:
        assert latents is not None
        y_scale, y_shift = self.modulation(latents).chunk(2, -1)
        scale, shift = (
            part[:, None, None, None].to(input.dtype)
            for part in compute_group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        )
        # (x · scale + shift) · y_scale + y_shift, combined at the resolution of the latents
        scale, shift = scale * y_scale, torch.addcmul(y_shift, shift, y_scale)
        first = latents.shape[1] % 2
        parts = [_modulate(input[:, :first], scale[:, :first], shift[:, :first])] if first else []
        if input.shape[1] > first:
            parts.append(_modulate(input[:, first:], scale[:, first:], shift[:, first:]))
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Compute x · scale + shift. The size of x is a multiple of that of scale and shift, which are repeated."""
    shape = [part for n, m in zip(x.shape[1:4], scale.shape[1:4], strict=True) for part in (m, n // m)]
    scale, shift = (y[:, :, None, :, None, :, None] for y in (scale, shift))
    return torch.addcmul(shift, x.reshape(x.shape[0], *shape, x.shape[-1]), scale).reshape(x.shape)


class CogVideoXResNetBlock(nn.Module):
    """ResNet block: x + conv(conv(x)), with a norm and SiLU before each convolution."""

    def __init__(self, in_channels: int, out_channels: int, norms: tuple[ChunkNorm, ChunkNorm]):
        super().__init__()
        self.norm1, self.norm2 = norms
        self.conv1 = CausalConv(in_channels, out_channels, repeat_first=True)
        self.conv2 = CausalConv(out_channels, out_channels, repeat_first=True)
        self.shortcut = nn.Identity() if in_channels == out_channels else nn.Linear(in_channels, out_channels)

    def forward(self, x: Tensor, latents: Tensor | None = None, cache: StreamCache | None = None) -> Tensor:
        y = self.conv1(silu(self.norm1(x, latents)), cache)
        y = self.conv2(silu(self.norm2(y, latents)), cache)
        y += self.shortcut(x)
        return y


class CogVideoXDownsample(nn.Module):
    """Halve the number of frames by averaging pairs, if `time` is set, and then the resolution by a convolution.

    The first of an odd number of frames has no pair.
    """

    def __init__(self, width: int, time: bool):
        super().__init__()
        self.time, self.space = time, SpatialConv(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        first = x.shape[1] % 2
        if self.time and x.shape[1] > 1:
            pairs = x[:, first:].unflatten(1, (-1, 2)).mean(2)
            x = torch.cat([x[:, :1], pairs], 1) if first else pairs
        return self.space(F.pad(x, (0, 0, 0, 1, 0, 1)))


class CogVideoXUpsample(nn.Module):
    """Double the resolution by a convolution of repeated pixels and, if `time` is set, repeat every frame.

    The first of an odd number of frames is not repeated.
    """

    def __init__(self, width: int, time: bool):
        super().__init__()
        self.time, self.space = time, SpatialConv(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.space(repeat_positions(x))
        if self.time:
            first = x.shape[1] % 2
            x = torch.cat([x[:, :first], x[:, first:].repeat_interleave(2, 1)], 1)
        return x


class CogVideoXLevel(nn.Module):
    """ResNet blocks of one resolution and a resampling step."""

    def __init__(self, blocks: list[CogVideoXResNetBlock], step: nn.Module | None = None):
        super().__init__()
        self.blocks, self.step = nn.ModuleList(blocks), step

    def forward(self, x: Tensor, latents: Tensor | None = None, cache: StreamCache | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, latents, cache)
        return x if self.step is None else self.step(x)


class ChunkedNetwork(nn.Module):
    """Base class of encoder and decoder, which process a video in chunks of `chunk_frames`."""

    chunk_frames: int

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        cache = StreamCache() if cache is None else cache
        T, size = x.shape[1], self.chunk_frames
        chunks = split_chunks(T, size)
        if self in cache:
            if T % size or cache[self] < size:
                raise ImageError(
                    f"chunks of {cache[self]} and then {T} frames are not those of the whole video",
                    f"give at least {size} frames first, and then multiples of {size}",
                )
            chunks = [size] * (T // size)
        cache.setdefault(self, T)
        parts = [self.process_chunk(part, cache) for part in x.split(chunks, 1)]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def process_chunk(self, x: Tensor, cache: StreamCache) -> Tensor:
        raise NotImplementedError


class CogVideoXEncoder(ChunkedNetwork):
    """Encode video (B, T, H, W, C) to features (B, t, h, w, 2·E): means and log variances."""

    chunk_frames = CHUNK_FRAMES

    def __init__(self, config: CogVideoXAutoencoderConfig):
        super().__init__()
        widths, groups = config.widths, config.norm_groups

        def make_blocks(before: int, after: int, count: int) -> list[CogVideoXResNetBlock]:
            inputs = [before, *[after] * (count - 1)]
            norms = [(ChunkNorm(groups, n, config.norm_eps), ChunkNorm(groups, after, config.norm_eps)) for n in inputs]
            return [CogVideoXResNetBlock(n, after, pair) for n, pair in zip(inputs, norms, strict=True)]

        self.first = CausalConv(config.channels, widths[0], repeat_first=True)
        self.levels = nn.ModuleList()
        for i, (before, after) in enumerate(itertools.pairwise((widths[0], *widths))):
            is_last = i == len(widths) - 1
            step = None if is_last else CogVideoXDownsample(after, i < config.num_temporal_steps)
            self.levels.append(CogVideoXLevel(make_blocks(before, after, config.layers), step))
        self.middle = CogVideoXLevel(make_blocks(widths[-1], widths[-1], 2))
        self.norm = ChunkNorm(groups, widths[-1], eps=1e-6)
        self.last = CausalConv(widths[-1], config.encoder_channels, repeat_first=True)

    def process_chunk(self, x: Tensor, cache: StreamCache) -> Tensor:
        x = self.first(x, cache)
        for level in (*self.levels, self.middle):
            x = level(x, None, cache)
        return self.last(silu(self.norm(x)), cache)


class CogVideoXDecoder(ChunkedNetwork):
    """Decode features (B, t, h, w, E) to video (B, T, H, W, C)."""

    chunk_frames = CHUNK_LATENT_FRAMES

    def __init__(self, config: CogVideoXAutoencoderConfig):
        super().__init__()
        widths, E = config.widths[::-1], config.latent_channels

        def make_norm(width: int) -> ChunkNorm:
            return LatentModulatedNorm(config.norm_groups, width, E)

        def make_blocks(before: int, after: int, count: int) -> list[CogVideoXResNetBlock]:
            inputs = [before, *[after] * (count - 1)]
            return [CogVideoXResNetBlock(n, after, (make_norm(n), make_norm(after))) for n in inputs]

        self.first = CausalConv(E, widths[0], repeat_first=True)
        self.middle = CogVideoXLevel(make_blocks(widths[0], widths[0], 2))
        self.levels = nn.ModuleList()
        for i, (before, after) in enumerate(itertools.pairwise((widths[0], *widths))):
            is_last = i == len(widths) - 1
            step = None if is_last else CogVideoXUpsample(after, i < config.num_temporal_steps)
            self.levels.append(CogVideoXLevel(make_blocks(before, after, config.layers + 1), step))
        self.norm = make_norm(widths[-1])
        self.last = CausalConv(widths[-1], config.channels, repeat_first=True)

    def process_chunk(self, x: Tensor, cache: StreamCache) -> Tensor:
        latents, x = x, self.first(x, cache)
        for level in (self.middle, *self.levels):
            x = level(x, latents, cache)
        return self.last(silu(self.norm(x, latents)), cache)
