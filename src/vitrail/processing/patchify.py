"""Convert images to flat patches and back, in the orders that released towers expect.

Shapes: T frames, C channels, N patches of P × P pixels and S frames; M × M patches merge into one token. The functions
only reorder values, so gradients pass through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.errors import ConfigError
from vitrail.processing.grid import Grid

if TYPE_CHECKING:
    from torch import Tensor


def patchify_blocks(
    pixels: Tensor, patch_size: int, *, merge_size: int = 2, temporal_patch_size: int = 2
) -> tuple[Tensor, Grid]:
    """Patchify in Qwen's order: the M² patches of one token are adjacent, so merging is a reshape.

    `pixels` is a still image (C, H, W), which is repeated to fill the temporal patch, or frames (T, C, H, W). Returns
    patches (N, C·S·P·P) and their grid.
    """
    if pixels.ndim == 3:
        pixels = pixels.expand(temporal_patch_size, *pixels.shape)  # (C,H,W) → (S,C,H,W)
    frames, channels, height, width = pixels.shape
    if temporal_patch_size < 1 or frames % temporal_patch_size:
        raise ConfigError(
            f"{frames} frames are not divisible into temporal patches of {temporal_patch_size}",
            "repeat the last frame until the count is divisible",
        )
    grid = Grid.from_pixels(height, width, patch_size, merge_size=merge_size, t=frames // temporal_patch_size)
    # (t S) C (h M P) (w M P) → t h w M M C S P P
    blocks = pixels.reshape(
        grid.t,
        temporal_patch_size,
        channels,
        grid.num_rows,
        merge_size,
        patch_size,
        grid.num_columns,
        merge_size,
        patch_size,
    ).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return blocks.reshape(grid.num_patches, channels * temporal_patch_size * patch_size * patch_size), grid


def unpatchify_blocks(patches: Tensor, grid: Grid, patch_size: int, *, temporal_patch_size: int = 2) -> Tensor:
    """Invert `patchify_blocks`: return frames (T, C, H, W). A still image is repeated `temporal_patch_size` times."""
    channels = _channels(patches, grid, temporal_patch_size * patch_size * patch_size)
    frames = patches.reshape(
        grid.t,
        grid.num_rows,
        grid.num_columns,
        grid.merge_size,
        grid.merge_size,
        channels,
        temporal_patch_size,
        patch_size,
        patch_size,
    ).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
    return frames.reshape(grid.t * temporal_patch_size, channels, *grid.pixel_size(patch_size))


def patchify_rows(pixels: Tensor, patch_size: int) -> tuple[Tensor, Grid]:
    """Patchify in NaFlex's order: raster order, channel-last. (C, H, W) → patches (N, P·P·C) and their grid."""
    channels, height, width = pixels.shape
    grid = Grid.from_pixels(height, width, patch_size)
    # C (h P) (w P) → h w P P C
    rows = pixels.reshape(channels, grid.h, patch_size, grid.w, patch_size).permute(1, 3, 2, 4, 0)
    return rows.reshape(grid.num_patches, patch_size * patch_size * channels), grid


def unpatchify_rows(patches: Tensor, grid: Grid, patch_size: int) -> Tensor:
    """Invert `patchify_rows`: return the image (C, H, W). Padding patches after the grid's own are ignored."""
    channels = _channels(patches[: grid.num_patches], grid, patch_size * patch_size)
    pixels = (
        patches[: grid.num_patches].reshape(grid.h, grid.w, patch_size, patch_size, channels).permute(4, 0, 2, 1, 3)
    )
    return pixels.reshape(channels, *grid.pixel_size(patch_size))


def pad_patches(patches: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Pad patches with zeros to `length` and return the mask of real patches: (N, D) → (L, D), (L)."""
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
    if rows != grid.num_patches or width % pixels:
        raise ConfigError(
            f"{rows} patches of {width} values do not match a grid of {grid.t}×{grid.h}×{grid.w}",
            f"give {grid.num_patches} patches with a multiple of {pixels} values",
        )
    return width // pixels
