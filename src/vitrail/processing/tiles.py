"""InternVL's tiles: a picture at the grid whose shape is most like its own, then one view of the whole."""

from vitrail.errors import ConfigError
from vitrail.processing.cut import Cut, Policy, Size, View, check_picture, square, whole


class Tiles(Policy, tag="tiles"):
    """InternVL: squashed to the grid of `least` … `most` tiles that is nearest in width / height, cut in raster order,
    and behind the tiles the picture squashed to one; of a single tile there is no such view.

    Nearest is by the plain difference of the ratios, so that wide grids lie further apart than tall ones. Of grids with
    one ratio the larger is taken while the picture has more than half its pixels. Every view is read by itself, with
    no newlines: 256 tokens each, 448 pixels in patches of 14, of which 2 × 2 become one.
    """

    tile: int = 448
    patch: int = 14
    merge: int = 2
    least: int = 1
    most: int = 12

    def __post_init__(self) -> None:
        square(self.tile, self.patch, merge=self.merge)
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"Tiles: from {self.least} to {self.most} tiles", "give 1 ≤ least ≤ most")

    def cut(self, height: int, width: int) -> Cut:
        check_picture(height, width)
        grid, tile, source = square(self.tile, self.patch, merge=self.merge), self.tile, (0, 0, height, width)
        rows, columns = self._best(height, width)
        places = [((rows * tile, columns * tile), (-r * tile, -c * tile)) for r in range(rows) for c in range(columns)]
        if len(places) > 1:
            places.append(((tile, tile), (0, 0)))
        views = tuple(
            View(source=source, resized=resized, offset=offset, canvas=(tile, tile), grid=grid)
            for resized, offset in places
        )
        return Cut(height=height, width=width, views=views, spans=tuple(whole(v, first=i) for i, v in enumerate(views)))

    def film(self, frames: int) -> Cut:
        """A video: each of so many frames a tile, squashed, and none of the whole behind them."""
        [view] = self.with_(least=1, most=1).cut(self.tile, self.tile).views
        spans = tuple(whole(view, first=n) for n in range(frames))
        return Cut(height=self.tile, width=self.tile, views=(view,) * frames, spans=spans)

    def _best(self, height: int, width: int) -> Size:
        ratio, area = width / height, width * height
        best: Size = (1, 1)
        nearest = float("inf")
        for rows, columns in self._grids():
            far = abs(ratio - columns / rows)
            if far < nearest or (far == nearest and area > 0.5 * self.tile**2 * rows * columns):
                nearest, best = far, (rows, columns)
        return best

    def _grids(self) -> list[Size]:
        """From few tiles to many; of as many, tall ones first."""
        sides = range(1, self.most + 1)
        found = [(rows, columns) for columns in sides for rows in range(1, self.most // columns + 1)]
        return sorted((g for g in found if g[0] * g[1] >= self.least), key=lambda grid: grid[0] * grid[1])
