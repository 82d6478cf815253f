"""Convolutional encoder and decoder of VQGAN, MoVQ, SD-VAE and the GAIA-1 tokenizer.

The layers are those of diffusers' AutoencoderKL and VQModel, so their weights can be loaded: GroupNorm and SiLU before
every convolution, attention in the middle, strided convolutions down, nearest-neighbour upsampling and a convolution
up. Every level halves the resolution of the one before.

Shapes: B batch, C channels, H, W pixels, h, w codes along a side, E width of the features.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config, LayerCount, PositiveInt
from vitrail.errors import ConfigError
from vitrail.nn import Attention, AttentionConfig, AttentionPlan, Workload, cost

NORM_EPS = 1e-6


class ConvAutoencoderConfig(Config, tag="conv", tag_field="kind"):
    """Config of `ConvEncoder` and `ConvDecoder`.

    `widths` are the channels of each level from the finest to the coarsest; every level but the last halves the
    resolution. An encoder level has `layers` ResNet blocks, a decoder level one more.

    latent_channels   channels between encoder and quantizer, and between quantizer and decoder
    mid_attention     attention between the two ResNet blocks in the middle
    attention_levels  levels with attention after each ResNet block (VQGAN: the coarsest)
    norm_groups       groups of the norms
    spatial_norm      scale and shift the decoder's norms by the codes at the same position (MoVQ)
    image_size        height and width of the training images; other multiples of `downsample_factor` work too
    """

    widths: tuple[PositiveInt, ...] = (128, 256, 512, 512)
    layers: LayerCount = 2
    latent_channels: PositiveInt = 4
    mid_attention: bool = True
    attention_levels: tuple[int, ...] = ()
    norm_groups: PositiveInt = 32
    spatial_norm: bool = False
    channels: PositiveInt = 3
    image_size: tuple[PositiveInt, PositiveInt] = (256, 256)

    @property
    def downsample_factor(self) -> int:
        """Pixels along a side of one code."""
        return 2 ** (len(self.widths) - 1)

    @property
    def decoder_channels(self) -> int:
        """Number of input channels of the decoder."""
        return self.latent_channels

    def __post_init__(self) -> None:
        if not self.widths:
            raise ConfigError("widths is empty", "give at least one")
        odd = [width for width in self.widths if width % self.norm_groups]
        if odd:
            raise ConfigError(
                f"a level of {odd[0]} channels does not divide into {self.norm_groups} norm groups",
                "change one of them",
            )
        if any(not 0 <= level < len(self.widths) for level in self.attention_levels):
            raise ConfigError(
                f"attention_levels {self.attention_levels} do not all exist: there are {len(self.widths)} levels",
                f"give levels from 0 to {len(self.widths) - 1}",
            )
        if any(side % self.downsample_factor for side in self.image_size):
            raise ConfigError(
                f"image_size {self.image_size} is not a multiple of {self.downsample_factor}",
                f"give multiples of {self.downsample_factor}",
            )


class UnmodulatedNorm(nn.GroupNorm):
    """GroupNorm that ignores the codes."""

    def forward(self, input: Tensor, codes: Tensor | None = None) -> Tensor:
        return super().forward(input)


class SpatialNorm(nn.Module):
    """GroupNorm whose scale and shift are predicted from the codes (B, d, h, w) at the same position (MoVQ's
    SpatialNorm).
    """

    def __init__(self, groups: int, width: int, codes: int):
        super().__init__()
        self.norm = nn.GroupNorm(groups, width, NORM_EPS)
        self.scale = nn.Conv2d(codes, width, 1)
        self.shift = nn.Conv2d(codes, width, 1)

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        # Project each code once, then upsample: projecting at every pixel gives the same result.
        scale, shift = (F.interpolate(part(codes), x.shape[-2:]) for part in (self.scale, self.shift))
        return self.norm(x) * scale + shift


def _make_norm(groups: int, width: int, codes: int) -> nn.Module:
    """Build a norm; `codes` is the width of the codes that modulate it, 0 for none."""
    return SpatialNorm(groups, width, codes) if codes else UnmodulatedNorm(groups, width, NORM_EPS)


class ResNetBlock(nn.Module):
    """ResNet block: x + conv(conv(x)), with a norm and SiLU before each convolution."""

    def __init__(self, width: int, out: int, groups: int, codes: int = 0):
        super().__init__()
        self.norm1 = _make_norm(groups, width, codes)
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.norm2 = _make_norm(groups, out, codes)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Identity() if width == out else nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x, codes)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y, codes)))


class AttentionBlock(nn.Module):
    """Attention block over all positions with one head: x + attention(norm(x))."""

    def __init__(self, width: int, groups: int, codes: int = 0):
        super().__init__()
        self.norm = _make_norm(groups, width, codes)
        self.op = Attention(width, AttentionConfig(heads=1, bias="all"))

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        h, w = x.shape[-2:]
        y = self.op(self.norm(x, codes).flatten(2).mT, AttentionPlan())  # (B, h·w, C)
        return x + y.mT.unflatten(-1, (h, w))


class Downsample(nn.Module):
    """Downsample by 2 with a strided convolution, padded at the right and the bottom only."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Upsample by 2 with nearest neighbours and a convolution."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class CodeIdentity(nn.Identity):
    """Identity that accepts and ignores the codes."""

    def forward(self, input: Tensor, codes: Tensor | None = None) -> Tensor:
        return input


