"""Image layouts: the integer description that a resolution policy returns, and the code that renders it to pixels.

- An **image view** is one input of the vision tower: a rectangle of the source, resized and pasted onto a canvas.
- A **view span** is one run of tokens that the language model reads: adjacent views, a window of them, and newlines.
- An **image layout** holds the views and the spans of one image.

Sizes are (height, width) and rectangles are (top, left, height, width). Only this module uses PIL's (width, height).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from PIL import Image

from vitrail.config import Config
from vitrail.errors import ConfigError, ImageError
from vitrail.processing.grid import Grid
from vitrail.processing.image_loading import to_pixel_values

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from vitrail.processing.video_sampling import SamplingRule

Size: TypeAlias = tuple[int, int]
Rectangle: TypeAlias = tuple[int, int, int, int]
Colour: TypeAlias = tuple[int, int, int]
Resample: TypeAlias = Literal["bilinear", "bicubic", "lanczos"]
ViewSizes: TypeAlias = Literal["equal", "unequal", "native"]
Newline: TypeAlias = Literal["none", "row", "end", "row_and_end"]

PIL_RESAMPLING: dict[Resample, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

# Limit on intermediate images. Padding a thin strip to a square can need gigapixels: 1×100000 becomes 10 gigapixels.
# The limit corresponds to a quarter of a gigabyte of RGB.
MAX_SCRATCH_PIXELS = 89_478_485


class ImageView(Config):
    """One input image of the vision tower."""

    source: Rectangle  # rectangle of the source image; it may exceed the image, which adds padding
    resized_size: Size  # size the rectangle is resized to
    offset: Size  # position of its top left corner on the canvas; negative values crop
    canvas_size: Size  # size of the tower's input
    grid: Grid

    @property
    def stretch(self) -> float:
        """Horizontal stretch factor: 1 if the aspect ratio is kept, 2 if the image is squashed to half its height."""
        _, _, height, width = self.source
        return (self.resized_size[1] * height) / (self.resized_size[0] * width)


class ViewSpan(Config):
    """One run of tokens that the language model reads, row by row.

    first_view  index of the first view; rows × columns of `view_grid` views follow in raster order
    view_grid   (rows, columns) of the views
    window      rectangle of their tokens that remains after tokens in padding are dropped
    size        size of the window after downsampling. Only `anyres` downsamples (`max_tiles`, and videos)
    newline     newline tokens: none, one after each row, one at the end, or one after each row and then a separator
    overlap     tokens on the first and the last side of a view that are dropped if another view is next to it
    """

    first_view: int
    view_grid: Size
    window: Rectangle
    size: Size
    newline: Newline = "none"
    overlap: Size = (0, 0)

    @property
    def num_tokens(self) -> int:
        rows, columns = self.size
        return rows * columns + {"none": 0, "row": rows, "end": 1, "row_and_end": rows + 1}[self.newline]


class ImageLayout(Config):
    """Views and token spans of an image of height × width pixels under one policy."""

    height: int
    width: int
    views: tuple[ImageView, ...]
    spans: tuple[ViewSpan, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that reach the language model, newlines included."""
        return sum(span.num_tokens for span in self.spans)

    def image_box(self, view: ImageView) -> tuple[float, float, float, float]:
        """Return the rectangle of the view's canvas that the image covers. The rest of the canvas is padding."""
        top, left, height, width = view.source
        y, x = view.resized_size[0] / height, view.resized_size[1] / width
        return view.offset[0] - top * y, view.offset[1] - left * x, self.height * y, self.width * x


def full_view_span(view: ImageView, *, first_view: int = 0, newline: Newline = "none") -> ViewSpan:
    """Return the span that reads every token of a single view."""
    size = (view.grid.num_rows, view.grid.num_columns)
    return ViewSpan(first_view=first_view, view_grid=(1, 1), window=(0, 0, *size), size=size, newline=newline)


def split_into_tiles(
    source: Rectangle, resized_size: Size, tiles: Size, grid: Grid, *, tile_size: int, origin: Size = (0, 0)
) -> list[ImageView]:
    """Return the views that split a resized image into (rows, columns) of square tiles, in raster order.

    `origin` is the position of the image's top left corner on the canvas of all tiles.
    """
    return [
        ImageView(
            source=source,
            resized_size=resized_size,
            offset=(origin[0] - row * tile_size, origin[1] - column * tile_size),
            canvas_size=(tile_size, tile_size),
            grid=grid,
        )
        for row in range(tiles[0])
        for column in range(tiles[1])
    ]


def layout_frames(view: ImageView, num_frames: int) -> ImageLayout:
    """Return the layout of a video whose frames all have this view of the whole frame."""
    spans = tuple(full_view_span(view, first_view=n) for n in range(num_frames))
    return ImageLayout(height=view.source[2], width=view.source[3], views=(view,) * num_frames, spans=spans)


def to_row_layout(grid: Grid, patch_size: int) -> ImageLayout:
    """Return the layout of a whole image with this grid and a newline after each row of tokens."""
    size = grid.pixel_size(patch_size)
    height, width = size
    view = ImageView(source=(0, 0, height, width), resized_size=size, offset=(0, 0), canvas_size=size, grid=grid)
    span = full_view_span(view, newline="row")
    return ImageLayout(height=height, width=width, views=(view,), spans=(span,))


