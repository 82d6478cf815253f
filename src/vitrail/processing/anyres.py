"""Policies that split an image into tiles of the tower's input size, plus one view of the whole image."""

import math
from typing import TYPE_CHECKING

from vitrail.config import PositiveInt
from vitrail.errors import ConfigError
from vitrail.processing.image_layout import (
    Colour,
    ImageLayout,
    ImageView,
    PaddedPolicy,
    Rectangle,
    Size,
    ViewSpan,
    check_image_size,
    compute_centred_square_box,
    full_view_span,
    layout_frames,
    split_into_tiles,
    square_grid,
)
from vitrail.registry import RESOLUTION_POLICIES

if TYPE_CHECKING:
    from vitrail.processing.video_sampling import SamplingRule

# (rows, columns) of tiles. The order matters: the first of equally good grids wins.
MAX_TILES = 1024  # maximum number of tiles in an image and of grids in a config; protects against hostile configs
LLAVA_NEXT_GRIDS: tuple[Size, ...] = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
LLAVA_ONEVISION_GRIDS: tuple[Size, ...] = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))


@RESOLUTION_POLICIES.register("anyres")
class AnyResPolicy(PaddedPolicy, tag="anyres"):
    """LLaVA-NeXT: one tile with the whole squashed image, then the image split by the best grid of tiles.

    The best grid keeps the most image pixels; among equals, the one with the least padding. The image is resized into
    the grid with its aspect ratio kept, centred on `fill_colour`, and split in raster order. The tokens are those of
    the base view, then those of the stitched tiles without rows or columns in padding, with a newline after each row.

    max_tiles        N of LLaVA-OneVision's anyres_max_N. If the tiles have more than 1.1² × N tiles' worth of tokens,
                     their features are interpolated bilinearly to about N tiles' worth.
    video_pool_size  side of the pooling blocks of a video frame (LLaVA-NeXT-Video: 2)

    Scales use float64 exactly as in the reference, because rounding decides token counts. Edge case: an image less
    than one token row high keeps none of its tile tokens if a tile has an even number of rows. The model then reads
    only the base view.
    """

    tile_size: int = 336
    patch_size: int = 14
    unread_pixels: int = 0
    grids: tuple[Size, ...] = LLAVA_NEXT_GRIDS
    max_tiles: PositiveInt | None = None
    video_pool_size: int | None = None

    def __post_init__(self) -> None:
        square_grid(
            self.tile_size,
            self.patch_size,
            self.unread_pixels,
            merge_size=1 if self.video_pool_size is None else self.video_pool_size,
        )
        if not self.grids or min(map(min, self.grids)) < 1:
            raise ConfigError(f"AnyResPolicy.grids is {self.grids}", "give (rows, columns) of tiles, at least 1 each")
        most = max(rows * columns for rows, columns in self.grids)
        if most > MAX_TILES or len(self.grids) > MAX_TILES:
            raise ConfigError(
                f"AnyResPolicy.grids has {len(self.grids)} grids of up to {most:,} tiles", f"give at most {MAX_TILES}"
            )
        if self.max_tiles is not None and self.video_pool_size is not None:
            raise ConfigError(
                f"AnyResPolicy has both max_tiles {self.max_tiles} and video_pool_size {self.video_pool_size}",
                "give max_tiles (LLaVA-OneVision) or video_pool_size (LLaVA-NeXT-Video), not both",
            )

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        grid = square_grid(self.tile_size, self.patch_size, self.unread_pixels)
        rows, columns = self._best_grid(height, width)
        canvas = (rows * self.tile_size, columns * self.tile_size)
        resized = _fit_inside(height, width, canvas)
        top, left = (canvas[0] - resized[0]) // 2, (canvas[1] - resized[1]) // 2
        source, tile = (0, 0, height, width), (self.tile_size, self.tile_size)
        base = ImageView(source=source, resized_size=tile, offset=(0, 0), canvas_size=tile, grid=grid)
        tiles = split_into_tiles(source, resized, (rows, columns), grid, tile_size=self.tile_size, origin=(top, left))
        window = _unpadded_window(height, width, (rows * grid.num_rows, columns * grid.num_columns))
        size = _limit_tokens(window[2:], self.max_tiles, grid.num_tokens) if self.max_tiles else window[2:]
        stitched = ViewSpan(first_view=1, view_grid=(rows, columns), window=window, size=size, newline="row")
        return ImageLayout(height=height, width=width, views=(base, *tiles), spans=(full_view_span(base), stitched))

    @property
    def video_rule(self) -> "SamplingRule | None":
        if self.video_pool_size is not None:
            return "llava-next-video"
        return "llava-onevision" if self.max_tiles else None

    def layout_video(self, num_frames: int) -> ImageLayout:
        """Return the layout of a video with `num_frames` frames, one tile per frame.

        With `video_pool_size`, each block of a frame becomes one token, and there are no newlines. Without it, the
        layout matches LLaVA-OneVision: the tokens of a frame are interpolated to half as many rows and columns,
        rounded up, and one newline follows the last frame.
        """
        grid = square_grid(self.tile_size, self.patch_size, self.unread_pixels, merge_size=self.video_pool_size or 1)
        tile = (self.tile_size, self.tile_size)
        view = ImageView(source=(0, 0, *tile), resized_size=tile, offset=(0, 0), canvas_size=tile, grid=grid)
        layout = layout_frames(view, num_frames)
        if self.video_pool_size is not None:
            return layout
        half = (math.ceil(grid.num_rows / 2), math.ceil(grid.num_columns / 2))
        *spans, last = (span.replace(size=half) for span in layout.spans)
        return layout.replace(spans=(*spans, last.replace(newline="end")))

    def _best_grid(self, height: int, width: int) -> Size:
        def merit(shape: Size) -> tuple[int, int]:
            tall, wide = shape[0] * self.tile_size, shape[1] * self.tile_size
            scale = min(wide / width, tall / height)
            useful = min(int(width * scale) * int(height * scale), width * height)
            return useful, useful - tall * wide  # useful pixels, then minus the wasted pixels

        return max(self.grids, key=merit)


