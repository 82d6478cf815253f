"""PatchGAN discriminator of VQGAN: one logit for each patch.

Shapes: B images, C channels, H, W pixels; h, w patches along a side.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config, LayerCount, PositiveInt
from vitrail.errors import ConfigError, ImageError

LEAKY_SLOPE = 0.2  # negative slope of the leaky ReLU
MAX_WIDTH_MULTIPLIER = 8  # largest multiple of the first width


class DiscriminatorConfig(Config):
    """Config of a `Discriminator`. `layers` convolutions halve the resolution; 3 of them give a receptive field of 70 ×
    70.

    `norm` "batch" is VQGAN's. "group" does not mix the images of a batch, so it suits small and uneven batches.
    """

    channels: PositiveInt = 3
    width: PositiveInt = 64
    layers: LayerCount = 3
    norm: Literal["batch", "group", "none"] = "batch"

    def __post_init__(self) -> None:
        if self.norm == "group" and self.width % 16:
            raise ConfigError(f"width {self.width} does not divide into the 32 norm groups", "use 16, 32, 48, …")

    @property
    def min_image_size(self) -> int:
        """Shortest image side that gives at least one logit."""
        return 3 * 2**self.layers


class Discriminator(nn.Module):
    """Map pixels (B, C, H, W) in −1 … 1 to logits (B, 1, h, w), high for real images."""

    def __init__(self, config: DiscriminatorConfig | None = None):
        super().__init__()
        config = config or DiscriminatorConfig()
        self.config = config
        widths = [config.width * min(2**layer, MAX_WIDTH_MULTIPLIER) for layer in range(config.layers + 1)]
        steps = [2] * config.layers + [1]
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for layer, (inputs, width, step) in enumerate(zip([config.channels, *widths], widths, steps, strict=False)):
            norm = "none" if layer == 0 else config.norm
            self.convs.append(nn.Conv2d(inputs, width, 4, step, 1, bias=norm != "batch"))  # batch norm has a bias
            self.norms.append(_NORMS[norm](width))
        self.last = nn.Conv2d(widths[-1], 1, 4, 1, 1)
        self.apply(_init_weights)

    def forward(self, pixels: Tensor) -> Tensor:
        config = self.config
        if pixels.ndim != 4 or pixels.shape[1] != config.channels or min(pixels.shape[2:]) < config.min_image_size:
            raise ImageError(
                f"pixels have shape {tuple(pixels.shape)}",
                f"give (B, {config.channels}, H, W) with sides of at least {config.min_image_size}, or use fewer "
                f"layers",
            )
        x = pixels
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.leaky_relu(norm(conv(x)), LEAKY_SLOPE)
        return self.last(x)


_NORMS = {
    "batch": nn.BatchNorm2d,
    "group": lambda width: nn.GroupNorm(32, width),
    "none": lambda _width: nn.Identity(),
}


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
