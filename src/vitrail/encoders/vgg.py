"""Frozen VGG16 and AlexNet trunks, and LPIPS on top of them.

B images, C channels, H, W pixels
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError, ImageError
from vitrail.objectives import perceptual_loss

TrunkName = Literal["vgg16", "alexnet"]
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # ImageNet mean and std for pixels in −1…1


class ConvSpec(NamedTuple):
    """One convolution."""

    channels: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1


class TrunkSpec(NamedTuple):
    """Architecture of a trunk: pooling window (stride 2), smallest image size, and stages.

    The last activation of each stage is a feature map.
    """

    pool_size: int
    min_image_size: int
    stages: tuple[tuple[ConvSpec | None, ...], ...]  # None: pool


TRUNK_SPECS: dict[str, TrunkSpec] = {
    "vgg16": TrunkSpec(
        2,
        16,
        (
            (ConvSpec(64), ConvSpec(64)),
            (None, ConvSpec(128), ConvSpec(128)),
            (None, ConvSpec(256), ConvSpec(256), ConvSpec(256)),
            (None, ConvSpec(512), ConvSpec(512), ConvSpec(512)),
            (None, ConvSpec(512), ConvSpec(512), ConvSpec(512)),
        ),
    ),
    "alexnet": TrunkSpec(
        3,
        31,
        (
            (ConvSpec(64, 11, 4, 2),),
            (None, ConvSpec(192, 5, 1, 2)),
            (None, ConvSpec(384)),
            (ConvSpec(256),),
            (ConvSpec(256),),
        ),
    ),
}


class FeatureTrunk(nn.Module):
    """Frozen feature network: pixels (B, 3, H, W) in −1…1 → five feature maps, from fine to coarse.

    Gradients reach the pixels.
    """

    def __init__(self, name: TrunkName = "vgg16"):
        super().__init__()
        if name not in TRUNK_SPECS:
            raise ConfigError(f"unknown feature network {name!r}", f"choose from {', '.join(TRUNK_SPECS)}")
        self.name, self.spec = name, TRUNK_SPECS[name]
        rows = [conv for stage in self.spec.stages for conv in stage if conv is not None]
        inputs = [3, *(conv.channels for conv in rows)]
        self.convs = nn.ModuleList([nn.Conv2d(width, *conv) for width, conv in zip(inputs[:-1], rows, strict=True)])
        self.requires_grad_(False)

    @property
    def widths(self) -> list[int]:
        """Channels of each feature map."""
        return [stage[-1].channels for stage in self.spec.stages if stage[-1] is not None]

    def forward(self, pixels: Tensor) -> list[Tensor]:
        if pixels.ndim != 4 or pixels.shape[1] != 3 or min(pixels.shape[2:]) < self.spec.min_image_size:
            raise ImageError(
                f"pixels of {self.name} have shape {tuple(pixels.shape)}",
                f"pass (B, 3, H, W) with at least {self.spec.min_image_size} × {self.spec.min_image_size} pixels",
            )
        if not pixels.is_floating_point():
            raise ImageError(f"{self.name} needs pixels in −1…1, not {pixels.dtype}", "divide by 127.5, subtract 1")
        x = torch.stack([(pixels[:, c] - SHIFT[c]) / SCALE[c] for c in range(3)], dim=1)
        convs, maps = iter(self.convs), []
        for stage in self.spec.stages:
            for conv in stage:
                x = F.max_pool2d(x, self.spec.pool_size, 2) if conv is None else F.relu(next(convs)(x))
            maps.append(x)
        return maps


class LPIPS(nn.Module):
    """LPIPS distance of images (B, 3, H, W) in −1…1, (B,). Equal images have distance 0.

    `vgg16` is usual for training, `alexnet` for evaluation.
    """

    def __init__(self, name: TrunkName = "vgg16"):
        super().__init__()
        self.trunk = FeatureTrunk(name)
        self.heads = nn.ParameterList([torch.full((width,), 1 / width) for width in self.trunk.widths])
        self.requires_grad_(False)

    @property
    def name(self) -> str:
        return f"LPIPS-{self.trunk.name}"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return perceptual_loss.lpips_distance(self.trunk(x), self.trunk(y), list(self.heads))
