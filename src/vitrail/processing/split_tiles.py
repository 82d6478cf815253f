"""Image splitting of Idefics 3 and SmolVLM: tiles of the enlarged image, then the whole image."""

import math
from typing import TYPE_CHECKING

from PIL import Image

from vitrail.errors import ConfigError
from vitrail.processing.image_layout import (
    PIL_RESAMPLING,
    ImageLayout,
    ImageView,
    Resample,
    ResolutionPolicy,
    Size,
    check_image_size,
    full_view_span,
    render_views,
    square_grid,
)
from vitrail.registry import RESOLUTION_POLICIES

if TYPE_CHECKING:
    from vitrail.processing.video_sampling import SamplingRule

MAX_EDGE = 4096
"""Maximum length of the longest edge, as in the reference."""


@RESOLUTION_POLICIES.register("split")
class SplitPolicy(ResolutionPolicy, tag="split"):
    """Idefics 3: resize the longest edge to `longest_edge`, then both edges up to whole tiles, and cut.

    The tiles follow in raster order. The whole image, squashed to one tile, follows the tiles unless there is only one
    tile. Without `split`, there is only the whole image. Every step resizes the result of the one before it. With
    `takes_videos` (SmolVLM), each frame of a video is resized in the same steps, without tiles.
    """

    resample: Resample = "lanczos"
    tile_size: int = 364
    patch_size: int = 14
    unread_pixels: int = 0
    merge_size: int = 2
    longest_edge: int = 4 * 364
    split: bool = True
    takes_videos: bool = False

    def __post_init__(self) -> None:
        square_grid(self.tile_size, self.patch_size, self.unread_pixels, merge_size=self.merge_size)
        if not 1 <= self.longest_edge <= MAX_EDGE:
            raise ConfigError(f"SplitPolicy.longest_edge is {self.longest_edge}", f"give 1 … {MAX_EDGE} pixels")

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        tile, source = (self.tile_size, self.tile_size), (0, 0, height, width)
        grid = square_grid(self.tile_size, self.patch_size, self.unread_pixels, merge_size=self.merge_size)
        rows, columns = self._count_tiles(*self._fit_longest_edge(height, width))
        canvas = (rows * self.tile_size, columns * self.tile_size)
        places = [
            (canvas, (-row * self.tile_size, -column * self.tile_size))
            for row in range(rows)
            for column in range(columns)
        ]
        if len(places) > 1:
            places.append((tile, (0, 0)))
        views = tuple(
            ImageView(source=source, resized_size=resized, offset=offset, canvas_size=tile, grid=grid)
            for resized, offset in places
        )
        spans = tuple(full_view_span(view, first_view=index) for index, view in enumerate(views))
        return ImageLayout(height=height, width=width, views=views, spans=spans)

    @property
    def video_rule(self) -> "SamplingRule | None":
        return "smolvlm" if self.takes_videos else None

    def layout_video(self, num_frames: int) -> ImageLayout:
        """Return the layout of a video with `num_frames` frames: one squashed tile per frame."""
        [view] = self.replace(split=False).layout(self.tile_size, self.tile_size).views
        spans = tuple(full_view_span(view, first_view=n) for n in range(num_frames))
        return ImageLayout(height=self.tile_size, width=self.tile_size, views=(view,) * num_frames, spans=spans)

    def apply(self, image: Image.Image) -> list[Image.Image]:
        """Return the tiles and the whole image."""
        tall, wide = self._fit_longest_edge(image.height, image.width)
        rows, columns = self._count_tiles(tall, wide)
        filter, side = PIL_RESAMPLING[self.resample], self.tile_size
        layout = self.layout(image.height, image.width)
        image = image.resize((wide, tall), filter).resize((columns * side, rows * side), filter)
        views = tuple(view.replace(source=(0, 0, image.height, image.width)) for view in layout.views)
        return render_views(image, layout.replace(height=image.height, width=image.width, views=views), self.resample)

    def _fit_longest_edge(self, height: int, width: int) -> Size:
        """Return the size with this longest edge. The other edge is rounded down, then up to an even number."""
        ratio, edge = width / height, self.longest_edge
        if width >= height:
            short = int(edge / ratio)
            return max(short + short % 2, 1), edge
        short = int(edge * ratio)
        return edge, max(short + short % 2, 1)

    def _count_tiles(self, height: int, width: int) -> Size:
        """Return the rows and columns of tiles. The aspect ratio follows the longest edge in whole tiles."""
        if not self.split:
            return 1, 1
        ratio, tile = width / height, self.tile_size
        if width >= height:
            columns = math.ceil(width / tile)
            return math.ceil(int(columns * tile / ratio) / tile), columns
        rows = math.ceil(height / tile)
        return rows, math.ceil(int(rows * tile * ratio) / tile)
