"""Tiles of DeepSeek-VL2: the whole image on a square, then its tiles, both padded."""

from vitrail.errors import ConfigError
from vitrail.processing.anyres import MAX_TILES
from vitrail.processing.grid import Grid
from vitrail.processing.image_layout import (
    Colour,
    ImageLayout,
    ImageView,
    PaddedPolicy,
    Size,
    ViewSpan,
    check_image_size,
    full_view_span,
    split_into_tiles,
    square_grid,
)
from vitrail.registry import RESOLUTION_POLICIES


def _list_grids(max_tiles: int) -> tuple[Size, ...]:
    """List the grids of at most `max_tiles` tiles by their number, thin ones first, and tall before wide."""
    pairs = [(n // k, k) for n in range(1, max_tiles + 1) for k in range(1, n + 1) if n % k == 0 and k * k <= n]
    return tuple(dict.fromkeys(grid for long, short in pairs for grid in ((long, short), (short, long))))


DEEPSEEK_VL2_GRIDS = _list_grids(9)
"""(rows, columns) of tiles. The order matters: the first of equally good grids wins."""


@RESOLUTION_POLICIES.register("padded-tiles")
class PaddedTilesPolicy(PaddedPolicy, tag="padded-tiles"):
    """DeepSeek-VL2: a view of the whole image, then the image split by the best grid of tiles.

    Both keep the aspect ratio and are centred on `fill_colour`. The best grid is that of LLaVA-NeXT's anyres: it keeps
    the most image pixels and, among equals, has the least padding. merge_size × merge_size patches become a token;
    incomplete blocks are padded. A newline follows each row of both, and a separator lies between them.

    max_tiled_images  in a conversation with more images, each has one tile
    """

    fill_colour: Colour = (127, 127, 127)
    tile_size: int = 384
    patch_size: int = 14
    unread_pixels: int = 6
    merge_size: int = 2
    grids: tuple[Size, ...] = DEEPSEEK_VL2_GRIDS
    max_tiled_images: int = 2

    def __post_init__(self) -> None:
        self._tile_grid()
        if not self.grids or min(map(min, self.grids)) < 1:
            raise ConfigError(
                f"PaddedTilesPolicy.grids is {self.grids}", "give (rows, columns) of tiles, at least 1 each"
            )
        most = max(rows * columns for rows, columns in self.grids)
        if most > MAX_TILES or len(self.grids) > MAX_TILES:
            raise ConfigError(
                f"PaddedTilesPolicy.grids has {len(self.grids)} grids of up to {most:,} tiles",
                f"give at most {MAX_TILES}",
            )

    def for_images(self, count: int) -> "PaddedTilesPolicy":
        return self if count <= self.max_tiled_images else self.replace(grids=((1, 1),))

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        side, grid = self.tile_size, self._tile_grid()
        rows, columns = self._best_grid(height, width)
        source = (0, 0, height, width)
        whole, whole_origin = _fit_inside(height, width, (side, side))
        tiled, tiled_origin = _fit_inside(height, width, (rows * side, columns * side))
        base = ImageView(source=source, resized_size=whole, offset=whole_origin, canvas_size=(side, side), grid=grid)
        tiles = split_into_tiles(source, tiled, (rows, columns), grid, tile_size=side, origin=tiled_origin)
        size = (rows * grid.num_rows, columns * grid.num_columns)
        stitched = ViewSpan(first_view=1, view_grid=(rows, columns), window=(0, 0, *size), size=size, newline="row")
        spans = (full_view_span(base, newline="row_and_end"), stitched)
        return ImageLayout(height=height, width=width, views=(base, *tiles), spans=spans)

    def _tile_grid(self) -> Grid:
        if self.merge_size < 1:
            raise ConfigError(f"PaddedTilesPolicy.merge_size is {self.merge_size}", "give at least 1")
        grid = square_grid(self.tile_size, self.patch_size, self.unread_pixels)
        return grid.replace(merge_size=self.merge_size, padded=True)

    def _best_grid(self, height: int, width: int) -> Size:
        def merit(shape: Size) -> tuple[int, int]:
            tall, wide = shape[0] * self.tile_size, shape[1] * self.tile_size
            scale = min(wide / width, tall / height)
            useful = min(int(width * scale) * int(height * scale), width * height)
            return useful, useful - tall * wide  # useful pixels, then minus the wasted pixels

        return max(self.grids, key=merit)


def _fit_inside(height: int, width: int, canvas: Size) -> tuple[Size, Size]:
    """Return the largest size with this aspect ratio inside the canvas, and its centred origin, as PIL pads images."""
    tall, wide = canvas
    if width / height > wide / tall:
        tall = max(round(height / width * wide), 1)
    elif width / height < wide / tall:
        wide = max(round(width / height * tall), 1)
    return (tall, wide), (round((canvas[0] - tall) * 0.5), round((canvas[1] - wide) * 0.5))
