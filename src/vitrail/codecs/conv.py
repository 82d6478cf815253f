"""The convolutional pair of VQGAN, SD-VAE and GAIA-1: ResNet levels, each half as wide and high as the one before.

The layers are those of diffusers' AutoencoderKL, so that its weights fit: GroupNorm and SiLU before every convolution,
attention in the middle, strided convolutions down, nearest neighbours and a convolution up.

B batch, C channels, H, W pixels, h, w codes along a side, E width of the features
"""

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn import Attention, AttentionConfig, Plan, Work, cost

EPS = 1e-6


class ConvPairConfig(Config, tag="conv", tag_field="kind"):
    """`widths` are the channels of each level from the finest to the coarsest; every level but the last halves the
    picture. `layers` ResNet blocks make up a level of the encoder, one more a level of the decoder.

    latent     channels between encoder and quantizer, and between quantizer and decoder
    attention  attention in the middle, between two ResNet blocks
    levels     which levels have attention behind each of their ResNet blocks too (VQGAN: the coarsest)
    groups     of the norms
    size       height and width of the pictures it was made for; others that `factor` divides will do
    """

    widths: tuple[int, ...] = (128, 256, 512, 512)
    layers: int = 2
    latent: int = 4
    attention: bool = True
    levels: tuple[int, ...] = ()
    groups: int = 32
    channels: int = 3
    size: tuple[int, int] = (256, 256)

    @property
    def factor(self) -> int:
        """Pixels along a side of one code."""
        return 2 ** (len(self.widths) - 1)

    @property
    def reads(self) -> int:
        """Channels that the decoder reads."""
        return self.latent

    def __post_init__(self) -> None:
        if not self.widths or self.layers < 1 or min(*self.widths, self.latent, self.groups, self.channels) < 1:
            raise ConfigError(f"a codec of widths {self.widths} and {self.layers} layers", "give at least one of each")
        odd = [width for width in self.widths if width % self.groups]
        if odd:
            raise ConfigError(f"a level of {odd[0]} channels does not divide into {self.groups} groups", "change one")
        if any(not 0 <= level < len(self.widths) for level in self.levels):
            raise ConfigError(f"attention at levels {self.levels} of {len(self.widths)}", "they count from 0")
        if any(side < 1 or side % self.factor for side in self.size):
            raise ConfigError(f"size {self.size} is no multiple of {self.factor}", "give sides that it divides")


