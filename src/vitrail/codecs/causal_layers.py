"""Causal layers of video codecs: an output frame depends on input frames up to its own.

Activations are (B, T, H, W, C), so that all convolutions are 2-D convolutions in channels-last layout: of frames, or
over time with the positions of a frame side by side. With a `StreamCache`, a video is processed chunk by chunk: each
layer keeps the frames that its next call needs, and the chunks together equal the whole video.

Shapes: B batch, T frames, H, W positions, C channels, K kernel size over time.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ImageError

FEW_CHANNELS = 16
"""Channels below which a convolution wastes most of a matrix product."""


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
        # One 2-D convolution of an image with T rows and H·W columns.
        y = F.conv2d(x.flatten(2, 3).permute(0, 3, 1, 2), self.weight.unsqueeze(-1), self.bias, stride=(self.stride, 1))
        return y.permute(0, 2, 3, 1).unflatten(2, x.shape[2:4])


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
        before = take_frames_before(self, x, 2, cache, self.repeat_first)
        return self.convolve(x, before)

    def convolve(self, x: Tensor, before: Tensor | None) -> Tensor:
        """Convolve frames by 2-D convolutions; `before` are the two frames before them, None for zeros."""
        w0, w1, w2 = self.weight.unbind(2)  # for the frame before last, the last frame, and the frame itself
        out_channels, in_channels = self.weight.shape[:2]
        if min(in_channels, out_channels) <= FEW_CHANNELS:
            before = x.new_zeros(x.shape[0], 2, *x.shape[2:]) if before is None else before
            frames, T = torch.cat([before, x], 1), x.shape[1]
            if in_channels <= FEW_CHANNELS:  # three frames are channels of one
                joined = torch.cat([frames[:, k : k + T] for k in range(3)], -1)
                return convolve_frames(joined, torch.cat([w0, w1, w2], 1), self.bias)
            parts = convolve_frames(frames, torch.cat([w0, w1, w2])).chunk(3, -1)  # for three frames at once
            return sum((part[:, k : k + T] for k, part in enumerate(parts)), start=self.bias)
        y = convolve_frames(x, w2, self.bias)  # adds to y: frames before are not joined with x, which would copy x
        if x.shape[1] > 1:
            y[:, 1:] += convolve_frames(x[:, :-1], w1)
        if x.shape[1] > 2:
            y[:, 2:] += convolve_frames(x[:, :-2], w0)
        if before is not None:
            y[:, :1] += convolve_frames(before[:, 1:], w1)
            y[:, :2] += convolve_frames(before[:, : x.shape[1]], w0)
        return y


def convolve_frames(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve every frame of (B, T, H, W, C) with a 3 × 3 kernel."""
    y = F.conv2d(x.flatten(0, 1).permute(0, 3, 1, 2), weight, bias, padding=1)
    return y.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])


def take_frames_before(
    layer: nn.Module, x: Tensor, count: int, cache: StreamCache | None = None, repeat_first: bool = True
) -> Tensor | None:
    """Return `count` frames before x: those of the stream so far, else the first frame repeated, or None for zeros.

    The cache then keeps the last `count` frames.
    """
    if cache is not None and layer in cache:
        before = cache[layer]
    else:
        before = x[:, :1].expand(-1, count, -1, -1, -1) if repeat_first else None
    if cache is not None:
        missing = count - x.shape[1]  # of a chunk that is shorter
        if missing <= 0:
            cache[layer] = x[:, x.shape[1] - count :].clone()
        else:
            rest = x.new_zeros(x.shape[0], missing, *x.shape[2:]) if before is None else before[:, count - missing :]
            cache[layer] = torch.cat([rest, x], 1)
    return before


def prepend_frames(
    layer: nn.Module, x: Tensor, count: int, cache: StreamCache | None = None, repeat_first: bool = True
) -> Tensor:
    """Put `count` frames before x, as `take_frames_before` returns them."""
    before = take_frames_before(layer, x, count, cache, repeat_first)
    return torch.cat([x.new_zeros(x.shape[0], count, *x.shape[2:]) if before is None else before, x], 1)


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalize groups of the channels of (B, …, C) over all positions, in the layout of x."""
    scale, shift = compute_group_norm(x, groups, weight, bias, eps)
    shape = (len(x), *(1,) * (x.ndim - 2), -1)
    return torch.addcmul(shift.view(shape).to(x.dtype), x, scale.view(shape).to(x.dtype))


def compute_group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the scale and the shift (B, C) that normalize groups of the channels of (B, …, C).

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
    return scale.flatten(1), bias.to(dtype) - (center * scale).flatten(1)


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
    """RMS norm over the channels of (…, C). Its epsilon only keeps zeros finite."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-24)


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
    """Transform (B, T, H, W, C) into Haar subbands (B, T/p, H/p, W/p, p³·C), scaled by 1/(2√2) a level.

    A level splits every channel into 8 subbands, low before high, over time, height and width.
    """
    B, T, H, W, C = video.shape
    p = patch_size
    x = video.reshape(B, T // p, p, H // p, p, W // p, p, C).permute(0, 1, 3, 5, 2, 4, 6, 7)
    return F.linear(x.flatten(4), make_haar_matrix(p, C, video.device, video.dtype))


def unpatch_haar(subbands: Tensor, patch_size: int) -> Tensor:
    """Invert `patch_haar`."""
    p = patch_size
    matrix = make_haar_matrix(p, subbands.shape[-1] // p**3, subbands.device, subbands.dtype)
    x = F.linear(subbands, matrix.mT * p**3).unflatten(4, (p, p, p, -1))  # (B, t, h, w, p, p, p, C)
    return x.permute(0, 1, 4, 2, 5, 3, 6, 7).flatten(5, 6).flatten(3, 4).flatten(1, 2)


@torch.compiler.assume_constant_result
def make_haar_matrix(patch_size: int, channels: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Build the matrix from the pixels of a patch (p, p, p, C) to its Haar subbands.

    Its entries are ±1/p³, and its inverse is p³ times its transpose.
    """
    return _build_haar_matrix(patch_size, channels, device, dtype)


@functools.lru_cache(maxsize=16)
def _build_haar_matrix(patch_size: int, channels: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():  # the result is also used for training
        p, size = patch_size, patch_size**3 * channels
        x = torch.eye(size, device="cpu").view(size, p, p, p, channels)
        for _ in range(p.bit_length() - 1):
            bands = [x]
            for axis in (1, 2, 3):
                pairs = [band.unflatten(axis, (-1, 2)).unbind(axis + 1) for band in bands]
                bands = [half for a, b in pairs for half in ((a + b) * 0.5, (a - b) * 0.5)]
            x = torch.cat(bands, -1)
        return x.flatten(1).mT.contiguous().to(device, dtype)


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
