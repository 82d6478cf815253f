"""Llama-3.2-Vision's tiles: a picture laid on the canvas of a few tiles that suits it best."""

import math

from vitrail.errors import ConfigError
from vitrail.processing.cut import Cut, Padded, Resample, Size, Span, View, check_picture, square


class Canvas(Padded, tag="canvas"):
    """Llama-3.2-Vision: the picture, its aspect kept, in the top left corner of a canvas of at most `most` tiles, which
    is cut in raster order. There is no view of the whole.

    The best canvas enlarges the picture least; if all would shrink it, the one that does so least; of equals the
    smallest. Enlarged to fill a canvas it is not: at most until one side is a tile's. The tokens are the patches of all
    tiles, padding included: the blocks that look at them see it too.
    """

    resample: Resample = "bilinear"
    tile: int = 560
    patch: int = 14
    most: int = 4

    def __post_init__(self) -> None:
        square(self.tile, self.patch)
        if self.most < 1:
            raise ConfigError(f"Canvas.most is {self.most} tiles", "give at least 1")

    @property
    def ratios(self) -> tuple[Size, ...]:
        """The (rows, columns) there are; the id of a ratio is its place here, counted from 1."""
        sides = range(1, self.most + 1)
        return tuple((rows, columns) for rows in sides for columns in range(1, self.most // rows + 1))

    def cut(self, height: int, width: int) -> Cut:
        check_picture(height, width)
        grid, tile = square(self.tile, self.patch), self.tile
        rows, columns = self._best(height, width)
        resized = self._fit(height, width, (rows * tile, columns * tile))
        views = tuple(
            View(
                source=(0, 0, height, width),
                resized=resized,
                offset=(-row * tile, -column * tile),
                canvas=(tile, tile),
                grid=grid,
            )
            for row in range(rows)
            for column in range(columns)
        )
        size = (rows * grid.rows, columns * grid.columns)
        span = Span(first=0, layout=(rows, columns), window=(0, 0, *size), size=size)
        return Cut(height=height, width=width, views=views, spans=(span,))

    def _best(self, height: int, width: int) -> Size:
        # Float64, as in the reference: equal scales are equal to the last bit.
        def merit(ratio: Size) -> tuple[bool, float, int]:
            scale = min(ratio[0] * self.tile / height, ratio[1] * self.tile / width)
            return scale < 1, scale if scale >= 1 else -scale, ratio[0] * ratio[1]

        return min(self.ratios, key=merit)

    def _fit(self, height: int, width: int, canvas: Size) -> Size:
        tall, wide = (min(max(side, self.tile), most) for side, most in zip((height, width), canvas, strict=True))
        down, across = tall / height, wide / width
        if across < down:
            return min(math.floor(height * across) or 1, tall), wide
        return tall, min(math.floor(width * down) or 1, wide)
