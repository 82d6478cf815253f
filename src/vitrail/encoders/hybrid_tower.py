"""Hybrid tower of DeepSeek-VL: SigLIP at 384 pixels and Segment Anything at 1,024, concatenated per position.

B batch, C channels, S image size, h, w patches of the high-resolution tower, G its output width, N patches of the
low-resolution tower, D its width
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.encoders.encoder import EncoderConfig
from vitrail.encoders.multi_tower import TowerConfig, find_unused_modules, normalize_pixels
from vitrail.encoders.sam import SAM, SAMConfig, SAMNeck
from vitrail.encoders.vit import ViT
from vitrail.errors import ConfigError
from vitrail.nn import Workload, cost
from vitrail.nn.parameters import count_parameter_bytes
from vitrail.processing.batch_resize import resize_like_pillow
from vitrail.processing.image_layout import ImageView
from vitrail.registry import ENCODERS, MODELS


class HybridTowerConfig(EncoderConfig, tag="hybrid", tag_field="kind"):
    """Hybrid tower settings.

    low        low-resolution tower, whose grid is the output grid
    high       high-resolution tower, which gets the full-size images
    mean, std  pixel normalization of the high-resolution tower
    resample   interpolation that makes the low-resolution images
    """

    low: TowerConfig
    high: SAMConfig
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    resample: Literal["bilinear", "bicubic"] = "bilinear"

    @property
    def high_width(self) -> int:
        """Width of the high-resolution features at a position of the output grid."""
        return 4 * self.high.out_features

    @property
    def width(self) -> int:
        return self.high_width + self.low.vit.block.width

    @property
    def image_size(self) -> int:
        """Image size of the high-resolution tower."""
        return self.high.image_size

    @property
    def grid_size(self) -> int:
        """Side of the output grid."""
        return self.low.vit.grid_size

    @property
    def patch_size(self) -> int:
        """Patch size of the low-resolution tower."""
        return self.low.vit.patch_size

    @property
    def channels(self) -> int:
        return self.high.channels

    @property
    def normalizes_pixels(self) -> bool:
        return True

    def check_view(self, view: ImageView) -> None:
        image, side = self.image_size, self.grid_size
        if view.canvas_size != (image, image) or (view.grid.h, view.grid.w) != (side, side):
            raise ConfigError(
                f"the tower takes images of {image} pixels and gives {side} × {side} features; the policy gives "
                f"views of {view.canvas_size} pixels with {view.grid.h} × {view.grid.w} features",
                f'set policy = {{ policy = "framed", image_size = {self.low.vit.image_size}, '
                f"patch_size = {self.patch_size}, high_res_size = {image} }}",
            )

    @property
    def high_tap_layer(self) -> int:
        """Second feature layer of the high-resolution tower: the first with full attention."""
        return self.high.full_attention_layers[0] + 1

    def __post_init__(self) -> None:
        if not self.high.full_attention_layers:
            raise ConfigError("the high-resolution tower has no full attention", "set high.full_attention_layers")
        if not self.low.vit.channels == self.channels == len(self.mean) == len(self.std):
            raise ConfigError(
                f"the towers have {self.low.vit.channels} and {self.channels} channels, mean is {self.mean}, "
                f"std is {self.std}",
                "use equal channels for both towers, mean and std",
            )


@ENCODERS.register("hybrid")
@MODELS.register("hybrid")
class HybridTower(nn.Module):
    """Hybrid tower: pixels (B, C, S, S) in 0…1 → (B, N, 4·G + D), high-resolution features first."""

    Config = HybridTowerConfig

    def __init__(self, config: HybridTowerConfig):
        super().__init__()
        self.config = config
        G = config.high.out_features
        self.low, self.high = ViT(config.low.vit), SAM(config.high)
        self.neck = SAMNeck(config.high.block.width, G)
        self.alpha = nn.Parameter(torch.zeros(1))  # weight of the second feature layer, initially 0
        self.halve1 = nn.Conv2d(G, 2 * G, 3, stride=2, padding=1, bias=False)
        self.halve2 = nn.Conv2d(2 * G, 4 * G, 3, stride=2, padding=1, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        config, low = self.config, self.config.low
        last, tap = self.high.forward_layers(
            normalize_pixels(pixels, config.mean, config.std), (None, config.high_tap_layer)
        )
        # Interpolation and convolutions are linear, so the two feature maps are summed before them.
        fine = self.high.neck(last) + self.alpha * self.neck(tap)  # (B, h, w, G)
        fine = F.interpolate(fine.movedim(-1, 1), size=(4 * config.grid_size,) * 2, mode="bilinear")
        fine = self.halve2(self.halve1(fine)).flatten(2).mT  # (B, N, 4·G)
        coarse = downscale_pixels(pixels, low.vit.image_size, config.resample)
        return torch.cat([fine, self.low(normalize_pixels(coarse, low.mean, low.std), layer=low.layer)], dim=-1)


def downscale_pixels(pixels: Tensor, image_size: int, resample: str) -> Tensor:
    """Resize pixels (B, C, S, S) in 0…1 as uint8 images, as Pillow does, so that the result equals its preprocessing.

    Rounding stops the gradient.
    """
    return (resize_like_pillow((pixels.detach().float() * 255).round(), image_size, resample) * (1 / 255)).float()


@cost.count_flops.register
def _(module: HybridTower, work: Workload) -> int:
    """The workload counts positions of the low-resolution tower; images have the native size."""
    low, side = _low_workload(module, work), module.config.grid_size
    low_flops = cost.count_flops(module.low, low) - sum(cost.count_flops(part, low) for part in _unused_modules(module))
    maps = module.high.workload(work.sequences)
    downsampling = (4 * module.halve1.weight.numel() + module.halve2.weight.numel()) * side**2
    large, small = module.config.image_size, module.config.low.vit.image_size
    resizing = module.config.channels * large * small * (large + small)
    high_flops = cost.count_flops(module.high, maps) + cost.count_flops(module.neck, maps)
    return low_flops + high_flops + 2 * (downsampling + resizing) * work.sequences


@cost.count_bytes.register
def _(module: HybridTower, work: Workload) -> cost.MemoryBytes:
    unused = count_parameter_bytes(*_unused_modules(module))
    rest = count_parameter_bytes(module.high, module.neck, module.alpha, module.halve1, module.halve2)
    return cost.count_bytes(module.low, _low_workload(module, work)) + cost.MemoryBytes(
        weights=rest, read=rest - unused
    )


def _low_workload(module: HybridTower, work: Workload) -> Workload:
    return Workload.full_attention(module.config.low.vit.num_prefix_tokens + module.config.grid_size**2, work.sequences)


def _unused_modules(module: HybridTower) -> list[nn.Module]:
    return find_unused_modules(module.low, module.config.low.layer)
