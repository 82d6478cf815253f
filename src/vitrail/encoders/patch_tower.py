"""Vision tower without an encoder: the pixels of each patch are its features (Fuyu).

B batch, C channels, H, W pixels, P patch size, N patches
"""

from typing import Literal

from torch import Tensor, nn

from vitrail.config import PositiveInt
from vitrail.encoders.encoder import EncoderConfig
from vitrail.encoders.vit import Grids, cut_patches
from vitrail.errors import ConfigError
from vitrail.nn import Workload, cost
from vitrail.registry import ENCODERS


class PatchTowerConfig(EncoderConfig, tag="patches", tag_field="kind"):
    """Settings of a `PatchTower`: the side of a patch and its channels. `image_size` is the native image size."""

    image_size: PositiveInt = 300
    patch_size: PositiveInt = 30
    channels: PositiveInt = 3

    def __post_init__(self) -> None:
        if self.grid_size < 1:
            raise ConfigError(
                f"PatchTowerConfig: image_size is {self.image_size}, and patch_size {self.patch_size}",
                "give an image_size of at least one patch",
            )

    @property
    def width(self) -> int:
        return self.channels * self.patch_size**2

    @property
    def patch_order(self) -> Literal["channels_last"]:
        """Order of the pixels of a patch."""
        return "channels_last"


@ENCODERS.register("patches")
class PatchTower(nn.Module):
    """Tower without weights: pixels (B, C, H, W), or patches (B, N, P·P·C) with their grids → patches (B, N, P·P·C)."""

    Config = PatchTowerConfig

    def __init__(self, config: PatchTowerConfig):
        super().__init__()
        self.config = config

    def forward(self, pixels: Tensor, grids: Grids | None = None) -> Tensor:
        return pixels if grids is not None else cut_patches(pixels, self.config)[0]


@cost.count_flops.register
def _(module: PatchTower, work: Workload) -> int:
    return 0


cost.count_bytes.register(PatchTower, cost.sum_child_bytes)
