"""Several towers on one image, with features concatenated per patch (Prismatic: SigLIP and DINOv2).

B batch, C channels, H, W pixels, N patches, D width of one tower
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.encoder import EncoderConfig
from vitrail.encoders.layer_selection import FeatureLayer, resolve_depth
from vitrail.encoders.vit import ViT, ViTConfig, crop_to_patches
from vitrail.errors import ConfigError
from vitrail.nn import Workload, cost
from vitrail.nn.parameters import count_parameter_bytes
from vitrail.registry import ENCODERS, MODELS


class TowerConfig(Config):
    """A ViT, its pixel normalization, and the layer of its features (Prismatic: −2)."""

    vit: ViTConfig
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    layer: int | None = None

    def __post_init__(self) -> None:
        resolve_depth(self.layer, self.vit.layers)  # raises if the layer does not exist
        if len(self.mean) != self.vit.channels or len(self.std) != self.vit.channels:
            raise ConfigError(
                f"{self.vit.channels} channels need as many values of mean and std, not {self.mean} and {self.std}"
            )


class MultiTowerConfig(EncoderConfig, tag="towers", tag_field="kind"):
    """Settings of several towers. `image_size` is common; each tower crops pixels beyond whole patches."""

    towers: tuple[TowerConfig, ...]
    image_size: int = 224

    @property
    def patch_size(self) -> int:
        return self.towers[0].vit.patch_size

    @property
    def channels(self) -> int:
        return self.towers[0].vit.channels

    @property
    def normalizes_pixels(self) -> bool:
        return True

    @property
    def width(self) -> int:
        return sum(tower.vit.block.width for tower in self.towers)

    def __post_init__(self) -> None:
        if not self.towers:
            raise ConfigError("towers is empty", "add at least one tower")
        sides = [self.image_size // tower.vit.patch_size for tower in self.towers]
        if len(set(sides)) > 1:
            patches = ", ".join(
                f"{s} × {s} of patch {t.vit.patch_size}" for s, t in zip(sides, self.towers, strict=True)
            )
            raise ConfigError(
                f"the grids of the towers differ: {self.image_size} pixels make {patches}",
                "use towers with equal patch_size",
            )


@ENCODERS.register("towers")
@MODELS.register("towers")
class MultiTower(nn.Module):
    """Several towers: pixels (B, C, H, W) in 0…1, normalized per tower → features (B, N, ΣD)."""

    Config = MultiTowerConfig

    def __init__(self, config: MultiTowerConfig):
        super().__init__()
        self.config = config
        self.towers = nn.ModuleList([ViT(tower.vit) for tower in config.towers])

    def forward(self, pixels: Tensor) -> Tensor:
        features = []
        for tower, vit in zip(self.config.towers, self.towers, strict=True):
            cropped = crop_to_patches(pixels, tower.vit.patch_size, self.config.image_size)
            features.append(vit(normalize_pixels(cropped, tower.mean, tower.std), layer=tower.layer))
        return torch.cat(features, dim=-1)


def normalize_pixels(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return (x − mean) / std per channel. It uses no buffers, because a cast would round them."""
    return torch.stack([(pixels[:, c] - m) / s for c, (m, s) in enumerate(zip(mean, std, strict=True))], dim=1)


def _tower_workloads(module: MultiTower, work: Workload) -> Iterator[tuple[ViT, Workload, list[nn.Module]]]:
    """Yield each tower, its workload including its prefix tokens, and the modules its layer does not use."""
    for tower, vit in zip(module.config.towers, module.towers, strict=True):
        assert isinstance(vit, ViT)
        yield (
            vit,
            Workload.full_attention(tower.vit.num_prefix_tokens + work.tokens // work.sequences, work.sequences),
            find_unused_modules(vit, tower.layer),
        )


def find_unused_modules(vit: ViT, layer: FeatureLayer) -> list[nn.Module]:
    """Return the modules of a ViT that do not run for `layer`."""
    norm = [vit.norm_last] if layer is not None and vit.config.norm_last == "tokens" else []
    return [*vit.blocks[resolve_depth(layer, vit.config.layers) :], *norm]


@cost.count_flops.register
def _(module: MultiTower, work: Workload) -> int:
    return sum(
        cost.count_flops(vit, own) - sum(cost.count_flops(part, own) for part in unused)
        for vit, own, unused in _tower_workloads(module, work)
    )


@cost.count_bytes.register
def _(module: MultiTower, work: Workload) -> cost.MemoryBytes:
    costs = (
        cost.count_bytes(vit, own) + cost.MemoryBytes(read=-count_parameter_bytes(*unused))
        for vit, own, unused in _tower_workloads(module, work)
    )
    return sum(costs, cost.MemoryBytes())
