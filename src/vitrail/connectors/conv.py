"""A quarter of the features by convolution (HD-9): 3 × 3, stride 2, padding 1, beside every second feature as it was.

Nine local views and a global one of 24 × 24 features each, with a mark behind every view: 10 × (144 + 1) = 1450 tokens.

B batch, t views, h × w features of a view, D their width, M soft tokens, W their width
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitrail.connectors.base import Connector, ConnectorConfig, fit, positive
from vitrail.connectors.grids import Laid, as_grid, by_grid
from vitrail.nn import Work, cost
from vitrail.nn.learned import small
from vitrail.processing.grid import Grid


class ConvMergerConfig(ConnectorConfig, tag="conv_merger", tag_field="kind"):
    """`newline`: a learned token closes every view. A linear layer follows where `gives` is not `reads`."""

    newline: bool = False

    def __post_init__(self) -> None:
        positive(self, "reads", "gives")

    def tokens(self, laid: Laid) -> int:
        grid = as_grid(laid)
        return grid.t * (-(-grid.h // 2) * -(-grid.w // 2) + self.newline)


class ConvMerger(Connector[ConvMergerConfig]):
    Config = ConvMergerConfig

    def __init__(self, config: ConvMergerConfig):
        super().__init__(config)
        self.conv = nn.Conv2d(config.reads, config.reads, 3, stride=2, padding=1)
        self.newline = small(config.reads) if config.newline else None
        self.fit = fit(config.reads, config.gives)

    def forward(self, features: Tensor, laid: Laid | Sequence[Laid] | None = None) -> Tensor:
        """(B, t·h·w, D) → (B, M, W)"""
        grids = [as_grid(one) for one in self.rows(features, laid)]
        return self.fit(by_grid(features, grids, self._halve))

    def _halve(self, x: Tensor, grid: Grid) -> Tensor:
        views = x.reshape(len(x) * grid.t, grid.h, grid.w, -1).movedim(-1, 1)  # (B·t, D, h, w)
        # The kernel lies on every second feature, from the first on: the nearest to what comes out.
        halved = self.conv(views) + views[..., ::2, ::2]
        tokens = halved.flatten(2).mT.unflatten(0, (len(x), grid.t))  # (B, t, cells, D)
        if self.newline is not None:
            tokens = torch.cat([tokens, self.newline.expand(len(x), grid.t, 1, -1)], dim=2)
        return tokens.flatten(1, 2)

    def work(self, laid: Laid, batch: int = 1) -> Work:
        """`asked` are the tokens that the convolution gives: all but the marks."""
        grid = as_grid(laid)
        whole = super().work(laid, batch)
        return whole.with_(asked=whole.tokens - batch * grid.t * self.config.newline)


@cost.flops.register
def _(module: ConvMerger, work: Work) -> int:
    made = work.tokens if work.asked is None else work.asked
    return 2 * module.conv.weight.numel() * made + cost.flops(module.fit, work)
