"""Convolutional tower: a pre-activation ResNet for small images and small datasets.

B batch, C channels, H, W pixels, D width of the last feature map
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import PositiveInt
from vitrail.encoders.encoder import EncoderConfig
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import Workload, cost
from vitrail.nn.parameters import count_parameter_bytes
from vitrail.registry import ENCODERS, MODELS


class ConvTowerConfig(EncoderConfig, tag="conv", tag_field="kind"):
    """Convolutional tower settings.

    image_size   native image size
    widths       channels of each stage; every stage after the first halves the resolution
    blocks       residual blocks of each stage
    stem_stride  stride of the first convolution
    norm_groups  groups of GroupNorm
    head_width   width of a linear layer with bias for the pooled vector; 0 for none
    """

    image_size: int = 32
    widths: tuple[PositiveInt, ...] = (64, 128, 256, 512)
    blocks: tuple[PositiveInt, ...] = (2, 2, 2, 2)
    stem_stride: PositiveInt = 1
    norm_groups: PositiveInt = 16
    channels: int = 3
    head_width: int = 0

    @property
    def patch_size(self) -> int:
        """Downsampling factor of the last feature map."""
        return self.stem_stride * 2 ** (len(self.widths) - 1)

    @property
    def width(self) -> int:
        return self.widths[-1]

    @property
    def pooled_width(self) -> int:
        """Width of the output of `forward_pooled`."""
        return self.head_width or self.widths[-1]

    def __post_init__(self) -> None:
        if not self.widths or len(self.widths) != len(self.blocks):
            raise ConfigError(
                f"stages have widths {self.widths} and blocks {self.blocks}", "give both for each of at least one stage"
            )
        if any(width % self.norm_groups for width in self.widths):
            raise ConfigError(
                f"norm_groups {self.norm_groups} does not divide widths {self.widths}", "change one of them"
            )
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"image_size {self.image_size} is not divisible by {self.patch_size}", "change image_size"
            )


class ConvBlock(nn.Module):
    """Pre-activation block: norm, ReLU, 3 × 3 convolution, twice. The second convolution starts at 0."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, groups: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, in_channels), nn.GroupNorm(groups, out_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.shortcut = (
            nn.Conv2d(in_channels, out_channels, 1, bias=False) if in_channels != out_channels else nn.Identity()
        )
        self.stride = stride
        nn.init.kaiming_normal_(self.conv1.weight, nonlinearity="relu")
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        skip = x if self.stride == 1 else F.avg_pool2d(y, self.stride)
        return self.shortcut(skip) + self.conv2(F.relu(self.norm2(self.conv1(y))))


@ENCODERS.register("conv")
@MODELS.register("conv")
class ConvTower(nn.Module):
    """Convolutional tower: pixels (B, C, H, W) → features (B, h·w, D), in the format of a ViT."""

    Config = ConvTowerConfig

    def __init__(self, config: ConvTowerConfig):
        super().__init__()
        self.config = config
        before = config.widths[0]
        self.stem = nn.Conv2d(config.channels, before, 3, config.stem_stride, padding=1, bias=False)
        stages = []
        for i, (width, blocks) in enumerate(zip(config.widths, config.blocks, strict=True)):
            for n in range(blocks):
                stages.append(ConvBlock(before, width, 2 if i and n == 0 else 1, config.norm_groups))
                before = width
        self.blocks = nn.ModuleList(stages)
        self.norm = nn.GroupNorm(config.norm_groups, before)
        self.head = nn.Linear(before, config.head_width) if config.head_width else None

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the features of all cells, (B, h·w, D)."""
        return self._feature_map(pixels).flatten(2).mT

    def forward_pooled(self, pixels: Tensor) -> Tensor:
        """Return one vector per image, (B, D) or (B, head_width): the mean over the feature map."""
        pooled = self._feature_map(pixels).mean((2, 3))
        return pooled if self.head is None else self.head(pooled)

    def _feature_map(self, pixels: Tensor) -> Tensor:
        C, P = self.config.channels, self.config.patch_size
        if pixels.ndim != 4 or pixels.shape[1] != C or pixels.shape[2] % P or pixels.shape[3] % P:
            raise ImageError(
                f"the tower expects (B, {C}, H, W) with H and W divisible by {P}, not {tuple(pixels.shape)}",
                "resize the images",
            )
        x = pixels.to(self.stem.weight.dtype, memory_format=torch.channels_last)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return F.relu(self.norm(x))

    def workload(self, batch_size: int = 1, height: int | None = None, width: int | None = None) -> Workload:
        """Return the workload of a batch. Cells of the last feature map count as tokens."""
        P, native = self.config.patch_size, self.config.image_size
        cells = ((height or native) // P) * ((width or height or native) // P)
        return Workload(tokens=batch_size * cells, attention_pairs=0, sequences=batch_size)


@cost.count_flops.register
def _(module: ConvTower, work: Workload) -> int:
    """FLOPs of `model(pixels)`: a convolution applies its kernel once per position."""
    cells = work.tokens * 4 ** (len(module.config.widths) - 1)  # of the first feature map
    total = module.stem.weight.numel() * cells
    for block in module.blocks:
        assert isinstance(block, ConvBlock)
        if block.stride > 1:
            cells //= 4
        total += sum(c.weight.numel() for c in block.modules() if isinstance(c, nn.Conv2d)) * cells
    return 2 * total


@cost.count_bytes.register
def _(module: ConvTower, work: Workload) -> cost.MemoryBytes:
    weights = count_parameter_bytes(module)
    return cost.MemoryBytes(weights=weights, read=weights - count_parameter_bytes(module.head))
