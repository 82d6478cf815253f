"""Tiles of Phi-3.5-vision and Phi-4-multimodal: a padded canvas of whole tiles, and a small view of the whole canvas.

The tokens are those of the stitched tiles, a separator, and those of the whole view. A newline ends each row. The whole
view is interpolated from the normalized canvas, so its pixels are no integer levels.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from PIL import Image

from vitrail.errors import ConfigError
from vitrail.processing.image_layout import (
    PIL_RESAMPLING,
    Colour,
    ImageLayout,
    ImageView,
    PaddedPolicy,
    Resample,
    Size,
    ViewSpan,
    check_image_size,
    full_view_span,
    split_into_tiles,
    square_grid,
)
from vitrail.processing.image_loading import to_pixel_values
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.registry import RESOLUTION_POLICIES

if TYPE_CHECKING:
    from torch import Tensor

MAX_TILES = 1000  # protects against hostile configs
MIN_SIDE = 10  # least pixels of a resized side; the reference of Phi-4-multimodal refuses thinner strips


class CanvasPlacement(NamedTuple):
    """Placement of an image on a canvas of tiles.

    tiles         (rows, columns) of tiles
    resized_size  size of the image on the canvas
    origin        position of its top left corner
    is_turned     whether the image is transposed while it is resized
    """

    tiles: Size
    resized_size: Size
    origin: Size = (0, 0)
    is_turned: bool = False


class CanvasTilesPolicy(PaddedPolicy):
    """Base class of the policies that tile a padded canvas."""

    resample: Resample = "bilinear"
    fill_colour: Colour = (255, 255, 255)
    tile_size: int = 336
    patch_size: int = 14
    merge_size: int = 2
    max_tiles: int = 16

    def __post_init__(self) -> None:
        square_grid(self.tile_size, self.patch_size, merge_size=self.merge_size)
        if not 1 <= self.max_tiles <= MAX_TILES:
            raise ConfigError(f"{type(self).__name__}.max_tiles is {self.max_tiles}", f"give 1 … {MAX_TILES:,}")

    def place(self, height: int, width: int) -> CanvasPlacement:
        """Return the placement of an image of this size on its canvas."""
        raise NotImplementedError

    def count_read_tokens(self, placement: CanvasPlacement) -> Size:
        """Return the rows and columns of tokens of the canvas that the model reads."""
        return self._count_cells(placement, self.merge_size)

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        found, side, source = self.place(height, width), self.tile_size, (0, 0, height, width)
        grid = square_grid(side, self.patch_size, merge_size=self.merge_size)
        (tall, wide), (top, left), (rows, columns) = found.resized_size, found.origin, found.tiles
        whole = ImageView(
            source=source,
            resized_size=(max(round(tall / rows), 1), max(round(wide / columns), 1)),
            offset=(round(top / rows), round(left / columns)),
            canvas_size=(side, side),
            grid=grid,
        )
        tiles = split_into_tiles(source, found.resized_size, found.tiles, grid, tile_size=side, origin=found.origin)
        read = self.count_read_tokens(found)
        stitched = ViewSpan(first_view=0, view_grid=found.tiles, window=(0, 0, *read), size=read, newline="row")
        last = full_view_span(whole, first_view=len(tiles)).replace(newline="row")
        separator = last.replace(window=(0, 0, 0, 0), size=(0, 0), newline="end")
        spans = (stitched, separator, last)
        return ImageLayout(height=height, width=width, views=(*tiles, whole), spans=spans)

    def apply(self, image: Image.Image) -> list[Image.Image]:
        """Return the tiles, and the whole view rounded to integer levels."""
        canvas, side = self._render_canvas(image), self.tile_size
        levels = self._shrink(to_pixel_values(canvas, (0.0,) * 3, (1.0,) * 3, 1.0))
        whole = levels.round().clamp(0, 255).movedim(0, -1).numpy().astype(np.uint8)
        corners = [(x, y) for y in range(0, canvas.height, side) for x in range(0, canvas.width, side)]
        return [*(canvas.crop((x, y, x + side, y + side)) for x, y in corners), Image.fromarray(whole)]

    def to_pixel_values(self, image: Image.Image, mean: Sequence[float], std: Sequence[float]) -> "list[Tensor]":
        canvas, side = to_pixel_values(self._render_canvas(image), mean, std), self.tile_size
        tiles = canvas.unfold(1, side, side).unfold(2, side, side)  # (C, rows, columns, H, W)
        return [*tiles.permute(1, 2, 0, 3, 4).flatten(0, 1), self._shrink(canvas)]

    def _render_canvas(self, image: Image.Image) -> Image.Image:
        found, resample = self.place(image.height, image.width), PIL_RESAMPLING[self.resample]
        tall, wide = found.resized_size
        if found.is_turned:  # PIL rounds between the two axes, so their order matters
            turned = image.transpose(Image.Transpose.TRANSPOSE).resize((tall, wide), resample)
            resized = turned.transpose(Image.Transpose.TRANSPOSE)
        else:
            resized = image.resize((wide, tall), resample)
        rows, columns = found.tiles
        canvas = Image.new("RGB", (columns * self.tile_size, rows * self.tile_size), self.fill_colour)
        canvas.paste(resized, found.origin[::-1])
        return canvas

    def _shrink(self, canvas: "Tensor") -> "Tensor":
        """Interpolate a canvas (C, H, W) to one tile, without antialiasing."""
        from torch.nn.functional import interpolate

        return interpolate(canvas[None], size=(self.tile_size, self.tile_size), mode="bicubic")[0]

    def _count_cells(self, placement: CanvasPlacement, patches: int) -> Size:
        """Return the rows and columns of cells of `patches` × `patches` patches on the canvas."""
        rows, columns = (count * self.tile_size // (self.patch_size * patches) for count in placement.tiles)
        return rows, columns


@RESOLUTION_POLICIES.register("hd-transform")
class HDTransformPolicy(CanvasTilesPolicy, tag="hd-transform"):
    """Phi-3-vision: enlarge the image to the largest width of whole tiles with at most `max_tiles` tiles.

    The image is centred vertically on white. A portrait is transposed first, so its height is filled and it is centred
    horizontally. All tokens of the canvas are read, padding included. A strip keeps at least one pixel.
    """

    def place(self, height: int, width: int) -> CanvasPlacement:
        long, short = max(height, width), min(height, width)
        ratio, scale = long / short, 1
        while (scale + 1) * math.ceil((scale + 1) / ratio) <= self.max_tiles:
            scale += 1
        across = scale * self.tile_size
        down = max(int(across / ratio), 1)
        rows = math.ceil(down / self.tile_size)
        margin = (rows * self.tile_size - down) // 2
        if width >= height:
            return CanvasPlacement((rows, scale), (down, across), (margin, 0))
        return CanvasPlacement((scale, rows), (across, down), (0, margin), is_turned=True)


@RESOLUTION_POLICIES.register("dynamic-hd")
class DynamicHDPolicy(CanvasTilesPolicy, tag="dynamic-hd"):
    """Phi-4-multimodal: resize the image into whole tiles, at most `max_tiles`, at the top left on white.

    More tiles than `max_tiles` become the grid with the nearest aspect ratio (see `TilesPolicy`). The tower does not
    attend to patches of tiles in padding, and rows and columns of tokens in padding are dropped. A strip keeps at least
    10 pixels on its short side.
    """

    masks_padding: ClassVar[bool] = True

    tile_size: int = 448
    max_tiles: int = 36

    def place(self, height: int, width: int) -> CanvasPlacement:
        side = self.tile_size
        rows, columns = (math.ceil(pixels / side) for pixels in (height, width))
        if rows * columns > self.max_tiles:
            tiles = TilesPolicy(
                tile_size=side, patch_size=self.patch_size, merge_size=self.merge_size, max_tiles=self.max_tiles
            )
            rows, columns = tiles.find_nearest_grid(height, width)
        tall, wide = rows * side, columns * side
        down, across = tall / height, wide / width
        least = min(MIN_SIDE, side)
        size = (max(int(height * across), least), wide) if across < down else (tall, max(int(width * down), least))
        return CanvasPlacement((rows, columns), size)

    def count_covered_patches(self, placement: CanvasPlacement) -> Size:
        """Return the rows and columns of patches of the canvas that the image covers, even in part."""
        tall, wide = placement.resized_size
        return math.ceil(tall / self.patch_size), math.ceil(wide / self.patch_size)

    def count_read_tokens(self, placement: CanvasPlacement) -> Size:
        rows, columns = self.count_covered_patches(placement)
        return math.ceil(rows / self.merge_size), math.ceil(columns / self.merge_size)

    def list_covered_grids(self, height: int, width: int) -> list[Size]:
        """Return the rows and columns of patches of each view that the tower attends to: all of the whole view."""
        found, side = self.place(height, width), self.tile_size // self.patch_size
        rows, columns = self.count_covered_patches(found)
        down, across = (
            [min(max(count - i * side, 0), side) for i in range(number)]
            for count, number in zip((rows, columns), found.tiles, strict=True)
        )
        return [*((h, w) for h in down for w in across), (side, side)]
