"""The discriminator of VQGAN (PatchGAN): it judges patches, not pictures.

B pictures, C channels, H, W pixels; h, w places that are judged
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ConfigError, ImageError

SLOPE = 0.2  # of the leaky ReLU
WIDEST = 8  # times the first width


class DiscriminatorConfig(Config):
    """`layers` convolutions halve the grid; with 3 of them each judgement is of 70 × 70 pixels.

    `norm` "batch" is VQGAN's. "group" does not mix the pictures of a batch, so it suits small and uneven ones.
    """

    channels: int = 3
    width: int = 64
    layers: int = 3
    norm: Literal["batch", "group", "none"] = "batch"

    def __post_init__(self) -> None:
        if min(self.channels, self.width, self.layers) < 1:
            raise ConfigError(f"a discriminator of {self.channels} channels, width {self.width}, {self.layers} layers")
        if self.norm == "group" and self.width % 16:
            raise ConfigError(f"width {self.width} does not split into the 32 groups of its norms", "use 16, 32, 48, …")

    @property
    def minimum(self) -> int:
        """The shortest side that leaves one judgement."""
        return 3 * 2**self.layers


class Discriminator(nn.Module):
    """pixels (B, C, H, W) in −1…1 → logits (B, 1, h, w), high for what looks real."""

    def __init__(self, config: DiscriminatorConfig | None = None):
        super().__init__()
        self.config = config = config or DiscriminatorConfig()
        widths = [config.width * min(2**layer, WIDEST) for layer in range(config.layers + 1)]
        steps = [2] * config.layers + [1]
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for layer, (inputs, width, step) in enumerate(zip([config.channels, *widths], widths, steps, strict=False)):
            norm = "none" if layer == 0 else config.norm
            self.convs.append(nn.Conv2d(inputs, width, 4, step, 1, bias=norm != "batch"))  # that norm has its own
            self.norms.append(_NORMS[norm](width))
        self.last = nn.Conv2d(widths[-1], 1, 4, 1, 1)
        self.apply(_start)

    def forward(self, pixels: Tensor) -> Tensor:
        config = self.config
        if pixels.ndim != 4 or pixels.shape[1] != config.channels or min(pixels.shape[2:]) < config.minimum:
            raise ImageError(
                f"the discriminator cannot judge pictures of shape {tuple(pixels.shape)}",
                f"give (B, {config.channels}, H, W) of at least {config.minimum} a side, or use fewer layers",
            )
        x = pixels
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.leaky_relu(norm(conv(x)), SLOPE)
        return self.last(x)


_NORMS = {
    "batch": nn.BatchNorm2d,
    "group": lambda width: nn.GroupNorm(32, width),
    "none": lambda width: nn.Identity(),
}


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