class BlockSequence(nn.ModuleList):
    """Sequence of blocks that all receive the codes."""

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        for block in self:
            x = block(x, codes)
        return x


class ResolutionLevel(BlockSequence):
    """ResNet blocks of one resolution, each followed by attention if `attention` is set."""

    def __init__(self, width: int, out: int, count: int, groups: int, attention: bool, codes: int = 0):
        parts: list[nn.Module] = []
        for i in range(count):
            parts.append(ResNetBlock(out if i else width, out, groups, codes))
            if attention:
                parts.append(AttentionBlock(out, groups, codes))
        super().__init__(parts)


class MidBlock(BlockSequence):
    """ResNet block, attention, ResNet block."""

    def __init__(self, width: int, groups: int, attention: bool, codes: int = 0):
        inner = AttentionBlock(width, groups, codes) if attention else CodeIdentity()
        super().__init__([ResNetBlock(width, width, groups, codes), inner, ResNetBlock(width, width, groups, codes)])


class ConvEncoder(nn.Module):
    """Encode pixels (B, C, H, W) to features (B, h, w, E)."""

    def __init__(self, config: ConvAutoencoderConfig, width: int):
        super().__init__()
        self.config, widths, groups = config, config.widths, config.norm_groups
        self.width = width
        self.first = nn.Conv2d(config.channels, widths[0], 3, padding=1)
        self.levels = nn.ModuleList(
            ResolutionLevel(widths[max(i - 1, 0)], out, config.layers, groups, i in config.attention_levels)
            for i, out in enumerate(widths)
        )
        self.downs = nn.ModuleList(Downsample(out) for out in widths[:-1])
        self.middle = MidBlock(widths[-1], groups, config.mid_attention)
        self.norm = nn.GroupNorm(groups, widths[-1], NORM_EPS)
        self.last = nn.Conv2d(widths[-1], width, 3, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.first(pixels)
        for i, level in enumerate(self.levels):
            x = level(x)
            if i < len(self.downs):
                x = self.downs[i](x)
        return self.last(F.silu(self.norm(self.middle(x)))).movedim(1, -1)


class ConvDecoder(nn.Module):
    """Decode features (B, h, w, latent channels) to pixels (B, C, H, W).

    Levels are in the encoder's order, the finest first. With spatial norms, the decoder also uses the codes (B, h, w,
    d) from which the features were computed.
    """

    def __init__(self, config: ConvAutoencoderConfig, code_width: int):
        super().__init__()
        self.config, widths, groups = config, config.widths, config.norm_groups
        heeds = code_width if config.spatial_norm else 0
        self.first = nn.Conv2d(config.latent_channels, widths[-1], 3, padding=1)
        self.middle = MidBlock(widths[-1], groups, config.mid_attention, heeds)
        self.levels = nn.ModuleList(
            ResolutionLevel(
                widths[min(i + 1, len(widths) - 1)], out, config.layers + 1, groups, i in config.attention_levels, heeds
            )
            for i, out in enumerate(widths)
        )
        self.ups = nn.ModuleList(Upsample(out) for out in widths[1:])  # ups[i] leads to level i
        self.norm = _make_norm(groups, widths[0], heeds)
        self.last = nn.Conv2d(widths[0], config.channels, 3, padding=1)

    def forward(self, features: Tensor, codes: Tensor) -> Tensor:
        codes = codes.movedim(-1, 1)
        x = self.middle(self.first(features.movedim(-1, 1)), codes)
        for i in reversed(range(len(self.levels))):
            x = self.levels[i](x, codes)
            if i:
                x = self.ups[i - 1](x)
        return self.last(F.silu(self.norm(x, codes)))


# ---- cost: the workload counts codes; a level i steps finer has 4^i times as many positions -----------------------

COMPOSITE_MODULES = (ResNetBlock, AttentionBlock, Downsample, Upsample, ResolutionLevel, MidBlock)
"""Modules whose cost is the sum of their children, counted at the output resolution."""


def _scale_workload(work: Workload, halvings: int) -> Workload:
    """Return the workload of a level that is `halvings` steps finer than the codes."""
    return work.replace(tokens=work.tokens * 4**halvings, attention_pairs=work.attention_pairs * 16**halvings)


def _count_autoencoder_flops(module: ConvEncoder | ConvDecoder, work: Workload) -> int:
    """Count each level at its own resolution, and resampling layers at their output resolution."""
    top = len(module.levels) - 1
    steps = module.downs if isinstance(module, ConvEncoder) else module.ups
    # Encoder steps lead to the next level, decoder steps to i.
    level_shift = 1 if isinstance(module, ConvEncoder) else 0
    outer, inner = (module.first, module.last) if isinstance(module, ConvEncoder) else (module.last, module.first)
    total = (
        cost.count_flops(outer, _scale_workload(work, top))
        + cost.count_flops(inner, work)
        + cost.count_flops(module.middle, work)
    )
    total += sum(cost.count_flops(level, _scale_workload(work, top - i)) for i, level in enumerate(module.levels))
    total += sum(cost.count_flops(step, _scale_workload(work, top - i - level_shift)) for i, step in enumerate(steps))
    heeding = [part for part in module.modules() if isinstance(part, SpatialNorm)]
    return total + sum(cost.count_flops(own, work) for part in heeding for own in (part.scale, part.shift))


@cost.count_flops.register
def _(module: nn.Conv2d, work: Workload) -> int:
    """Count a convolution; `workload.tokens` is the number of output positions."""
    return 2 * module.weight.numel() * work.tokens


@cost.count_flops.register(nn.GroupNorm)
@cost.count_flops.register(SpatialNorm)  # counted at the resolution of the codes, by the encoder or decoder
def _(module: nn.Module, work: Workload) -> int:
    return 0


for _kind in COMPOSITE_MODULES:
    cost.count_flops.register(_kind, cost.sum_child_flops)
for _kind in (ConvEncoder, ConvDecoder):
    cost.count_flops.register(_kind, _count_autoencoder_flops)
for _kind in (*COMPOSITE_MODULES, SpatialNorm, ConvEncoder, ConvDecoder, nn.Conv2d, nn.GroupNorm):
    cost.count_bytes.register(_kind, cost.sum_child_bytes)
