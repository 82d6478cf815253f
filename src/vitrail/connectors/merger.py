"""m × m neighbours become one token: their features side by side, then an MLP.

    Qwen2-VL, Qwen3-VL       norm of every feature, side by side, MLP as wide as they
    Qwen2.5-VL               the same with an RMS norm
    Qwen3-VL's DeepStack     side by side, norm of all, MLP as wide as they
    InternVL (pixel shuffle) side by side, norm of all, MLP as wide as the language model

B batch, N features, D their width, m side of a block, M = N / m² soft tokens, W their width
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from vitrail.connectors.base import Connector, ConnectorConfig, Layers, positive
from vitrail.connectors.grids import Laid, as_grid, by_grid, into_blocks
from vitrail.nn import Work, cost
from vitrail.nn.mlp import Activation
from vitrail.nn.norms import Norm, make_norm
from vitrail.processing.grid import Grid


class MergerConfig(ConnectorConfig, tag="merger", tag_field="kind"):
    """`hidden` is the width between the two layers of the MLP: that of a whole block, m²·D, unless given.

    norm_at  whether the norm is on each feature, before they stand side by side, or on all of a block together
    order    how features come: row by row, or block by block, as Qwen's towers give them
    """

    merge: int = 2
    hidden: int | None = None
    norm: Norm = "layer"
    norm_at: Literal["none", "before", "after"] = "before"
    eps: float = 1e-6
    activation: Activation = "gelu"
    order: Literal["raster", "blocks"] = "raster"

    @property
    def block(self) -> int:
        """Width of a block's features side by side."""
        return self.merge**2 * self.reads

    def __post_init__(self) -> None:
        positive(self, "reads", "gives", "merge", *(["hidden"] if self.hidden is not None else []))

    def tokens(self, laid: Laid) -> int:
        return as_grid(laid).with_(merge=self.merge).tokens


class Merger(Connector[MergerConfig]):
    Config = MergerConfig

    def __init__(self, config: MergerConfig):
        super().__init__(config)
        normed = config.reads if config.norm_at == "before" else config.block
        self.norm = nn.Identity() if config.norm_at == "none" else make_norm(config.norm, normed, config.eps)
        hidden = config.hidden or config.block
        self.layers = Layers(config.block, hidden, config.gives, activation=config.activation)

    def forward(self, features: Tensor, laid: Laid | Sequence[Laid] | None = None) -> Tensor:
        """(B, N, D) → (B, M, W)"""
        grids = [as_grid(one) for one in self.rows(features, laid)]
        x = self.norm(features) if self.config.norm_at == "before" else features
        x = by_grid(x, grids, self._side_by_side)  # (B, M, m²·D)
        return self.layers(self.norm(x) if self.config.norm_at == "after" else x)

    def _side_by_side(self, x: Tensor, grid: Grid) -> Tensor:
        m = self.config.merge
        if self.config.order == "raster":
            return into_blocks(x, grid, m).flatten(2)
        return x.reshape(len(x), self.config.tokens(grid), self.config.block)


@cost.flops.register
def _(module: Merger, work: Work) -> int:
    return cost.flops(module.layers, work)
