"""DaViT, the tower of Florence-2: stages of blocks that attend within windows, then between groups of channels.

B images, C channels, H, W pixels, h × w cells of a stage, N = h·w, D width, G groups
"""

from math import ceil, prod

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import PositiveFloat, PositiveInt
from vitrail.encoders.encoder import EncoderConfig
from vitrail.encoders.sam import RelativePositionAttention, run_in_windows
from vitrail.errors import ConfigError
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, Workload, cost
from vitrail.nn.block import ResidualBranch
from vitrail.nn.mlp import Activation
from vitrail.nn.norms import make_norm
from vitrail.nn.parameters import count_parameter_bytes
from vitrail.registry import ENCODERS, MODELS


class DaViTConfig(EncoderConfig, tag="davit", tag_field="kind"):
    """DaViT settings. Tuples have one entry for each stage.

    image_size   native image size
    widths       channels
    blocks       pairs of a block with windows and one with channel attention
    heads        attention heads within windows
    groups       groups of channels that attend to each other
    kernel_sizes  sides of the convolution before the blocks
    strides      of this convolution
    paddings     of this convolution
    norm_first   whether a norm precedes this convolution, instead of following it
    window_size  side of attention windows in cells
    mlp_ratio    width of the MLPs, as a multiple of the channels
    qkv_bias     whether queries, keys and values have a bias
    """

    image_size: PositiveInt = 768
    widths: tuple[PositiveInt, ...] = (128, 256, 512, 1024)
    blocks: tuple[PositiveInt, ...] = (1, 1, 9, 1)
    heads: tuple[PositiveInt, ...] = (4, 8, 16, 32)
    groups: tuple[PositiveInt, ...] = (4, 8, 16, 32)
    kernel_sizes: tuple[PositiveInt, ...] = (7, 3, 3, 3)
    strides: tuple[PositiveInt, ...] = (4, 2, 2, 2)
    paddings: tuple[int, ...] = (3, 1, 1, 1)
    norm_first: tuple[bool, ...] = (False, True, True, True)
    window_size: PositiveInt = 12
    mlp_ratio: PositiveFloat = 4.0
    activation: Activation = "gelu"
    qkv_bias: bool = True
    eps: float = 1e-5
    channels: PositiveInt = 3

    @property
    def patch_size(self) -> int:
        """Downsampling factor of the last stage."""
        return prod(self.strides)

    @property
    def width(self) -> int:
        return self.widths[-1]

    def __post_init__(self) -> None:
        names = ("blocks", "heads", "groups", "kernel_sizes", "strides", "paddings", "norm_first")
        for name in names:
            if len(getattr(self, name)) != len(self.widths):
                raise ConfigError(
                    f"{name} is {getattr(self, name)} for widths {self.widths}", "give one for each stage"
                )
        for width, groups, kernel, stride, padding in zip(
            self.widths, self.groups, self.kernel_sizes, self.strides, self.paddings, strict=True
        ):
            if width % groups:
                raise ConfigError(f"width {width} does not divide into {groups} groups", "change one of them")
            if not 0 <= kernel - stride <= 2 * padding < kernel:
                raise ConfigError(
                    f"a convolution of {kernel} × {kernel} with stride {stride} and padding {padding} gives another "
                    "grid than the patches",
                    "use a padding of (kernel − stride) / 2 or more, below kernel / 2",
                )
        for stage in range(len(self.widths)):
            self.block_config(stage)  # raises if the heads do not divide the width

    def block_config(self, stage: int) -> BlockConfig:
        width = self.widths[stage]
        return BlockConfig(
            width=width,
            attention=AttentionConfig(heads=self.heads[stage], bias="all" if self.qkv_bias else "out"),
            mlp=PlainMLPConfig(intermediate_size=int(width * self.mlp_ratio), activation=self.activation),
            eps=self.eps,
        )


class ConvEmbedding(nn.Module):
    """Convolution between two stages, with a norm before or after it: (B, h, w, C) → (B, h′, w′, D)."""

    def __init__(self, config: DaViTConfig, stage: int):
        super().__init__()
        before, width = (config.channels, *config.widths)[stage : stage + 2]
        self.norm_first = config.norm_first[stage]
        self.conv = nn.Conv2d(
            before, width, config.kernel_sizes[stage], config.strides[stage], padding=config.paddings[stage]
        )
        self.norm = make_norm("layer", before if self.norm_first else width, config.eps)

    def forward(self, x: Tensor) -> Tensor:
        return convolve(self.conv, self.norm(x)) if self.norm_first else self.norm(convolve(self.conv, x))


