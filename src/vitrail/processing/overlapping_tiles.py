"""Overlapping tiles of Molmo: the whole image, then tiles of an enlarged one that share their margins.

Shapes: V views, N patches of a view.
"""

import numpy as np

from vitrail.errors import ConfigError
from vitrail.processing.image_layout import (
    ImageLayout,
    ImageView,
    PaddedPolicy,
    Resample,
    Size,
    ViewSpan,
    check_image_size,
    full_view_span,
    square_grid,
)
from vitrail.registry import RESOLUTION_POLICIES

WHOLE, PADDING, PARTIAL = 0, 1, 2
"""Kinds of patches: without padding, padding only, with some padding."""


@RESOLUTION_POLICIES.register("overlap")
class OverlapPolicy(PaddedPolicy, tag="overlap"):
    """Molmo: the image padded to one tile, then tiles of the image padded to a grid of at most `max_tiles` tiles.

    Neighbouring tiles share `margins[0] + margins[1]` patches: the last margin of a tile shows what lies behind the
    inside of the next one, and so on. The tokens of shared margins are dropped, so that the tiles form one picture,
    which keeps its outer margins. The grid needs the least enlargement of all that need no reduction, or else the least
    reduction. Each row of tokens ends with a newline.

    margins  patches on the first and the last side of a tile
    """

    resample: Resample = "bilinear"
    tile_size: int = 336
    patch_size: int = 14
    merge_size: int = 2
    max_tiles: int = 12
    margins: tuple[int, int] = (4, 4)

    def __post_init__(self) -> None:
        grid = square_grid(self.tile_size, self.patch_size, merge_size=self.merge_size)
        if any(n < 0 or n % self.merge_size for n in self.margins) or sum(self.margins) >= grid.h:
            raise ConfigError(
                f"OverlapPolicy.margins are {self.margins} of {grid.h} patches",
                f"give two multiples of {self.merge_size} that leave an inside",
            )
        if not 1 <= self.max_tiles <= 1000:
            raise ConfigError(f"OverlapPolicy.max_tiles is {self.max_tiles}", "give 1 … 1,000")

    @property
    def shared_size(self) -> int:
        """Pixels that neighbouring tiles share."""
        return sum(self.margins) * self.patch_size

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        step, shared, tile = self.tile_size - self.shared_size, self.shared_size, (self.tile_size, self.tile_size)
        rows, columns = self._find_grid(height - shared, width - shared)
        resized, (top, left) = _fit(height, width, (rows * step + shared, columns * step + shared))
        places = [(resized, (top - r * step, left - c * step)) for r in range(rows) for c in range(columns)]
        grid = square_grid(self.tile_size, self.patch_size, merge_size=self.merge_size)
        views = tuple(
            ImageView(source=(0, 0, height, width), resized_size=size, offset=offset, canvas_size=tile, grid=grid)
            for size, offset in [_fit(height, width, tile), *places]
        )
        before, after = (n // self.merge_size for n in self.margins)
        inside = grid.num_rows - before - after
        size = (rows * inside + before + after, columns * inside + before + after)
        mosaic = ViewSpan(
            first_view=1,
            view_grid=(rows, columns),
            window=(0, 0, *size),
            size=size,
            newline="row",
            overlap=(before, after),
        )
        spans = (full_view_span(views[0]).replace(newline="row"), mosaic)
        return ImageLayout(height=height, width=width, views=views, spans=spans)

    def classify_patches(self, layout: ImageLayout) -> np.ndarray:
        return find_padding(layout, self.patch_size)

    def _find_grid(self, height: int, width: int) -> Size:
        """Return the (rows, columns) of tiles, in the float32 arithmetic of the reference."""
        step, sides = self.tile_size - self.shared_size, range(1, self.max_tiles + 1)
        grids = [(rows, columns) for rows in sides for columns in sides if rows * columns <= self.max_tiles]
        grids.sort(key=lambda grid: (grid[0] * grid[1], grid[0]))
        with np.errstate(divide="ignore"):  # a side may be as long as both margins
            scales = (np.array(grids) * step).astype(np.float32) / np.array([height, width], dtype=np.float32)
        scale = scales.min(axis=1)
        if (scale < 1).all():
            return grids[int(scale.argmax())]
        return grids[int(np.where(scale < 1, np.float32(10e9), scale).argmin())]


def _fit(height: int, width: int, canvas: Size) -> tuple[Size, Size]:
    """Return the size of an image that fits into a canvas, and its place there, in float32 as the reference."""
    tall, wide = np.float32(height), np.float32(width)
    scale = min(np.float32(canvas[0]) / tall, np.float32(canvas[1]) / wide)
    size = max(int(tall * scale), 1), max(int(wide * scale), 1)
    return size, ((canvas[0] - size[0]) // 2, (canvas[1] - size[1]) // 2)


def find_padding(layout: ImageLayout, patch_size: int) -> np.ndarray:
    """Return the kinds of all patches of an image, (V, N), as Molmo was trained with them.

    The kinds of the first tile count for the whole image, those of each further tile for the one before it, and all
    patches of the last tile have some padding: the masks of the tiles start one view too early in the published code.
    """
    tiles = [_classify_patches(view, patch_size) for view in layout.views[1:]]
    return np.stack([*tiles, np.full_like(tiles[0], PARTIAL)])


def _classify_patches(view: ImageView, patch_size: int) -> np.ndarray:
    """Return the kinds of the patches of a view, (N,), row by row."""
    covered = []
    for count, start, length in zip((view.grid.h, view.grid.w), view.offset, view.resized_size, strict=True):
        first = np.arange(count) * patch_size
        ends = np.minimum(first + patch_size, start + length)
        covered.append(np.maximum(ends - np.maximum(first, start), 0))
    pixels = np.outer(*covered).flatten()
    return np.select([pixels == 0, pixels == patch_size**2], [PADDING, WHOLE], PARTIAL)
