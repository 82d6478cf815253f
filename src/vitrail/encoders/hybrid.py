"""Two towers at two resolutions, joined place by place (DeepSeek-VL: SigLIP at 384 pixels, Segment Anything at 1,024).

B batch, C channels, S side of the pictures, h, w patches of the fine tower, G the width it gives, N patches of the
coarse one, D its width
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.sam import SAM, Neck, SAMConfig
from vitrail.encoders.towers import TowerConfig, normalized, spared
from vitrail.encoders.vit import ViT
from vitrail.errors import ConfigError
from vitrail.nn import Work, cost
from vitrail.nn.learned import weigh
from vitrail.processing.fit import resized


class HybridConfig(Config, tag="hybrid", tag_field="kind"):
    """
    low        the coarse tower, at whose places features are read, with its mean and deviation
    high       the fine one, which gets the pictures as they come
    mean, std  of the fine one's pixels
    resample   how the coarse one's pictures are made of them
    """

    low: TowerConfig
    high: SAMConfig
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    resample: Literal["bilinear", "bicubic"] = "bilinear"

    @property
    def fine(self) -> int:
        """Width of the fine tower's features at a place."""
        return 4 * self.high.gives

    @property
    def width(self) -> int:
        return self.fine + self.low.vit.block.width

    @property
    def image(self) -> int:
        """Side of the pictures."""
        return self.high.image

    @property
    def side(self) -> int:
        """Places along a side."""
        return self.low.vit.side

    @property
    def patch(self) -> int:
        """Of the coarse tower."""
        return self.low.vit.patch

    @property
    def channels(self) -> int:
        return self.high.channels

    @property
    def tap(self) -> int:
        """The layer of the fine tower that is read beside its last: the first that saw the whole picture."""
        return self.high.full[0] + 1

    def __post_init__(self) -> None:
        if not self.high.full:
            raise ConfigError("no block of the fine tower sees the whole picture", "name one in high.full")
        if not self.low.vit.channels == self.channels == len(self.mean) == len(self.std):
            raise ConfigError(
                f"towers of {self.low.vit.channels} and {self.channels} channels, means {self.mean}, "
                f"deviations {self.std}",
                "give both towers the same channels, and as many means and deviations",
            )


class Hybrid(nn.Module):
    """pixels (B, C, S, S) between 0 and 1 → (B, N, 4·G + D), the fine tower's features first."""

    def __init__(self, config: HybridConfig):
        super().__init__()
        self.config = config
        G = config.high.gives
        self.low, self.high = ViT(config.low.vit), SAM(config.high)
        self.neck = Neck(config.high.block.width, G)
        self.alpha = nn.Parameter(torch.zeros(1))  # how much the tap counts: nothing until it is learned
        self.halve1 = nn.Conv2d(G, 2 * G, 3, stride=2, padding=1, bias=False)
        self.halve2 = nn.Conv2d(2 * G, 4 * G, 3, stride=2, padding=1, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        config, low = self.config, self.config.low
        last, tap = self.high.states(normalized(pixels, config.mean, config.std), (None, config.tap))
        # Resizing and convolutions are linear, so that the two maps can be summed before them, and need them once.
        fine = self.high.neck(last) + self.alpha * self.neck(tap)  # (B, h, w, G)
        fine = F.interpolate(fine.movedim(-1, 1), size=(4 * config.side,) * 2, mode="bilinear")
        fine = self.halve2(self.halve1(fine)).flatten(2).mT  # (B, N, 4·G)
        coarse = shrunk(pixels, low.vit.image, config.resample)
        return torch.cat([fine, self.low(normalized(coarse, low.mean, low.std), layer=low.layer)], dim=-1)


def shrunk(pixels: Tensor, side: int, resample: str) -> Tensor:
    """Pixels (B, C, S, S) between 0 and 1 as pictures of another side, resized in bytes as Pillow does it: the coarse
    tower sees what it would of a picture that had been prepared for it alone. No gradient passes what is rounded."""
    return (resized((pixels.detach().float() * 255).round(), side, resample) * (1 / 255)).float()


@cost.flops.register
def _(module: Hybrid, work: Work) -> int:
    """`work` counts places of the coarse tower; the fine one's pictures are of its native size."""
    low, side = _low(module, work), module.config.side
    coarse = cost.flops(module.low, low) - sum(cost.flops(part, low) for part in _spared(module))
    maps = module.high.work(work.rows)
    halves = (4 * module.halve1.weight.numel() + module.halve2.weight.numel()) * side**2
    large, small = module.config.image, module.config.low.vit.image
    shrinks = module.config.channels * large * small * (large + small)
    return coarse + cost.flops(module.high, maps) + cost.flops(module.neck, maps) + 2 * (halves + shrinks) * work.rows


@cost.bytes.register
def _(module: Hybrid, work: Work) -> cost.Bytes:
    spares = weigh(*_spared(module))
    rest = weigh(module.high, module.neck, module.alpha, module.halve1, module.halve2)
    return cost.bytes(module.low, _low(module, work)) + cost.Bytes(weights=rest, read=rest - spares)


def _low(module: Hybrid, work: Work) -> Work:
    return Work.full(module.config.low.vit.prefix + module.config.side**2, work.rows)


def _spared(module: Hybrid) -> list[nn.Module]:
    return spared(module.low, module.config.low.layer)
