"""Layout of image features: a count or a grid, and m × m blocks of a grid.

Shapes: B batch, N features, D width, t × h × w the grid, m side of a block, M = N / m² blocks.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vitrail.errors import ConfigError
from vitrail.processing.grid import Grid

FeatureLayout: TypeAlias = int | Grid
"""Number of features, or their grid for connectors that need it."""


def count_features(layout: FeatureLayout) -> int:
    """Return the number of features of a layout."""
    return layout if isinstance(layout, int) else layout.num_patches


def require_grid(layout: FeatureLayout) -> Grid:
    """Return the layout if it is a grid, else raise."""
    if isinstance(layout, int):
        raise ConfigError(f"the layout is {layout} features, but a grid is needed", "give a Grid(h=…, w=…)")
    return layout


def apply_per_grid(features: Tensor, grids: Sequence[Grid], function: Callable[[Tensor, Grid], Tensor]) -> Tensor:
    """Apply a function of (features, grid) to (B, N, D), or to each row with its own grid; shorter rows are
    zero-padded.
    """
    if len(grids) == 1:
        return function(features[:, : grids[0].num_patches], grids[0])
    rows = (function(row[None, : grid.num_patches], grid)[0] for row, grid in zip(features, grids, strict=True))
    return pad_sequence(list(rows), batch_first=True)


def group_blocks(x: Tensor, grid: Grid, block_size: int) -> Tensor:
    """Group features (B, N, D) in raster order into blocks (B, M, m·m, D), in raster order inside and outside of
    blocks. Incomplete blocks of a padded grid are filled with zeros.
    """
    merged = grid.replace(merge_size=block_size)  # raises if m does not divide the sides
    below, right = merged.num_rows * block_size - grid.h, merged.num_columns * block_size - grid.w
    if below or right:
        x = F.pad(x.reshape(len(x), grid.t, grid.h, grid.w, x.shape[-1]), (0, 0, 0, right, 0, below))
    blocks = x.reshape(len(x), grid.t, merged.num_rows, block_size, merged.num_columns, block_size, x.shape[-1])
    return blocks.transpose(3, 4).reshape(len(x), merged.num_tokens, block_size * block_size, x.shape[-1])


def ungroup_blocks(blocks: Tensor, grid: Grid, block_size: int) -> Tensor:
    """Invert `group_blocks`: (B, M, m·m, D) to (B, N, D)."""
    merged, (B, D) = grid.replace(merge_size=block_size), (len(blocks), blocks.shape[-1])
    cells = blocks.reshape(B, grid.t, merged.num_rows, merged.num_columns, block_size, block_size, D)
    return cells.transpose(3, 4).reshape(B, grid.num_patches, D)