class ChannelAttention(nn.Module):
    """Attention of the channels of a group to each other: the cells are their features. (B, h, w, D) → same."""

    def __init__(self, width: int, groups: int, bias: bool):
        super().__init__()
        self.groups = groups
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x.flatten(1, 2)).unflatten(-1, (3, self.groups, -1))  # (B, N, 3, G, D / G)
        q, k, v = qkv.permute(2, 0, 3, 4, 1)  # (B, G, D / G, N) each
        attended = F.scaled_dot_product_attention(q, k, v)  # the scale is 1 / √N
        return self.out(attended.flatten(1, 2).mT).view_as(x)


class DaViTBlock(nn.Module):
    """Depthwise convolution and attention, then depthwise convolution and MLP. Each is added to its input.

    `window_size` is the side of the windows that the attention runs in; 0 for the whole map.
    """

    def __init__(self, config: BlockConfig, attention: nn.Module, window_size: int):
        super().__init__()
        width = config.width
        self.window_size, self.attention = window_size, attention
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, groups=width) for _ in range(2))
        self.norm = make_norm(config.norm, width, config.eps)
        self.mlp = ResidualBranch(config, "mlp")

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, w, D) → (B, h, w, D)"""
        x = x + convolve(self.conv1, x)
        y = self.norm(x)
        x = x + (run_in_windows(y, self.window_size, self.attention) if self.window_size else self.attention(y))
        return self.mlp(x + convolve(self.conv2, x))


def convolve(conv: nn.Module, x: Tensor) -> Tensor:
    """Apply a convolution to a map whose channels are last, (B, h, w, C) → (B, h′, w′, D)."""
    return conv(x.movedim(-1, 1)).movedim(1, -1)


@ENCODERS.register("davit")
@MODELS.register("davit")
class DaViT(nn.Module):
    """DaViT: pixels (B, C, H, W) → features (B, N, D) of the last stage, row by row."""

    Config = DaViTConfig

    def __init__(self, config: DaViTConfig):
        super().__init__()
        self.config = config
        stages = range(len(config.widths))
        self.convs = nn.ModuleList([ConvEmbedding(config, stage) for stage in stages])
        self.stages = nn.ModuleList([nn.ModuleList(self._make_blocks(stage)) for stage in stages])

    def _make_blocks(self, stage: int) -> list[DaViTBlock]:
        config, block = self.config, self.config.block_config(stage)
        blocks = []
        for _ in range(config.blocks[stage]):
            blocks += [
                DaViTBlock(block, RelativePositionAttention(block, 0), config.window_size),
                DaViTBlock(block, ChannelAttention(block.width, config.groups[stage], config.qkv_bias), 0),
            ]
        return blocks

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels.movedim(1, -1)  # (B, H, W, C)
        for conv, blocks in zip(self.convs, self.stages, strict=True):
            x = conv(x)
            for block in blocks:  # pyrefly: ignore
                x = block(x)
        return x.flatten(1, 2)


# ---- costs ------------------------------------------------------------------------------------------------------


@cost.count_flops.register
def _(module: DaViT, work: Workload) -> int:
    """Count square images with `work.tokens` cells of the last stage in all."""
    config, total = module.config, 0
    side = round((work.tokens / work.sequences) ** 0.5)  # of a map
    for stage, conv in reversed(list(enumerate(module.convs))):
        assert isinstance(conv, ConvEmbedding)
        cells, width, S = work.sequences * side**2, config.widths[stage], config.window_size
        inside = Workload.full_attention(S**2, work.sequences * ceil(side / S) ** 2)
        each = Workload.full_attention(side**2, work.sequences)
        total += 2 * conv.conv.weight.numel() * cells
        for block in module.stages[stage]:  # pyrefly: ignore
            attention, mlp = block.attention, 2 * 2 * 9 * width * cells + cost.count_flops(block.mlp, each)
            used = inside if block.window_size else each
            total += mlp + cost.count_flops(attention.qkv, used) + cost.count_flops(attention.out, used)
            pairs = used.attention_pairs if block.window_size else cells * width // config.groups[stage]
            total += 2 * 2 * pairs * width
        side *= config.strides[stage]
    return total


@cost.count_bytes.register
def _(module: DaViT, work: Workload) -> cost.MemoryBytes:
    weights = count_parameter_bytes(module)
    return cost.MemoryBytes(weights=weights, read=weights)
