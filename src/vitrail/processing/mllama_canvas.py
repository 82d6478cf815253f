"""Llama-3.2-Vision's tiling: the image is pasted onto the best canvas of a few tiles."""

import math

from vitrail.config import PositiveInt
from vitrail.processing.image_layout import (
    ImageLayout,
    PaddedPolicy,
    Resample,
    Size,
    ViewSpan,
    check_image_size,
    split_into_tiles,
    square_grid,
)
from vitrail.registry import RESOLUTION_POLICIES


@RESOLUTION_POLICIES.register("canvas")
class CanvasPolicy(PaddedPolicy, tag="canvas"):
    """Llama-3.2-Vision: paste the image, aspect ratio kept, at the top left of a canvas of at most `max_tiles` tiles.

    The canvas is split into tiles in raster order. There is no thumbnail.

    The best canvas enlarges the image least. If every canvas shrinks the image, the best one shrinks it least. Among
    equals, the smallest canvas wins. The image is enlarged at most until one side reaches the tile size. The tokens
    are the patches of all tiles, padding included.
    """

    resample: Resample = "bilinear"
    tile_size: int = 560
    patch_size: int = 14
    max_tiles: PositiveInt = 4

    def __post_init__(self) -> None:
        square_grid(self.tile_size, self.patch_size)

    @property
    def tile_grids(self) -> tuple[Size, ...]:
        """All (rows, columns) of tiles. The aspect ratio id of a grid is its index here plus 1."""
        sides = range(1, self.max_tiles + 1)
        return tuple((rows, columns) for rows in sides for columns in range(1, self.max_tiles // rows + 1))

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        grid, tile = square_grid(self.tile_size, self.patch_size), self.tile_size
        rows, columns = self._best_grid(height, width)
        resized = self._resized_size(height, width, (rows * tile, columns * tile))
        views = tuple(split_into_tiles((0, 0, height, width), resized, (rows, columns), grid, tile_size=tile))
        size = (rows * grid.num_rows, columns * grid.num_columns)
        span = ViewSpan(first_view=0, view_grid=(rows, columns), window=(0, 0, *size), size=size)
        return ImageLayout(height=height, width=width, views=views, spans=(span,))

    def _best_grid(self, height: int, width: int) -> Size:
        # Use float64, as in the reference, so that equal scales compare equal.
        def merit(ratio: Size) -> tuple[bool, float, int]:
            scale = min(ratio[0] * self.tile_size / height, ratio[1] * self.tile_size / width)
            return scale < 1, scale if scale >= 1 else -scale, ratio[0] * ratio[1]

        return min(self.tile_grids, key=merit)

    def _resized_size(self, height: int, width: int, canvas: Size) -> Size:
        tall, wide = (min(max(side, self.tile_size), most) for side, most in zip((height, width), canvas, strict=True))
        down, across = tall / height, wide / width
        if across < down:
            return min(math.floor(height * across) or 1, tall), wide
        return tall, min(math.floor(width * down) or 1, wide)