def _fit_inside(height: int, width: int, canvas: Size) -> Size:
    """Return the largest size with this aspect ratio inside the canvas. The free side is rounded up."""
    tall, wide = canvas
    by_width, by_height = wide / width, tall / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), tall), wide
    return tall, min(math.ceil(width * by_height), wide)


def _unpadded_window(height: int, width: int, tokens: Size) -> Rectangle:
    """Return the window of the stitched tokens that holds the image, with equal margins removed on both sides."""
    rows, columns = tokens
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        cut = (rows - kept) // 2
        return cut, 0, rows - 2 * cut, columns
    kept = int(round(width * (rows / height), 7))
    cut = (columns - kept) // 2
    return 0, cut, rows, columns - 2 * cut


def _limit_tokens(tokens: Size, max_tiles: int, tile_tokens: int) -> Size:
    rows, columns = tokens
    ratio = math.sqrt(rows * columns / (max_tiles * tile_tokens))
    return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else tokens


@RESOLUTION_POLICIES.register("hd9")
class HD9Policy(PaddedPolicy, tag="hd9"):
    """HD-9 of "Token scaling": nine local views in a 3 × 3 grid and one global view, 10 × 144 + 10 = 1450 tokens.

    A 3 × 3 convolution with stride 2 and padding 1 reduces the 24 × 24 patches of a 336² view to 12 × 12 tokens. A
    newline follows each view. The token count does not depend on the image.

    The paper says that the global view is made "through padding and zooming" and that the local views divide "the
    processed image". This implementation chooses what the paper leaves open:

    - The grid is always 3 × 3. Only then does every image have 1450 tokens. (InternLM-XComposer2-4KHD, which the
      method follows, chooses the number of tiles by aspect ratio.)
    - The image is centred on a square, then resized to 1008² and to 336² with bicubic resampling.
    - The padding is white, as in 4KHD. The global view comes first.
    """

    fill_colour: Colour = (255, 255, 255)
    tile_size: int = 336
    patch_size: int = 14
    merge_size: int = 2

    def __post_init__(self) -> None:
        square_grid(self.tile_size, self.patch_size, merge_size=self.merge_size)

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        grid = square_grid(self.tile_size, self.patch_size, merge_size=self.merge_size)
        source = compute_centred_square_box(height, width)
        tile, full = (self.tile_size, self.tile_size), (3 * self.tile_size, 3 * self.tile_size)
        views = [ImageView(source=source, resized_size=tile, offset=(0, 0), canvas_size=tile, grid=grid)]
        views += split_into_tiles(source, full, (3, 3), grid, tile_size=self.tile_size)
        spans = tuple(full_view_span(view, first_view=index, newline="end") for index, view in enumerate(views))
        return ImageLayout(height=height, width=width, views=tuple(views), spans=spans)
