"""The convolutional pair of VQGAN, MoVQ, SD-VAE and GAIA-1: ResNet levels, each half as wide and high as the last.

The layers are those of diffusers' AutoencoderKL and VQModel, so that their weights fit: GroupNorm and SiLU before every
convolution, attention in the middle, strided convolutions down, nearest neighbours and a convolution up.

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
    modulated  whether the decoder's norms are scaled and shifted by the codes at their place (MoVQ), so that a code
               is still heard where many layers lie between
    size       height and width of the pictures it was made for; others that `factor` divides will do
    """

    widths: tuple[int, ...] = (128, 256, 512, 512)
    layers: int = 2
    latent: int = 4
    attention: bool = True
    levels: tuple[int, ...] = ()
    groups: int = 32
    modulated: bool = False
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


class Norm(nn.GroupNorm):
    """A norm that heeds no codes."""

    def forward(self, input: Tensor, codes: Tensor | None = None) -> Tensor:
        return super().forward(input)


class Modulated(nn.Module):
    """A norm whose scale and shift are read from the codes (B, d, h, w) at its place."""

    def __init__(self, groups: int, width: int, codes: int):
        super().__init__()
        self.norm = nn.GroupNorm(groups, width, EPS)
        self.scale = nn.Conv2d(codes, width, 1)
        self.shift = nn.Conv2d(codes, width, 1)

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        # One product a code, and then nearest neighbours: a product at every place would give the same.
        scale, shift = (F.interpolate(part(codes), x.shape[-2:]) for part in (self.scale, self.shift))
        return self.norm(x) * scale + shift


def _norm(groups: int, width: int, codes: int) -> nn.Module:
    """`codes` is the width of the codes that it heeds, 0 for none."""
    return Modulated(groups, width, codes) if codes else Norm(groups, width, EPS)


class ResNet(nn.Module):
    """x + conv(conv(x)), each behind a norm and SiLU."""

    def __init__(self, width: int, out: int, groups: int, codes: int = 0):
        super().__init__()
        self.norm1 = _norm(groups, width, codes)
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.norm2 = _norm(groups, out, codes)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Identity() if width == out else nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x, codes)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y, codes)))


class Around(nn.Module):
    """x + attention(norm(x)) between all places of a picture, with one head."""

    def __init__(self, width: int, groups: int, codes: int = 0):
        super().__init__()
        self.norm = _norm(groups, width, codes)
        self.op = Attention(width, AttentionConfig(heads=1, bias="all"))

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        h, w = x.shape[-2:]
        y = self.op(self.norm(x, codes).flatten(2).mT, Plan())  # (B, h·w, C)
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


class Through(nn.Identity):
    """What is told of the codes, and does nothing."""

    def forward(self, input: Tensor, codes: Tensor | None = None) -> Tensor:
        return input


class Blocks(nn.ModuleList):
    """One behind the other, each told of the codes."""

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        for block in self:
            x = block(x, codes)
        return x


class Level(Blocks):
    """ResNet blocks, each with attention behind it where `attention` says so."""

    def __init__(self, width: int, out: int, count: int, groups: int, attention: bool, codes: int = 0):
        parts: list[nn.Module] = []
        for i in range(count):
            parts.append(ResNet(out if i else width, out, groups, codes))
            if attention:
                parts.append(Around(out, groups, codes))
        super().__init__(parts)


class Middle(Blocks):
    """ResNet, attention, ResNet."""

    def __init__(self, width: int, groups: int, attention: bool, codes: int = 0):
        inner = Around(width, groups, codes) if attention else Through()
        super().__init__([ResNet(width, width, groups, codes), inner, ResNet(width, width, groups, codes)])


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
    """features (B, h, w, latent) → pixels (B, C, H, W). Levels stand as in the encoder, the finest first. If it is
    modulated it is also given the codes (B, h, w, d) that the features were made of; `d` is their width."""

    def __init__(self, config: ConvPairConfig, d: int):
        super().__init__()
        self.config, widths, groups = config, config.widths, config.groups
        heeds = d if config.modulated else 0
        self.first = nn.Conv2d(config.latent, widths[-1], 3, padding=1)
        self.middle = Middle(widths[-1], groups, config.attention, heeds)
        self.levels = nn.ModuleList(
            Level(widths[min(i + 1, len(widths) - 1)], out, config.layers + 1, groups, i in config.levels, heeds)
            for i, out in enumerate(widths)
        )
        self.ups = nn.ModuleList(Up(out) for out in widths[1:])  # the one at i leads to level i
        self.norm = _norm(groups, widths[0], heeds)
        self.last = nn.Conv2d(widths[0], config.channels, 3, padding=1)

    def forward(self, features: Tensor, codes: Tensor) -> Tensor:
        codes = codes.movedim(-1, 1)
        x = self.middle(self.first(features.movedim(-1, 1)), codes)
        for i in reversed(range(len(self.levels))):
            x = self.levels[i](x, codes)
            if i:
                x = self.ups[i - 1](x)
        return self.last(F.silu(self.norm(x, codes)))


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
    total += sum(cost.flops(step, _finer(work, top - i - gives)) for i, step in enumerate(steps))
    heeding = [part for part in module.modules() if isinstance(part, Modulated)]
    return total + sum(cost.flops(own, work) for part in heeding for own in (part.scale, part.shift))


@cost.flops.register
def _(module: nn.Conv2d, work: Work) -> int:
    """`work.tokens` are the places that come out."""
    return 2 * module.weight.numel() * work.tokens


@cost.flops.register(nn.GroupNorm)
@cost.flops.register(Modulated)  # its products are made at the codes' resolution: see `_pair_flops`
def _(module: nn.Module, work: Work) -> int:
    return 0


def _sum_flops(module: nn.Module, work: Work) -> int:
    return sum(cost.flops(part, work) for part in module.children())


for _kind in PARTS:
    cost.flops.register(_kind, _sum_flops)
for _kind in (ConvEncoder, ConvDecoder):
    cost.flops.register(_kind, _pair_flops)
for _kind in (*PARTS, Modulated, ConvEncoder, ConvDecoder, nn.Conv2d, nn.GroupNorm):
    cost.bytes.register(_kind, cost.sum_bytes)