class ResNet(nn.Module):
    """x + conv(conv(x)), each behind a norm and SiLU."""

    def __init__(self, width: int, out: int, groups: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, width, EPS)
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, out, EPS)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Identity() if width == out else nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class Around(nn.Module):
    """x + attention(norm(x)) between all places of a picture, with one head."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.norm = nn.GroupNorm(groups, width, EPS)
        self.op = Attention(width, AttentionConfig(heads=1, bias="all"))

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        y = self.op(self.norm(x).flatten(2).mT, Plan())  # (B, h·w, C)
        return x + y.mT.unflatten(-1, (h, w))


class Down(nn.Module):
    """Half as high and wide. The padding is at the right and the bottom alone."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Up(nn.Module):
    """Twice as high and wide."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Sequential):
    """ResNet blocks, each with attention behind it where `attention` says so."""

    def __init__(self, width: int, out: int, count: int, groups: int, attention: bool):
        parts: list[nn.Module] = []
        for i in range(count):
            parts.append(ResNet(out if i else width, out, groups))
            if attention:
                parts.append(Around(out, groups))
        super().__init__(*parts)


class Middle(nn.Sequential):
    """ResNet, attention, ResNet."""

    def __init__(self, width: int, groups: int, attention: bool):
        inner = Around(width, groups) if attention else nn.Identity()
        super().__init__(ResNet(width, width, groups), inner, ResNet(width, width, groups))


class ConvEncoder(nn.Module):
    """pixels (B, C, H, W) → features (B, h, w, E)"""

    def __init__(self, config: ConvPairConfig, width: int):
        super().__init__()
        self.config, widths, groups = config, config.widths, config.groups
        self.width = width
        self.first = nn.Conv2d(config.channels, widths[0], 3, padding=1)
        self.levels = nn.ModuleList(
            Level(widths[max(i - 1, 0)], out, config.layers, groups, i in config.levels) for i, out in enumerate(widths)
        )
        self.downs = nn.ModuleList(Down(out) for out in widths[:-1])
        self.middle = Middle(widths[-1], groups, config.attention)
        self.norm = nn.GroupNorm(groups, widths[-1], EPS)
        self.last = nn.Conv2d(widths[-1], width, 3, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.first(pixels)
        for i, level in enumerate(self.levels):
            x = level(x)
            if i < len(self.downs):
                x = self.downs[i](x)
        return self.last(F.silu(self.norm(self.middle(x)))).movedim(1, -1)


class ConvDecoder(nn.Module):
    """codes (B, h, w, latent) → pixels (B, C, H, W). Levels stand as in the encoder, the finest first."""

    def __init__(self, config: ConvPairConfig):
        super().__init__()
        self.config, widths, groups = config, config.widths, config.groups
        self.first = nn.Conv2d(config.latent, widths[-1], 3, padding=1)
        self.middle = Middle(widths[-1], groups, config.attention)
        self.levels = nn.ModuleList(
            Level(widths[min(i + 1, len(widths) - 1)], out, config.layers + 1, groups, i in config.levels)
            for i, out in enumerate(widths)
        )
        self.ups = nn.ModuleList(Up(out) for out in widths[1:])  # the one at i leads to level i
        self.norm = nn.GroupNorm(groups, widths[0], EPS)
        self.last = nn.Conv2d(widths[0], config.channels, 3, padding=1)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.middle(self.first(codes.movedim(-1, 1)))
        for i in reversed(range(len(self.levels))):
            x = self.levels[i](x)
            if i:
                x = self.ups[i - 1](x)
        return self.last(F.silu(self.norm(x)))


# ---- costs: `work` is that of the codes; a level i above them has 4^i as many places ------------------------------

PARTS = (ResNet, Around, Down, Up, Level, Middle)
"""Kinds that cost what their parts cost, each on as many places as it gives."""


def _finer(work: Work, halvings: int) -> Work:
    """The work of a level that is `halvings` times finer than the codes."""
    return work.with_(tokens=work.tokens * 4**halvings, pairs=work.pairs * 16**halvings)


def _pair_flops(module: ConvEncoder | ConvDecoder, work: Work) -> int:
    """Every level at its own resolution; what leads to a level is counted at the resolution it gives."""
    top = len(module.levels) - 1
    steps = module.downs if isinstance(module, ConvEncoder) else module.ups
    gives = 1 if isinstance(module, ConvEncoder) else 0  # the level a step leads to: behind it, or before
    outer, inner = (module.first, module.last) if isinstance(module, ConvEncoder) else (module.last, module.first)
    total = cost.flops(outer, _finer(work, top)) + cost.flops(inner, work) + cost.flops(module.middle, work)
    total += sum(cost.flops(level, _finer(work, top - i)) for i, level in enumerate(module.levels))
    return total + sum(cost.flops(step, _finer(work, top - i - gives)) for i, step in enumerate(steps))


@cost.flops.register
def _(module: nn.Conv2d, work: Work) -> int:
    """`work.tokens` are the places that come out."""
    return 2 * module.weight.numel() * work.tokens


@cost.flops.register
def _(module: nn.GroupNorm, work: Work) -> int:
    return 0


def _sum_flops(module: nn.Module, work: Work) -> int:
    return sum(cost.flops(part, work) for part in module.children())


for _kind in PARTS:
    cost.flops.register(_kind, _sum_flops)
for _kind in (ConvEncoder, ConvDecoder):
    cost.flops.register(_kind, _pair_flops)
for _kind in (*PARTS, ConvEncoder, ConvDecoder, nn.Conv2d, nn.GroupNorm):
    cost.bytes.register(_kind, cost.sum_bytes)
