"""How the features of a picture lie, and the m × m blocks they make.

B batch, N features, D width, t × h × w the grid, m side of a block, M = N / m² blocks
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vitrail.errors import ConfigError
from vitrail.processing.grid import Grid

Laid: TypeAlias = int | Grid
"""How many features there are or, for those who need to know how they lie, the grid they make."""


def count(laid: Laid) -> int:
    return laid if isinstance(laid, int) else laid.patches


def as_grid(laid: Laid) -> Grid:
    if isinstance(laid, int):
        raise ConfigError(f"{laid} features may lie in many ways", "say how: give their Grid(h=…, w=…)")
    return laid


def by_grid(features: Tensor, grids: Sequence[Grid], each: Callable[[Tensor, Grid], Tensor]) -> Tensor:
    """`each` of (B, N, D) in one grid, or of every row in its own; shorter rows are filled up with zeros behind."""
    if len(grids) == 1:
        return each(features[:, : grids[0].patches], grids[0])
    rows = (each(row[None, : grid.patches], grid)[0] for row, grid in zip(features, grids, strict=True))
    return pad_sequence(list(rows), batch_first=True)


def into_blocks(x: Tensor, grid: Grid, m: int) -> Tensor:
    """(B, N, D) in raster order → (B, M, m·m, D): blocks in raster order, and so the features of each."""
    merged = grid.with_(merge=m)  # refuses sides that m does not divide
    cut = x.reshape(len(x), grid.t, merged.rows, m, merged.columns, m, x.shape[-1])
    return cut.transpose(3, 4).reshape(len(x), merged.tokens, m * m, x.shape[-1])


def out_of_blocks(blocks: Tensor, grid: Grid, m: int) -> Tensor:
    """The inverse of `into_blocks`: (B, M, m·m, D) → (B, N, D)."""
    merged, (B, D) = grid.with_(merge=m), (len(blocks), blocks.shape[-1])
    cut = blocks.reshape(B, grid.t, merged.rows, merged.columns, m, m, D)
    return cut.transpose(3, 4).reshape(B, grid.patches, D)
