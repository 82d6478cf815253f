"""Pooling of blocks from a packed tower (Gemma 4): mean, scale, standardization, a norm, and a linear layer.

Shapes: B batch, N features, D their width, m side of a block, M = N / m² visual tokens, W their width.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import PositiveInt
from vitrail.connectors.connector import Connector, ConnectorConfig
from vitrail.connectors.feature_layout import FeatureLayout, apply_per_grid, require_grid
from vitrail.nn import cost
from vitrail.processing.grid import Grid
from vitrail.registry import CONNECTORS


class PackedPoolConfig(ConnectorConfig, tag="packed-pool", tag_field="kind"):
    """Config of a `PackedPool`, which takes the mean of blocks of `merge` × `merge` features and multiplies it by √D.

    standardize  subtract a stored mean and multiply by a stored scale of each channel; both are not trained
    eps          of the RMS norm, which has no weights
    """

    merge: PositiveInt = 3
    standardize: bool = False
    eps: float = 1e-6

    def count_tokens(self, layout: FeatureLayout) -> int:
        return require_grid(layout).replace(merge_size=self.merge).num_tokens

    def supports_packed_blocks(self, merge_size: int) -> bool:
        return self.merge == merge_size


@CONNECTORS.register("packed-pool")
class PackedPool(Connector[PackedPoolConfig]):
    Config = PackedPoolConfig

    mean: Tensor | None
    scale: Tensor | None

    def __init__(self, config: PackedPoolConfig):
        super().__init__(config)
        D, standardize = config.in_features, config.standardize
        self.register_buffer("mean", torch.zeros(D) if standardize else None)
        self.register_buffer("scale", torch.ones(D) if standardize else None)
        self.proj = nn.Linear(D, config.out_features, bias=False)

    def forward(self, features: Tensor, layout: FeatureLayout | Sequence[FeatureLayout] | None = None) -> Tensor:
        """Map features (B, N, D), block by block, to visual tokens (B, M, W)."""
        grids = [require_grid(one) for one in self.resolve_layouts(features, layout)]
        x = apply_per_grid(features, grids, self._mean).float() * self.config.in_features**0.5  # (B, M, D)
        if self.mean is not None and self.scale is not None:
            x = (x - self.mean.float()) * self.scale.float()
        x = x.to(features.dtype).float()  # rounded here, as in training
        return self.proj(F.rms_norm(x, x.shape[-1:], eps=self.config.eps).to(features.dtype))

    def _mean(self, x: Tensor, grid: Grid) -> Tensor:
        blocks = x.reshape(len(x), self.config.count_tokens(grid), -1, self.config.in_features)
        return blocks.float().mean(2).to(x.dtype)


cost.count_flops.register(PackedPool, cost.sum_child_flops)  # means have no matrix products
