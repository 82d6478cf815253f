"""Projector of Florence-2: positions are added to the features, and their mean is a further token before them.

Shapes: B batch, N features, D their width, W width of the visual tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vitrail.config import PositiveInt
from vitrail.connectors.connector import Connector, ConnectorConfig
from vitrail.connectors.feature_layout import FeatureLayout, count_features, require_grid
from vitrail.errors import ConfigError
from vitrail.nn import Workload, cost
from vitrail.nn.norms import make_norm
from vitrail.processing.grid import Grid
from vitrail.registry import CONNECTORS


class PooledProjectorConfig(ConnectorConfig, tag="pooled-projector", tag_field="kind"):
    """Config of a `PooledProjector`.

    max_grid  learned positions of rows, and of columns
    """

    max_grid: PositiveInt = 50
    eps: float = 1e-5

    def count_tokens(self, layout: FeatureLayout) -> int:
        grid = require_grid(layout)
        if max(grid.h, grid.w) > self.max_grid:
            raise ConfigError(
                f"a grid of {grid.h} × {grid.w} features has no positions beyond {self.max_grid} × {self.max_grid}",
                "use smaller images, or raise connector.max_grid",
            )
        return 1 + count_features(grid)


@CONNECTORS.register("pooled-projector")
class PooledProjector(Connector[PooledProjectorConfig]):
    Config = PooledProjectorConfig

    def __init__(self, config: PooledProjectorConfig):
        super().__init__(config)
        D = config.in_features
        self.rows, self.columns = nn.Embedding(config.max_grid, D // 2), nn.Embedding(config.max_grid, D - D // 2)
        self.proj = nn.Linear(D, config.out_features, bias=False)
        self.norm = make_norm("layer", config.out_features, config.eps)

    def forward(self, features: Tensor, layout: FeatureLayout | Sequence[FeatureLayout] | None = None) -> Tensor:
        """Map features (B, N, D) to visual tokens (B, 1 + N, W), the mean first."""
        layouts = self.resolve_layouts(features, layout)
        counts = torch.tensor([self.config.count_tokens(one) - 1 for one in layouts], device=features.device)
        positions = pad_sequence([self._embed_positions(require_grid(one)) for one in layouts], batch_first=True)
        is_feature = torch.arange(features.shape[1], device=features.device) < counts[:, None]  # (1 or B, N)
        x = torch.where(is_feature[..., None], features + positions, 0)
        mean = x.sum(1, keepdim=True) / counts[:, None, None]
        return self.norm(self.proj(torch.cat([mean, x], 1)))

    def _embed_positions(self, grid: Grid) -> Tensor:
        """Return the positions (N, D) of an image: its columns and rows, and the first frame of a video.

        The embedding of a frame has sines and cosines in turn: 0 and 1 for the first one.
        """
        table = torch.cat(
            [
                self.columns.weight[: grid.w].expand(grid.h, -1, -1),
                self.rows.weight[: grid.h, None].expand(-1, grid.w, -1),
            ],
            dim=-1,
        )
        return table.flatten(0, 1) + torch.arange(table.shape[-1], device=table.device) % 2


@cost.count_flops.register
def _(module: PooledProjector, work: Workload) -> int:
    return cost.count_flops(module.proj, work)
