"""Causal layers of video codecs: an output frame depends on input frames up to its own.

Activations are (B, T, H, W, C), so that spatial convolutions are 2-D convolutions of channels-last frames and temporal
convolutions are matrix products. With a `StreamCache`, a video is processed chunk by chunk: each layer keeps the frames
that its next call needs, and the chunks together equal the whole video.

Shapes: B batch, T frames, H, W positions, C channels, K kernel size over time.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ImageError


class CausalAutoencoderConfig(Config):
    """Base class of configs of networks that code the first frame alone, then every `temporal_factor` frames.

    A video of 1 + k·n frames has 1 + n latent frames.
    """

    @property
    def temporal_factor(self) -> int:
        """Frames of one latent frame, but for the first."""
        raise NotImplementedError

    @property
    def chunk_frames(self) -> int:
        """Frames of which a chunk after the first must be a multiple."""
        return self.temporal_factor

    @property
    def chunk_latent_frames(self) -> int:
        """Latent frames of which a chunk after the first must be a multiple."""
        return 1

    def count_latent_frames(self, num_frames: int) -> int:
        """Return the latent frames of a video. `num_frames` must be 1 + k·n."""
        k = self.temporal_factor
        if (num_frames - 1) % k:
            n = max(0, round((num_frames - 1) / k))
            raise ImageError(
                f"a video of {num_frames} frames does not divide into 1 + {k}·n frames",
                f"use {1 + k * n} or {1 + k * (n + 1)} frames: cut the video, or repeat its last frame",
            )
        return 1 + (num_frames - 1) // k

    def count_frames(self, num_latent_frames: int) -> int:
        """Return the frames that latent frames decode to."""
        return 1 + self.temporal_factor * (num_latent_frames - 1)

    def round_up_frames(self, num_frames: int) -> int:
        """Return the smallest number of frames, at least `num_frames`, that is restored by decoding."""
        return self.count_frames(1 + -(-(num_frames - 1) // self.temporal_factor))


class StreamCache(dict[nn.Module, Any]):
    """What the causal layers of one encoder or decoder keep between chunks: layer → frames, keys or values.

    max_frames  latest latent frames that temporal attention keeps; None for all, as without a cache
    """

    def __init__(self, max_frames: int | None = None):
        super().__init__()
        self.max_frames = max_frames


def is_first_chunk(layer: nn.Module, cache: StreamCache | None) -> bool:
    """Whether a layer has not processed a chunk of this stream yet."""
    return cache is None or layer not in cache


class SpatialConv(nn.Conv2d):
    """2-D convolution of every frame of (B, T, H, W, C). `padding` is that of `nn.Conv2d`."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input.flatten(0, 1).permute(0, 3, 1, 2))
        return y.permute(0, 2, 3, 1).unflatten(0, input.shape[:2])


