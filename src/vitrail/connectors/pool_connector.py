"""Mean pooling over spatial and temporal windows, with a linear layer if the widths differ or after a norm.

Shapes: B batch, t × h × w features, D their width, s side of a window, k its frames, M visual tokens, W their width.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from vitrail.config import PositiveInt
from vitrail.connectors.connector import Connector, ConnectorConfig, make_width_projection
from vitrail.connectors.feature_layout import FeatureLayout, apply_per_grid, group_blocks, require_grid
from vitrail.errors import ConfigError
from vitrail.nn import cost
from vitrail.nn.norms import NormKind, make_norm
from vitrail.processing.grid import Grid
from vitrail.registry import CONNECTORS


class PoolConnectorConfig(ConnectorConfig, tag="pool", tag_field="kind"):
    """Config of a `PoolConnector`: windows of `spatial_window` × `spatial_window` features and `temporal_window`
    frames.

    `spatial_window = None` pools a whole frame, `temporal_window = None` all frames. With `norm`, the means are
    normalized and then projected by a linear layer without bias (Gemma 3).
    """

    spatial_window: PositiveInt | None = 1
    temporal_window: PositiveInt | None = 1
    norm: NormKind | None = None
    eps: float = 1e-6

    def count_tokens(self, layout: FeatureLayout) -> int:
        grid = require_grid(layout)
        cells = 1 if self.spatial_window is None else grid.replace(t=1, merge_size=self.spatial_window).num_tokens
        return cells * grid.t // self.window_frames(grid)

    def window_frames(self, grid: Grid) -> int:
        """Return the number of frames in a window."""
        k = grid.t if self.temporal_window is None else self.temporal_window
        if grid.t % k:
            raise ConfigError(f"{grid.t} frames do not divide into windows of {k}", f"give a multiple of {k} frames")
        return k


@CONNECTORS.register("pool")
class PoolConnector(Connector[PoolConnectorConfig]):
    Config = PoolConnectorConfig

    def __init__(self, config: PoolConnectorConfig):
        super().__init__(config)
        if config.norm is None:
            self.norm: nn.Module = nn.Identity()
            self.width_proj = make_width_projection(config.in_features, config.out_features)
        else:
            self.norm = make_norm(config.norm, config.in_features, config.eps)
            self.width_proj = nn.Linear(config.in_features, config.out_features, bias=False)

    def forward(self, features: Tensor, layout: FeatureLayout | Sequence[FeatureLayout] | None = None) -> Tensor:
        """Map features (B, t·h·w, D) to visual tokens (B, M, W)."""
        grids = [require_grid(one) for one in self.resolve_layouts(features, layout)]
        return self.width_proj(self.norm(apply_per_grid(features, grids, self._mean)))

    def _mean(self, x: Tensor, grid: Grid) -> Tensor:
        k, space = self.config.window_frames(grid), self.config.spatial_window
        if space is None:
            x = x.reshape(len(x), grid.t, 1, grid.h * grid.w, -1)
        else:
            x = group_blocks(x, grid, space).unflatten(1, (grid.t, -1))  # (B, t, cells, s·s, D)
        return x.unflatten(1, (grid.t // k, k)).mean((2, 4)).flatten(1, 2)


cost.count_flops.register(PoolConnector, cost.sum_child_flops)  # means have no matrix products
