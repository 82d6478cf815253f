"""InternVL's dynamic tiling: tiles of the grid with the nearest aspect ratio, then a thumbnail."""

from typing import TYPE_CHECKING

from vitrail.errors import ConfigError
from vitrail.processing.image_layout import (
    ImageLayout,
    ResolutionPolicy,
    Size,
    check_image_size,
    full_view_span,
    layout_frames,
    split_into_tiles,
    square_grid,
)
from vitrail.registry import RESOLUTION_POLICIES

if TYPE_CHECKING:
    from vitrail.processing.video_sampling import SamplingRule


@RESOLUTION_POLICIES.register("tiles")
class TilesPolicy(ResolutionPolicy, tag="tiles"):
    """InternVL: squash the image to the grid of `min_tiles` to `max_tiles` tiles with the nearest aspect ratio.

    The tiles follow in raster order. A thumbnail of the whole image follows the tiles unless there is only one tile.

    "Nearest" is the plain difference of width / height, so wide grids are further apart than tall ones. Of grids with
    equal ratios, the policy takes the larger one if the image has more than half its pixels. Each view is read
    separately, without newlines. By default, a view has 448² pixels in patches of 14; merging 2 × 2 gives 256 tokens.
    """

    tile_size: int = 448
    patch_size: int = 14
    merge_size: int = 2
    min_tiles: int = 1
    max_tiles: int = 12

    def __post_init__(self) -> None:
        square_grid(self.tile_size, self.patch_size, merge_size=self.merge_size)
        if not 1 <= self.min_tiles <= self.max_tiles:
            raise ConfigError(
                f"TilesPolicy: min_tiles {self.min_tiles} and max_tiles {self.max_tiles}",
                "give 1 ≤ min_tiles ≤ max_tiles",
            )

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        grid = square_grid(self.tile_size, self.patch_size, merge_size=self.merge_size)
        tile = self.tile_size
        source = (0, 0, height, width)
        rows, columns = self.find_nearest_grid(height, width)
        views = split_into_tiles(source, (rows * tile, columns * tile), (rows, columns), grid, tile_size=tile)
        if len(views) > 1:
            views += split_into_tiles(source, (tile, tile), (1, 1), grid, tile_size=tile)
        spans = tuple(full_view_span(view, first_view=i) for i, view in enumerate(views))
        return ImageLayout(height=height, width=width, views=tuple(views), spans=spans)

    @property
    def video_rule(self) -> "SamplingRule":
        return "internvl"

    def layout_video(self, num_frames: int) -> ImageLayout:
        """Return the layout of a video with `num_frames` frames: one squashed tile per frame, without thumbnails."""
        [view] = self.replace(min_tiles=1, max_tiles=1).layout(self.tile_size, self.tile_size).views
        return layout_frames(view, num_frames)

    def find_nearest_grid(self, height: int, width: int) -> Size:
        """Return the (rows, columns) of tiles with the nearest aspect ratio."""
        ratio, area = width / height, width * height
        best: Size = (1, 1)
        nearest = float("inf")
        for rows, columns in self._grids():
            distance = abs(ratio - columns / rows)
            if distance < nearest or (distance == nearest and area > 0.5 * self.tile_size**2 * rows * columns):
                nearest, best = distance, (rows, columns)
        return best

    def _grids(self) -> list[Size]:
        """Return the grids by ascending number of tiles, tall grids first among equals."""
        sides = range(1, self.max_tiles + 1)
        found = [(rows, columns) for columns in sides for rows in range(1, self.max_tiles // columns + 1)]
        return sorted((g for g in found if g[0] * g[1] >= self.min_tiles), key=lambda grid: grid[0] * grid[1])
