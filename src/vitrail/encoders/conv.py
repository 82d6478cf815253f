"""A convolutional tower: residual blocks on ever coarser maps, for small pictures and few of them.

B batch, C channels, H, W pixels, D width of the last map
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import Work, cost
from vitrail.nn.learned import weigh


class ConvConfig(Config, tag="conv", tag_field="kind"):
    """
    image   side of the pictures it was made for
    widths  channels of each stage; every stage after the first halves the map
    blocks  residual blocks of each stage
    stem    stride of the first convolution
    groups  of channels that are normalised together
    head    width of a linear layer, with bias, for the pooled vector; 0 for none
    """

    image: int = 32
    widths: tuple[int, ...] = (64, 128, 256, 512)
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    stem: int = 1
    groups: int = 16
    channels: int = 3
    head: int = 0

    @property
    def patch(self) -> int:
        """Pixels along a side that one cell of the last map stands for."""
        return self.stem * 2 ** (len(self.widths) - 1)

    @property
    def side(self) -> int:
        """Cells along a side of the last map."""
        return self.image // self.patch

    @property
    def pooled(self) -> int:
        """Width of what `pool` gives."""
        return self.head or self.widths[-1]

    def __post_init__(self) -> None:
        if not self.widths or len(self.widths) != len(self.blocks) or min(*self.widths, *self.blocks, self.stem) < 1:
            raise ConfigError(
                f"stages of widths {self.widths} with {self.blocks} blocks", "give each a width and at least one block"
            )
        if self.groups < 1 or any(width % self.groups for width in self.widths):
            raise ConfigError(f"{self.groups} groups do not divide widths {self.widths}", "change groups or widths")
        if self.image % self.patch:
            raise ConfigError(f"a map cannot be halved from {self.image} pixels {self.patch}-fold", "change image")


class ConvBlock(nn.Module):
    """Norm, ReLU, 3 × 3, twice; the second convolution starts at 0, so that a block starts as its shortcut."""

    def __init__(self, before: int, after: int, stride: int, groups: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, before), nn.GroupNorm(groups, after)
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(before, after, 1, bias=False) if before != after else nn.Identity()
        self.stride = stride
        nn.init.kaiming_normal_(self.conv1.weight, nonlinearity="relu")
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        short = x if self.stride == 1 else F.avg_pool2d(y, self.stride)
        return self.shortcut(short) + self.conv2(F.relu(self.norm2(self.conv1(y))))


class Conv(nn.Module):
    """pixels (B, C, H, W) → features of the cells (B, h·w, D), as a ViT gives those of patches."""

    def __init__(self, config: ConvConfig):
        super().__init__()
        self.config = config
        before = config.widths[0]
        self.stem = nn.Conv2d(config.channels, before, 3, config.stem, padding=1, bias=False)
        stages = []
        for i, (width, blocks) in enumerate(zip(config.widths, config.blocks, strict=True)):
            for n in range(blocks):
                stages.append(ConvBlock(before, width, 2 if i and n == 0 else 1, config.groups))
                before = width
        self.blocks = nn.ModuleList(stages)
        self.norm = nn.GroupNorm(config.groups, before)
        self.head = nn.Linear(before, config.head) if config.head else None

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, h·w, D)"""
        return self._map(pixels).flatten(2).mT

    def pool(self, pixels: Tensor) -> Tensor:
        """One vector a picture, (B, D) or (B, head): the mean over the map."""
        pooled = self._map(pixels).mean((2, 3))
        return pooled if self.head is None else self.head(pooled)

    def _map(self, pixels: Tensor) -> Tensor:
        C, P = self.config.channels, self.config.patch
        if pixels.ndim != 4 or pixels.shape[1] != C or pixels.shape[2] % P or pixels.shape[3] % P:
            raise ImageError(
                f"the tower reads (B, {C}, H, W) with sides that {P} divides, not {tuple(pixels.shape)}",
                "resize the pictures",
            )
        x = pixels.to(self.stem.weight.dtype, memory_format=torch.channels_last)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return F.relu(self.norm(x))

    def work(self, batch: int = 1, height: int | None = None, width: int | None = None) -> Work:
        """What `cost` needs to know of so many pictures: cells of the last map stand for tokens."""
        P, native = self.config.patch, self.config.image
        cells = ((height or native) // P) * ((width or height or native) // P)
        return Work(tokens=batch * cells, pairs=0, rows=batch)


@cost.flops.register
def _(module: Conv, work: Work) -> int:
    """Of `model(pixels)`. A convolution multiplies its kernel once at every place of its map."""
    fine = work.tokens * 4 ** (len(module.config.widths) - 1)  # cells of the first map
    total = module.stem.weight.numel() * fine
    for block in module.blocks:
        assert isinstance(block, ConvBlock)
        if block.stride > 1:
            fine //= 4
        total += sum(c.weight.numel() for c in block.modules() if isinstance(c, nn.Conv2d)) * fine
    return 2 * total


@cost.bytes.register
def _(module: Conv, work: Work) -> cost.Bytes:
    weights = weigh(module)
    return cost.Bytes(weights=weights, read=weights - weigh(module.head))
