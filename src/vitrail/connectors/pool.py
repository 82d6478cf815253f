"""Means over windows of the grid: neighbours of a frame, frames, or both. There is nothing to learn but, where the
widths differ, a linear layer behind.

B batch, t × h × w features, D their width, s side of a window, k its frames, M soft tokens, W their width
"""

from collections.abc import Sequence

from torch import Tensor

from vitrail.connectors.base import Connector, ConnectorConfig, fit, positive
from vitrail.connectors.grids import Laid, as_grid, by_grid, into_blocks
from vitrail.errors import ConfigError
from vitrail.nn import Work, cost
from vitrail.processing.grid import Grid


class PoolConfig(ConnectorConfig, tag="pool", tag_field="kind"):
    """`space` × `space` neighbours of `time` frames become their mean; None for all that there are.

    `space = None` leaves one token a frame, `time = None` one frame.
    """

    space: int | None = 1
    time: int | None = 1

    def __post_init__(self) -> None:
        given = [name for name in ("space", "time") if getattr(self, name) is not None]
        positive(self, "reads", "gives", *given)

    def tokens(self, laid: Laid) -> int:
        grid = as_grid(laid)
        cells = 1 if self.space is None else grid.with_(t=1, merge=self.space).tokens
        return cells * grid.t // self.frames(grid)

    def frames(self, grid: Grid) -> int:
        """How many frames one token is the mean of."""
        k = grid.t if self.time is None else self.time
        if grid.t % k:
            raise ConfigError(f"{grid.t} frames do not divide into windows of {k}", f"sample a multiple of {k} frames")
        return k


class Pool(Connector[PoolConfig]):
    Config = PoolConfig

    def __init__(self, config: PoolConfig):
        super().__init__(config)
        self.fit = fit(config.reads, config.gives)

    def forward(self, features: Tensor, laid: Laid | Sequence[Laid] | None = None) -> Tensor:
        """(B, t·h·w, D) → (B, M, W)"""
        grids = [as_grid(one) for one in self.rows(features, laid)]
        return self.fit(by_grid(features, grids, self._mean))

    def _mean(self, x: Tensor, grid: Grid) -> Tensor:
        k, space = self.config.frames(grid), self.config.space
        if space is None:
            x = x.reshape(len(x), grid.t, 1, grid.h * grid.w, -1)
        else:
            x = into_blocks(x, grid, space).unflatten(1, (grid.t, -1))  # (B, t, cells, s·s, D)
        return x.unflatten(1, (grid.t // k, k)).mean((2, 4)).flatten(1, 2)


@cost.flops.register
def _(module: Pool, work: Work) -> int:
    """Means are no matrix products."""
    return cost.flops(module.fit, work)
