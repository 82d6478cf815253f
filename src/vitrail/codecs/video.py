"""Video ⇄ codes, causal in time: the codes of a frame are made of it and of frames before it (Genie's tokenizer).

An ST-transformer on patches of pixels, a quantizer, and an ST-transformer on the codes. A picture is a video of one
frame, and a video may go on: with a cache, frame by frame is the same as all at once.

B batch, T frames, C channels, H, W pixels, P patch, h, w codes along a side, d width of a code
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.codecs.codec import Codec
from vitrail.codecs.quantizers import Quantized, QuantizerConfig, make_quantizer
from vitrail.config import Config
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import FrameCache, Frames, FramesWork, SpaceTime, SpaceTimeConfig, Work, cost, patchify, unpatchify


class VideoCodecConfig(Config):
    """`image` is the side of the frames it was made for, or their height and width; others that the patch divides will
    do."""

    image: int | tuple[int, int]
    patch: int
    encoder: SpaceTimeConfig
    decoder: SpaceTimeConfig
    quantizer: QuantizerConfig
    channels: int = 3

    @property
    def grid(self) -> tuple[int, int]:
        """Codes of a frame: rows and columns."""
        return grid_of(self.image, self.patch)

    def __post_init__(self) -> None:
        grid_of(self.image, self.patch)


def grid_of(image: int | tuple[int, int], patch: int) -> tuple[int, int]:
    """Patches of a frame: rows and columns."""
    height, width = image if isinstance(image, tuple) else (image, image)
    if patch < 1 or min(height, width) < patch or height % patch or width % patch:
        told = f"{height} × {width}" if isinstance(image, tuple) else image
        raise ConfigError(f"frames of {told} pixels do not divide into patches of {patch}", "choose a multiple")
    return height // patch, width // patch


class VideoCache(NamedTuple):
    """What each half keeps of the frames before."""

    encoder: FrameCache
    decoder: FrameCache


class VideoCodec(nn.Module):
    """Pixels are floats in −1 … 1, as `codec.pixels` makes them of bytes."""

    def __init__(self, config: VideoCodecConfig):
        super().__init__()
        self.config = config
        P, C, grid = config.patch, config.channels, config.grid
        self.quantizer = make_quantizer(config.quantizer)
        wide, tall = config.encoder.block.width, config.decoder.block.width
        self.embed, self.encoder = nn.Linear(C * P * P, wide), SpaceTime(config.encoder, grid)
        self.into, self.out_of = nn.Linear(wide, self.quantizer.dim), nn.Linear(self.quantizer.width, tall)
        self.decoder, self.last = SpaceTime(config.decoder, grid), nn.Linear(tall, C * P * P)

    # ---- what it is ---------------------------------------------------------------------------------------------

    @property
    def factor(self) -> int:
        """Pixels along a side of one code."""
        return self.config.patch

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the frames it was made for."""
        h, w = self.config.grid
        return h * self.factor, w * self.factor

    @property
    def bits(self) -> int:
        """Of one code; 0 where codes are continuous."""
        return self.quantizer.bits

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many values each id of a code can have; none where codes are continuous."""
        return self.quantizer.sizes

    @property
    def bits_per_pixel(self) -> float:
        return self.bits / self.factor**2

    @property
    def device(self) -> torch.device:
        return self.last.weight.device

    def cache(self) -> VideoCache:
        """For videos that go on; what a pass made is kept when its half is told to."""
        return VideoCache(self.encoder.cache(), self.decoder.cache())

    # ---- there and back -----------------------------------------------------------------------------------------

    def encode(self, video: Tensor, cache: Frames | None = None) -> Quantized:
        """video (B, T, C, H, W) → codes (B, T, h, w, d), ids (B, T, h, w)"""
        patches, grid = cut(video, self.config.patch, self.config.channels)
        x = self.encoder(self.embed(patches), grid, cache)  # (B, T, h·w, width)
        return self.quantizer(self.into(x).unflatten(2, grid))

    def lookup(self, ids: Tensor) -> Tensor:
        """ids (B, T, h, w) → codes (B, T, h, w, d)"""
        return self.quantizer.lookup(ids).to(self.last.weight.dtype)

    def decode(self, codes: Tensor, cache: Frames | None = None) -> Tensor:
        """codes (B, T, h, w, d) → video (B, T, C, H, W), not clamped"""
        if codes.ndim != 5 or codes.shape[-1] != self.quantizer.width:
            raise ImageError(f"codes of shape {tuple(codes.shape)}", f"give (B, T, h, w, {self.quantizer.width})")
        h, w = codes.shape[2:4]
        x = self.decoder(self.out_of(codes.flatten(2, 3)), (h, w), cache)
        return mend(self.last(x), self.config.patch, (h, w))

    def reconstruct(self, video: Tensor) -> Tensor:
        """video (B, T, C, H, W) → the same by way of its codes, within −1 … 1"""
        return self.decode(self.encode(video).codes).clamp(-1, 1)

    def forward(self, video: Tensor) -> tuple[Tensor, Quantized]:
        """The reconstruction, not clamped, and the codes it is made of: what training needs."""
        quantized = self.encode(video)
        return self.decode(quantized.codes), quantized

    def pixels(self, bytes: Tensor) -> Tensor:
        """uint8 of any shape → −1 … 1 where the codec lies, in its type"""
        return to_pixels(bytes, self.last.weight)

    bytes = staticmethod(Codec.bytes)

    def work(self, frames: int, batch: int = 1) -> FramesWork:
        """What `cost` needs to know of so many videos of so many frames of the codec's own size."""
        return self.encoder.work(frames, batch)


def to_pixels(bytes: Tensor, like: Tensor) -> Tensor:
    """uint8 → −1 … 1"""
    if bytes.dtype != torch.uint8:
        raise ImageError(f"frames of {bytes.dtype}", "give uint8")
    return (bytes.to(like.device).float() / 127.5 - 1).to(like.dtype)


def cut(video: Tensor, patch: int, channels: int) -> tuple[Tensor, tuple[int, int]]:
    """video (B, T, C, H, W) → patches (B, T, h·w, C·P·P), (h, w)"""
    if video.ndim != 5 or video.shape[2] != channels or not video.shape[1]:
        raise ImageError(f"a video of shape {tuple(video.shape)}", f"give (B, T, {channels}, H, W), one frame or more")
    B, T, _, H, W = video.shape
    patches = patchify(video.flatten(0, 1), (1, patch, patch))
    return patches.unflatten(0, (B, T)), (H // patch, W // patch)


def mend(patches: Tensor, patch: int, grid: tuple[int, int]) -> Tensor:
    """The inverse of `cut`."""
    B, T = patches.shape[:2]
    return unpatchify(patches.flatten(0, 1), (1, patch, patch), (1, *grid))[:, :, 0].unflatten(0, (B, T))


@cost.flops.register
def _(module: VideoCodec, work: Work) -> int:
    """Of `codec(video)`: encoding and decoding once."""
    return sum(cost.flops(part, work) for part in module.children())


cost.bytes.register(VideoCodec, cost.sum_bytes)
