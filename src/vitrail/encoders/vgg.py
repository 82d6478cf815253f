"""VGG16 and AlexNet as frozen feature networks, and LPIPS: the perceptual distance that is learned on top of them.

B pictures, C channels, H, W pixels
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError, ImageError
from vitrail.objectives import perceptual

Name = Literal["vgg16", "alexnet"]
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # ImageNet's mean and deviation for pixels in −1…1


class Conv(NamedTuple):
    channels: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1


class Row(NamedTuple):
    """A network: the window of its pooling, which always moves by two, the stages whose last activation is a feature
    map, and the shortest side that leaves a pixel at the end."""

    pool: int
    minimum: int
    stages: tuple[tuple[Conv | None, ...], ...]  # None: pool


NETWORKS: dict[str, Row] = {
    "vgg16": Row(
        2,
        16,
        (
            (Conv(64), Conv(64)),
            (None, Conv(128), Conv(128)),
            (None, Conv(256), Conv(256), Conv(256)),
            (None, Conv(512), Conv(512), Conv(512)),
            (None, Conv(512), Conv(512), Conv(512)),
        ),
    ),
    "alexnet": Row(
        3,
        31,
        (
            (Conv(64, 11, 4, 2),),
            (None, Conv(192, 5, 1, 2)),
            (None, Conv(384)),
            (Conv(256),),
            (Conv(256),),
        ),
    ),
}


class Trunk(nn.Module):
    """pixels (B, 3, H, W) in −1…1 → five feature maps, from fine to coarse. Its weights are not trained; gradients
    reach the pixels."""

    def __init__(self, name: Name = "vgg16"):
        super().__init__()
        if name not in NETWORKS:
            raise ConfigError(f"no feature network is called {name!r}", f"choose from {', '.join(NETWORKS)}")
        self.name, self.row = name, NETWORKS[name]
        rows = [conv for stage in self.row.stages for conv in stage if conv is not None]
        inputs = [3, *(conv.channels for conv in rows)]
        self.convs = nn.ModuleList([nn.Conv2d(width, *conv) for width, conv in zip(inputs[:-1], rows, strict=True)])
        self.requires_grad_(False)

    @property
    def widths(self) -> list[int]:
        """Channels of each feature map."""
        return [stage[-1].channels for stage in self.row.stages if stage[-1] is not None]

    def forward(self, pixels: Tensor) -> list[Tensor]:
        if pixels.ndim != 4 or pixels.shape[1] != 3 or min(pixels.shape[2:]) < self.row.minimum:
            raise ImageError(
                f"{self.name} cannot read pictures of shape {tuple(pixels.shape)}",
                f"give (B, 3, H, W) of at least {self.row.minimum} × {self.row.minimum} pixels",
            )
        if not pixels.is_floating_point():
            raise ImageError(f"{self.name} reads pixels in −1…1, not {pixels.dtype}", "divide by 127.5, subtract 1")
        x = torch.stack([(pixels[:, c] - SHIFT[c]) / SCALE[c] for c in range(3)], dim=1)
        convs, maps = iter(self.convs), []
        for stage in self.row.stages:
            for conv in stage:
                x = F.max_pool2d(x, self.row.pool, 2) if conv is None else F.relu(next(convs)(x))
            maps.append(x)
        return maps


class LPIPS(nn.Module):
    """Two pictures (B, 3, H, W) in −1…1 → their distances (B,): 0 for equals. `vgg16` is what decoders are trained by,
    `alexnet` the usual measure."""

    def __init__(self, name: Name = "vgg16"):
        super().__init__()
        self.trunk = Trunk(name)
        self.heads = nn.ParameterList([torch.full((width,), 1 / width) for width in self.trunk.widths])
        self.requires_grad_(False)

    @property
    def name(self) -> str:
        return f"LPIPS-{self.trunk.name}"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return perceptual.lpips(self.trunk(x), self.trunk(y), list(self.heads))