class TemporalConv(nn.Module):
    """Causal convolution over time of (B, T, H, W, C). The first frame is repeated before the video.

    weight (out, in, K), bias (out). A stride of 2 needs one frame less before the video.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3, stride: int = 1):
        super().__init__()
        self.stride, self.padding = stride, kernel_size - stride
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, kernel_size))
        self.bias = nn.Parameter(torch.empty(out_channels))
        bound = (in_channels * kernel_size) ** -0.5  # as nn.Conv3d initializes
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        x = prepend_frames(self, x, self.padding, cache)
        return self.convolve(x)

    def convolve(self, x: Tensor) -> Tensor:
        """Convolve frames that include those before the video."""
        K = self.weight.shape[2]
        length = (x.shape[1] - K) // self.stride + 1
        taps = [x[:, k : k + (length - 1) * self.stride + 1 : self.stride] for k in range(K)]
        y = F.linear(taps[0], self.weight[:, :, 0], self.bias)
        for k in range(1, K):
            y = y + F.linear(taps[k], self.weight[:, :, k])
        return y


class CausalConv(nn.Module):
    """Causal 3 × 3 × 3 convolution of (B, T, H, W, C). Two frames stand before the video: zeros, or the first frame.

    weight (out, in, 3, 3, 3), bias (out).
    """

    def __init__(self, in_channels: int, out_channels: int, repeat_first: bool = False):
        super().__init__()
        self.repeat_first = repeat_first
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, 3, 3, 3))
        self.bias = nn.Parameter(torch.empty(out_channels))
        bound = (27 * in_channels) ** -0.5  # as nn.Conv3d initializes
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        x = prepend_frames(self, x, 2, cache, self.repeat_first)
        B, T = x.shape[0], x.shape[1] - 2
        taps = [x[:, k : k + T].flatten(0, 1).permute(0, 3, 1, 2) for k in range(3)]
        y = F.conv2d(taps[0], self.weight[:, :, 0], self.bias, padding=1)
        for k in (1, 2):
            y = y + F.conv2d(taps[k], self.weight[:, :, k], padding=1)
        return y.permute(0, 2, 3, 1).unflatten(0, (B, T))


def prepend_frames(
    layer: nn.Module, x: Tensor, count: int, cache: StreamCache | None = None, repeat_first: bool = True
) -> Tensor:
    """Put `count` frames before x: of the stream so far, else the first frame repeated, or zeros. Update the cache."""
    if cache is not None and layer in cache:
        before = cache[layer]
    elif repeat_first:
        before = x[:, :1].expand(-1, count, -1, -1, -1)
    else:
        before = x.new_zeros(x.shape[0], count, *x.shape[2:])
    x = torch.cat([before, x], 1)
    if cache is not None:
        cache[layer] = x[:, x.shape[1] - count :].clone()
    return x


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalize groups of the channels of (B, …, C) over all positions, in the layout of x.

    Statistics are those of each channel, combined to those of a group. They are float32 for x of half precision.
    """
    flat, dtype = x.flatten(1, -2), torch.promote_types(x.dtype, torch.float32)
    if x.dtype == dtype:
        variance, mean = torch.var_mean(flat, 1, correction=0)
    else:  # without a float32 copy of x
        mean = flat.mean(1, dtype=dtype)
        variance = torch.linalg.vector_norm(flat, dim=1, dtype=dtype).square() / flat.shape[1] - mean.square()
    mean, variance = mean.unflatten(-1, (groups, -1)), variance.unflatten(-1, (groups, -1))  # (B, groups, C/groups)
    center = mean.mean(-1, keepdim=True)
    spread = (variance + (mean - center).square()).mean(-1, keepdim=True).clamp_min(0)
    scale = (spread + eps).rsqrt() * weight.to(dtype).unflatten(-1, (groups, -1))
    shift = bias.to(dtype) - (center * scale).flatten(1)
    shape = (len(x), *(1,) * (x.ndim - 2), -1)
    return torch.addcmul(shift.to(x.dtype).view(shape), x, scale.flatten(1).to(x.dtype).view(shape))


def silu(x: Tensor) -> Tensor:
    """SiLU, in place without gradients. x must not be used afterwards."""
    return F.silu(x, inplace=not torch.is_grad_enabled())


def repeat_positions(x: Tensor) -> Tensor:
    """Repeat every position of (B, T, H, W, C) twice along height and width."""
    B, T, H, W, C = x.shape
    return x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2, -1).reshape(B, T, 2 * H, 2 * W, C)


class FrameNorm(nn.GroupNorm):
    """GroupNorm of each frame of (B, T, H, W, C)."""

    def forward(self, input: Tensor) -> Tensor:
        y = group_norm(input.flatten(0, 1), self.num_groups, self.weight, self.bias, self.eps)
        return y.unflatten(0, input.shape[:2])


class FactorizedConv(nn.Module):
    """A 3 × 3 convolution of each frame, then a causal convolution over three frames."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.space = SpatialConv(in_channels, out_channels, 3, padding=1)
        self.time = TemporalConv(out_channels, out_channels)

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        return self.time(self.space(x), cache)


class ChannelNorm(nn.Module):
    """RMS norm over the channels of (…, C), computed as an L2 norm."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x.float(), dim=-1).to(x.dtype) * x.shape[-1] ** 0.5 * self.weight


