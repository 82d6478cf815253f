"""Pictures to flat patches and back, in the orders the released towers expect.

T frames, C channels, patches of P × P pixels and S frames, M × M of which are merged. N patches in all. Only the order
of the numbers changes, so gradients pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.errors import ConfigError
from vitrail.processing.grid import Grid

if TYPE_CHECKING:
    from torch import Tensor


def to_blocks(pixels: Tensor, patch: int, *, merge: int = 2, temporal: int = 2) -> tuple[Tensor, Grid]:
    """Qwen's order: the M² patches of one token stand together, so merging is a reshape.

    `pixels` is a still (C, H, W), repeated to fill the temporal patch, or frames (T, C, H, W). Gives (N, C·S·P·P) rows
    and their grid.
    """
    if pixels.ndim == 3:
        pixels = pixels.expand(temporal, *pixels.shape)  # (C,H,W) → (S,C,H,W)
    frames, channels, height, width = pixels.shape
    if temporal < 1 or frames % temporal:
        raise ConfigError(
            f"{frames} frames do not divide into temporal patches of {temporal}", "repeat the last frame to fill up"
        )
    grid = Grid.of(height, width, patch, merge=merge, t=frames // temporal)
    # (t S) C (h M P) (w M P) → t h w M M C S P P
    blocks = pixels.reshape(grid.t, temporal, channels, grid.rows, merge, patch, grid.columns, merge, patch).permute(
        0, 3, 6, 4, 7, 2, 1, 5, 8
    )
    return blocks.reshape(grid.patches, channels * temporal * patch * patch), grid


def from_blocks(patches: Tensor, grid: Grid, patch: int, *, temporal: int = 2) -> Tensor:
    """The frames (T, C, H, W) that `to_blocks` read; a still comes back `temporal` times."""
    channels = _channels(patches, grid, temporal * patch * patch)
    frames = patches.reshape(
        grid.t, grid.rows, grid.columns, grid.merge, grid.merge, channels, temporal, patch, patch
    ).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
    return frames.reshape(grid.t * temporal, channels, *grid.pixels(patch))


def to_rows(pixels: Tensor, patch: int) -> tuple[Tensor, Grid]:
    """NaFlex's order: raster patches, each flattened channel-last. (C, H, W) → (N, P·P·C) rows and their grid."""
    channels, height, width = pixels.shape
    grid = Grid.of(height, width, patch)
    # C (h P) (w P) → h w P P C
    rows = pixels.reshape(channels, grid.h, patch, grid.w, patch).permute(1, 3, 2, 4, 0)
    return rows.reshape(grid.patches, patch * patch * channels), grid


def from_rows(patches: Tensor, grid: Grid, patch: int) -> Tensor:
    """The picture (C, H, W) that `to_rows` read. Padding rows after the grid's own are left out."""
    channels = _channels(patches[: grid.patches], grid, patch * patch)
    pixels = patches[: grid.patches].reshape(grid.h, grid.w, patch, patch, channels).permute(4, 0, 2, 1, 3)
    return pixels.reshape(channels, *grid.pixels(patch))


def pad_rows(patches: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Zero rows up to `length`, and the boolean mask of the real ones: (N, D) → (L, D), (L)."""
    count = patches.shape[0]
    if count > length:
        raise ConfigError(f"{count} patches do not fit into {length}", "raise the length, or lower max_patches")
    padded = patches.new_zeros(length, patches.shape[1])
    padded[:count] = patches
    mask = patches.new_zeros(length).bool()
    mask[:count] = True
    return padded, mask


def _channels(patches: Tensor, grid: Grid, pixels: int) -> int:
    rows, width = patches.shape
    if rows != grid.patches or width % pixels:
        raise ConfigError(
            f"{rows} patches of {width} numbers do not fill a grid of {grid.t}×{grid.h}×{grid.w}",
            f"{grid.patches} patches of {pixels} numbers a channel are needed",
        )
    return width // pixels
