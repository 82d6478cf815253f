"""Several towers over one picture, their features side by side for every patch (Prismatic: SigLIP ‖ DINOv2).

B batch, C channels, H, W pixels, N patches, D width of one tower
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.depth import depth_of
from vitrail.encoders.vit import ViT, ViTConfig, whole_patches
from vitrail.errors import ConfigError
from vitrail.nn import Work, cost
from vitrail.nn.learned import weigh


class TowerConfig(Config):
    """A tower, how its pixels are normalised, and the layer its features are taken from (Prismatic: −2)."""

    vit: ViTConfig
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    layer: int | None = None

    def __post_init__(self) -> None:
        depth_of(self.layer, self.vit.layers)  # refuses a layer that is not there
        if len(self.mean) != self.vit.channels or len(self.std) != self.vit.channels:
            raise ConfigError(
                f"{self.vit.channels} channels need as many means and deviations: {self.mean}, {self.std}"
            )


class TowersConfig(Config, tag="towers", tag_field="kind"):
    """`image` is the side of the pictures all towers get; each leaves unread what its patches leave over of it."""

    towers: tuple[TowerConfig, ...]
    image: int = 224

    @property
    def width(self) -> int:
        return sum(tower.vit.block.width for tower in self.towers)

    def __post_init__(self) -> None:
        if not self.towers:
            raise ConfigError("there is no tower", "name at least one")
        sides = [self.image // tower.vit.patch for tower in self.towers]
        if len(set(sides)) > 1:
            patches = ", ".join(f"{s} × {s} of patch {t.vit.patch}" for s, t in zip(sides, self.towers, strict=True))
            raise ConfigError(
                f"features can stand side by side only where the grids agree: {self.image} pixels make {patches}",
                "use towers with the same patch",
            )


class Towers(nn.Module):
    """pixels (B, C, H, W) between 0 and 1, which each tower gets by its own mean and deviation → (B, N, ΣD)."""

    def __init__(self, config: TowersConfig):
        super().__init__()
        self.config = config
        self.towers = nn.ModuleList([ViT(tower.vit) for tower in config.towers])

    def forward(self, pixels: Tensor) -> Tensor:
        features = []
        for tower, vit in zip(self.config.towers, self.towers, strict=True):
            mine = whole_patches(pixels, tower.vit.patch, self.config.image)
            features.append(vit(normalized(mine, tower.mean, tower.std), layer=tower.layer))
        return torch.cat(features, dim=-1)


def normalized(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(x − mean) / std, channel by channel: plain numbers, so there is no buffer that a cast could round."""
    return torch.stack([(pixels[:, c] - m) / s for c, (m, s) in enumerate(zip(mean, std, strict=True))], dim=1)


def _runs(module: Towers, work: Work) -> Iterator[tuple[ViT, Work, list[nn.Module]]]:
    """Each tower, its work (`work` counts patches; a prefix is each tower's own), and what its layer spares it."""
    for tower, vit in zip(module.config.towers, module.towers, strict=True):
        assert isinstance(vit, ViT)
        yield vit, Work.full(tower.vit.prefix + work.tokens // work.rows, work.rows), spared(vit, tower.layer)


def spared(vit: ViT, layer: int | None) -> list[nn.Module]:
    """What a ViT does not run when it is read at an earlier layer."""
    norm = [vit.norm_last] if layer is not None and vit.config.norm_last == "tokens" else []
    return [*vit.blocks[depth_of(layer, vit.config.layers) :], *norm]


@cost.flops.register
def _(module: Towers, work: Work) -> int:
    return sum(
        cost.flops(vit, mine) - sum(cost.flops(part, mine) for part in unread)
        for vit, mine, unread in _runs(module, work)
    )


@cost.bytes.register
def _(module: Towers, work: Work) -> cost.Bytes:
    found = (cost.bytes(vit, mine) + cost.Bytes(read=-weigh(*unread)) for vit, mine, unread in _runs(module, work))
    return sum(found, cost.Bytes())