class FrameAttention(nn.Module):
    """Attention with one head among the positions of a frame: x + attention(norm(x))."""

    def __init__(self, width: int, norm: nn.Module | None = None):
        super().__init__()
        self.norm = FrameNorm(1, width, eps=1e-6) if norm is None else norm
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2, 3)[:, :, None].chunk(3, -1)  # (B, T, 1, H·W, C)
        y = F.scaled_dot_product_attention(q, k, v)[:, :, 0]
        return x + self.out(y).unflatten(2, x.shape[2:4])


class TemporalAttention(FrameAttention):
    """Attention with one head of each position to the same position of this and earlier frames."""

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        B, T, H, W, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).permute(0, 2, 3, 1, 4).flatten(0, 2)[:, None].chunk(3, -1)  # (B·H·W, 1, T, C)
        if not is_first_chunk(self, cache):
            assert cache is not None
            k, v = torch.cat([cache[self][0], k], 2), torch.cat([cache[self][1], v], 2)
        total = k.shape[2]
        window = total if cache is None or cache.max_frames is None else cache.max_frames
        distance = torch.arange(total - T, total, device=x.device)[:, None] - torch.arange(total, device=x.device)
        y = F.scaled_dot_product_attention(q, k, v, (distance >= 0) & (distance < window))
        if cache is not None:
            first = max(0, total - (window - 1)) if cache.max_frames is not None else 0
            cache[self] = (k[:, :, first:].clone(), v[:, :, first:].clone()) if first else (k, v)
        y = y[:, 0].unflatten(0, (B, H, W)).permute(0, 3, 1, 2, 4)
        return x + self.out(y)


class CausalSequence(nn.ModuleList):
    """Modules in sequence, which all receive the stream cache."""

    def forward(self, x: Tensor, cache: StreamCache | None = None) -> Tensor:
        for module in self:
            x = module(x, cache)
        return x


# ---- wavelets ---------------------------------------------------------------------------------------------------


def patch_haar(video: Tensor, patch_size: int) -> Tensor:
    """Transform (B, T, H, W, C) into Haar subbands (B, T/p, H/p, W/p, C·p³), scaled by 1/(2√2) a level.

    A level splits every channel into 8 subbands, low before high, over time, height and width.
    """
    for _ in range(patch_size.bit_length() - 1):
        x = video
        bands = [x]
        for axis in (1, 2, 3):
            pairs = [band.unflatten(axis, (-1, 2)).unbind(axis + 1) for band in bands]
            bands = [half for a, b in pairs for half in ((a + b) * 0.5, (a - b) * 0.5)]
        video = torch.cat(bands, -1)
    return video


def unpatch_haar(subbands: Tensor, patch_size: int) -> Tensor:
    """Invert `patch_haar`."""
    for _ in range(patch_size.bit_length() - 1):
        bands = list(subbands.chunk(8, -1))
        for axis in (3, 2, 1):
            pairs = zip(bands[::2], bands[1::2], strict=True)
            bands = [torch.stack([a + b, a - b], axis + 1).flatten(axis, axis + 1) for a, b in pairs]
        subbands = bands[0]
    return subbands


def patch_pixels(video: Tensor, patch_size: int) -> Tensor:
    """Cut (B, T, H, W, C) into patches of p³ pixels, (B, T/p, H/p, W/p, C·p³)."""
    B, T, H, W, C = video.shape
    p = patch_size
    x = video.reshape(B, T // p, p, H // p, p, W // p, p, C)
    return x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(4)


def unpatch_pixels(patches: Tensor, patch_size: int) -> Tensor:
    """Invert `patch_pixels`."""
    p = patch_size
    x = patches.unflatten(4, (-1, p, p, p))  # (B, T, H, W, C, p, p, p)
    return x.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(5, 6).flatten(3, 4).flatten(1, 2)
