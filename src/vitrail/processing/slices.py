"""Image slicing of MiniCPM-V: the whole image, then slices of an enlarged one, all near one resolution."""

import math
from typing import ClassVar

from vitrail.config import PositiveInt
from vitrail.errors import ConfigError
from vitrail.processing.grid import Grid
from vitrail.processing.image_layout import (
    ImageLayout,
    ImageView,
    ResolutionPolicy,
    Size,
    ViewSizes,
    check_image_size,
    full_view_span,
)
from vitrail.registry import RESOLUTION_POLICIES


@RESOLUTION_POLICIES.register("slices")
class SlicePolicy(ResolutionPolicy, tag="slices"):
    """MiniCPM-V: views of about `slice_size`² pixels that keep the aspect ratio, in whole patches.

    The first view is the whole image. An image of more pixels is also cut into a grid of at most `max_slices` slices:
    about one for each `slice_size`² pixels, in the grid with the nearest aspect ratio. All slices of an image have one
    size, which differs from that of the whole image.

    merge_size  sides of a view are multiples of so many patches
    numbered    whether a text with its number precedes each image; without it, each slice is written like an image
    """

    view_sizes: ClassVar[ViewSizes] = "unequal"

    slice_size: int = 448
    patch_size: PositiveInt = 14
    merge_size: PositiveInt = 1
    max_slices: int = 9
    numbered: bool = True

    def __post_init__(self) -> None:
        if self.slice_size < self.unit:
            raise ConfigError(
                f"SlicePolicy: slice_size {self.slice_size}, patch_size {self.patch_size}, merge_size "
                f"{self.merge_size}",
                "give a slice_size of at least patch_size × merge_size",
            )
        if not 1 <= self.max_slices <= 1000:
            raise ConfigError(f"SlicePolicy.max_slices is {self.max_slices}", "give 1 … 1,000")

    @property
    def unit(self) -> int:
        """Sides of views are multiples of so many pixels."""
        return self.patch_size * self.merge_size

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        grid, source = self._find_grid(height, width), (0, 0, height, width)
        views = [self._make_view(source, self._fit(height, width, enlarge=grid is None))]
        if grid is not None:
            rows, columns = grid
            tall, wide = (_round_to(side, count) / count for side, count in zip((height, width), grid, strict=True))
            slice_height, slice_width = self._fit(tall, wide, enlarge=True)
            canvas = (slice_height * rows, slice_width * columns)
            views += [
                self._make_view(source, (slice_height, slice_width), canvas, (-r * slice_height, -c * slice_width))
                for r in range(rows)
                for c in range(columns)
            ]
        spans = tuple(full_view_span(view, first_view=index) for index, view in enumerate(views))
        return ImageLayout(height=height, width=width, views=tuple(views), spans=spans)

    def _make_view(
        self, source: tuple[int, int, int, int], size: Size, resized: Size | None = None, offset: Size = (0, 0)
    ) -> ImageView:
        return ImageView(
            source=source,
            resized_size=resized or size,
            offset=offset,
            canvas_size=size,
            grid=Grid.from_pixels(*size, self.patch_size, merge_size=self.merge_size),
        )

    def _fit(self, height: float, width: float, *, enlarge: bool) -> Size:
        """Return the size in whole patches near `slice_size`²; smaller images stay small unless `enlarge`."""
        if height * width > self.slice_size**2 or enlarge:
            ratio = width / height
            height = int(self.slice_size / math.sqrt(ratio))
            width = int(height * ratio)
        return _round_to(height, self.unit), _round_to(width, self.unit)

    def _find_grid(self, height: int, width: int) -> Size | None:
        """Return the rows and columns of slices, or None for a small image."""
        log_ratio, num_slices = math.log(width / height), math.ceil(width * height / self.slice_size**2)
        count = min(num_slices, self.max_slices)
        if count <= 1:
            return None
        best, min_error = (1, 1), math.inf
        for number in range(count - 1, count + 2):
            if number == 1 or number > self.max_slices:
                continue
            for rows in (rows for rows in range(1, number + 1) if number % rows == 0):
                error = abs(log_ratio - math.log(number // rows / rows))
                if error < min_error or (error == min_error and rows > best[0]):
                    best, min_error = (rows, number // rows), error
        return best


def _round_to(length: float, unit: int) -> int:
    """Round to a multiple of `unit`, and to at least one."""
    return max(round(length / unit) * unit, unit)