class ResolutionPolicy(Config, tag_field="policy"):
    """Base class of resolution policies, which fit an image of any size to a vision tower.

    `layout` computes views and token counts. `apply` produces the pixels.

    view_sizes     sizes of the views: one for all, one for each view, or native ones for packed towers
    masks_padding  whether the tower does not attend to patches in padding
    """

    view_sizes: ClassVar[ViewSizes] = "equal"
    masks_padding: ClassVar[bool] = False

    resample: Resample = "bicubic"

    @property
    def video_rule(self) -> "SamplingRule | None":
        """Sampling rule of videos whose frames are views of one size; None if the policy does not support them."""
        return None

    def layout(self, height: int, width: int) -> ImageLayout:
        """Return the views and tokens of an image of this size. No pixels are needed."""
        raise NotImplementedError

    def layout_video(self, num_frames: int) -> ImageLayout:
        """Return the layout of a video with `num_frames` frames of one view each."""
        raise ConfigError(f"{type(self).__name__} does not support videos", "give frames as images")

    def list_covered_grids(self, height: int, width: int) -> list[Size] | None:
        """Return the rows and columns of patches of each view that the tower attends to; None for all."""
        return None

    def classify_patches(self, layout: ImageLayout) -> "np.ndarray | None":
        """Return the kinds of all patches of an image (V, N), for a padding embedding; None without one."""
        return None

    def for_images(self, count: int) -> "ResolutionPolicy":
        """Return the policy for each of `count` images of a conversation."""
        return self

    def apply(self, image: Image.Image) -> list[Image.Image]:
        """Return the views of an RGB image, in the order of `layout`."""
        return render_views(image, self.layout(image.height, image.width), self.resample)

    def to_pixel_values(self, image: Image.Image, mean: Sequence[float], std: Sequence[float]) -> "list[Tensor]":
        """Return the normalized views (C, H, W) of an RGB image, in the order of `layout`."""
        return [to_pixel_values(view, mean, std) for view in self.apply(image)]


class PaddedPolicy(ResolutionPolicy):
    """Base class of policies whose views may contain padding."""

    fill_colour: Colour = (0, 0, 0)

    def apply(self, image: Image.Image) -> list[Image.Image]:
        return render_views(image, self.layout(image.height, image.width), self.resample, self.fill_colour)


def render_views(
    image: Image.Image, layout: ImageLayout, resample: Resample, fill_colour: Colour = (0, 0, 0)
) -> list[Image.Image]:
    """Render all views of a layout: extract, resize, paste onto the canvas. Each distinct resize runs once."""
    if image.mode != "RGB":
        raise ImageError(f"the image has mode {image.mode}", "load it with vitrail.processing.image_loading.load_image")
    ready: dict[tuple[Rectangle, Size], Image.Image] = {}
    views = []
    for view in layout.views:
        key = (view.source, view.resized_size)
        if key not in ready:
            ready[key] = _resize(image, view, PIL_RESAMPLING[resample], fill_colour)
        if view.offset == (0, 0) and view.canvas_size == view.resized_size:
            views.append(ready[key].copy())
            continue
        canvas = Image.new("RGB", view.canvas_size[::-1], fill_colour)
        canvas.paste(ready[key], view.offset[::-1])
        views.append(canvas)
    return views


def _resize(image: Image.Image, view: ImageView, resample: Image.Resampling, fill: Colour) -> Image.Image:
    top, left, height, width = view.source
    for h, w in ((height, width), view.resized_size):
        if h * w > MAX_SCRATCH_PIXELS:
            raise ImageError(
                f"an image of {image.height}×{image.width} pixels needs an intermediate image of {h:,}×{w:,} pixels",
                "the image is too thin for this policy: crop it, or use naive, anyres or naflex",
            )
    if view.source != (0, 0, image.height, image.width):
        padded = Image.new("RGB", (width, height), fill)
        padded.paste(image, (-left, -top))
        image = padded
    return image.resize(view.resized_size[::-1], resample)


def check_image_size(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise ImageError(f"an image of {height}×{width} pixels", "give at least one pixel on both sides")


def square_grid(image_size: int, patch_size: int, unread_pixels: int = 0, *, merge_size: int = 1) -> Grid:
    """Return the grid of a square view whose last `unread_pixels` pixels the patch convolution drops.

    SigLIP-so400m/14 at 384 pixels uses 27 × 14 = 378 pixels and drops 6. The config must state the remainder,
    because patches that do not divide the view are otherwise an error.
    """
    if not 0 <= unread_pixels < max(patch_size, 1) or image_size <= unread_pixels:
        raise ConfigError(
            f"unread_pixels is {unread_pixels} for an image_size of {image_size}",
            "give the remainder of image_size / patch_size",
        )
    return Grid.from_pixels(image_size - unread_pixels, image_size - unread_pixels, patch_size, merge_size=merge_size)


def compute_centred_square_box(height: int, width: int) -> Rectangle:
    """Return the smallest square that contains the image, centred on it, as a rectangle in image coordinates."""
    side = max(height, width)
    return -((side - height) // 2), -((side - width) // 2), side, side
