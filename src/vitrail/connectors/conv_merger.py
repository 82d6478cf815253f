"""Convolutional merger (HD-9): a 3 × 3 convolution with stride 2, plus every second feature as a residual.

With nine local views and a global one of 24 × 24 features each, and a newline token after every view, an image has
10 × (144 + 1) = 1450 tokens.

Shapes: B batch, t views, h × w features of a view, D their width, M visual tokens, W their width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitrail.connectors.connector import Connector, ConnectorConfig, make_width_projection
from vitrail.connectors.feature_layout import FeatureLayout, apply_per_grid, require_grid
from vitrail.nn import Workload, cost
from vitrail.nn.parameters import make_small_parameter
from vitrail.processing.grid import Grid
from vitrail.registry import CONNECTORS


class ConvMergerConfig(ConnectorConfig, tag="conv-merger", tag_field="kind"):
    """Config of a `ConvMerger`. With `newline`, a learned token ends every view. A linear layer follows if widths
    differ.
    """

    newline: bool = False

    def count_tokens(self, layout: FeatureLayout) -> int:
        grid = require_grid(layout)
        return grid.t * (-(-grid.h // 2) * -(-grid.w // 2) + self.newline)


@CONNECTORS.register("conv-merger")
class ConvMerger(Connector[ConvMergerConfig]):
    Config = ConvMergerConfig

    def __init__(self, config: ConvMergerConfig):
        super().__init__(config)
        self.conv = nn.Conv2d(config.in_features, config.in_features, 3, stride=2, padding=1)
        self.newline = make_small_parameter(config.in_features) if config.newline else None
        self.width_proj = make_width_projection(config.in_features, config.out_features)

    def forward(self, features: Tensor, layout: FeatureLayout | Sequence[FeatureLayout] | None = None) -> Tensor:
        """Map features (B, t·h·w, D) to visual tokens (B, M, W)."""
        grids = [require_grid(one) for one in self.resolve_layouts(features, layout)]
        return self.width_proj(apply_per_grid(features, grids, self._halve))

    def _halve(self, x: Tensor, grid: Grid) -> Tensor:
        views = x.reshape(len(x) * grid.t, grid.h, grid.w, -1).movedim(-1, 1)  # (B·t, D, h, w)
        # The kernel is centered at every second feature, starting with the first: this feature is the residual.
        halved = self.conv(views) + views[..., ::2, ::2]
        tokens = halved.flatten(2).mT.unflatten(0, (len(x), grid.t))  # (B, t, cells, D)
        if self.newline is not None:
            tokens = torch.cat([tokens, self.newline.expand(len(x), grid.t, 1, -1)], dim=2)
        return tokens.flatten(1, 2)

    def workload(self, layout: FeatureLayout, batch_size: int = 1) -> Workload:
        """Return the workload; `logit_tokens` are the convolution's output tokens, without newlines."""
        grid = require_grid(layout)
        total = super().workload(layout, batch_size)
        return total.replace(logit_tokens=total.tokens - batch_size * grid.t * self.config.newline)


@cost.count_flops.register
def _(module: ConvMerger, work: Workload) -> int:
    output_tokens = work.tokens if work.logit_tokens is None else work.logit_tokens
    return 2 * module.conv.weight.numel() * output_tokens + cost.count_flops(module.width_proj, work)
