"""Gated merger (GLM-4V): a convolution of m × m features with stride m, a projection, and a gated MLP.

Shapes: B batch, N features, D their width, m side of a block, M = N / m² visual tokens, W their width.
"""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import PositiveInt
from vitrail.connectors.connector import Connector, ConnectorConfig
from vitrail.connectors.feature_layout import FeatureLayout, apply_per_grid, group_blocks, require_grid
from vitrail.nn import GatedMLPConfig, cost
from vitrail.nn.mlp import Activation, GatedMLP
from vitrail.nn.norms import NormKind, make_norm
from vitrail.processing.grid import Grid
from vitrail.registry import CONNECTORS


class GatedMergerConfig(ConnectorConfig, tag="gated-merger", tag_field="kind"):
    """Config of a `GatedMerger`. `intermediate_size` is the hidden width of the MLP.

    norm, eps   norm of each feature
    activation  of the MLP
    order       order of the features: row by row, or block by block as from packed towers
    """

    intermediate_size: PositiveInt
    merge: PositiveInt = 2
    norm: NormKind = "rms"
    eps: float = 1e-5
    activation: Activation = "silu"
    order: Literal["raster", "blocks"] = "blocks"

    def count_tokens(self, layout: FeatureLayout) -> int:
        return require_grid(layout).replace(merge_size=self.merge).num_tokens

    def supports_packed_blocks(self, merge_size: int) -> bool:
        return self.order == "blocks" and self.merge == merge_size


@CONNECTORS.register("gated-merger")
class GatedMerger(Connector[GatedMergerConfig]):
    Config = GatedMergerConfig

    def __init__(self, config: GatedMergerConfig):
        super().__init__(config)
        D, W = config.in_features, config.out_features
        self.norm = make_norm(config.norm, D, config.eps)
        self.conv = nn.Linear(config.merge**2 * D, W)  # over a block, whose features are adjacent
        self.proj = nn.Linear(W, W, bias=False)
        self.proj_norm = nn.LayerNorm(W)
        self.mlp = GatedMLP(W, GatedMLPConfig(intermediate_size=config.intermediate_size, activation=config.activation))

    def forward(self, features: Tensor, layout: FeatureLayout | Sequence[FeatureLayout] | None = None) -> Tensor:
        """Map features (B, N, D) to visual tokens (B, M, W)."""
        grids = [require_grid(one) for one in self.resolve_layouts(features, layout)]
        x = self.conv(apply_per_grid(self.norm(features), grids, self._concatenate_blocks))  # (B, M, W)
        return self.mlp(F.gelu(self.proj_norm(self.proj(x))))

    def _concatenate_blocks(self, x: Tensor, grid: Grid) -> Tensor:
        if self.config.order == "raster":
            return group_blocks(x, grid, self.config.merge).flatten(2)
        return x.reshape(len(x), self.config.count_tokens(grid), self.conv.in_features)


cost.count_flops.register(GatedMerger, cost.sum_child_flops)
