"""Images of their own size, shrunk only if they are too large, and padded to whole patches (Fuyu)."""

import math
from typing import ClassVar

from vitrail.errors import ConfigError
from vitrail.processing.grid import Grid
from vitrail.processing.image_layout import (
    Colour,
    ImageLayout,
    ImageView,
    PaddedPolicy,
    Resample,
    ViewSizes,
    check_image_size,
    full_view_span,
)
from vitrail.registry import RESOLUTION_POLICIES


@RESOLUTION_POLICIES.register("shrink")
class ShrinkPolicy(PaddedPolicy, tag="shrink"):
    """Fuyu: shrink an image to fit into `max_height` × `max_width`, then pad it right and below to whole patches.

    Smaller images keep their size. Each row of patches ends with a newline. The fill colour is almost black, because
    the reference pads with 1 before it divides by 255.
    """

    view_sizes: ClassVar[ViewSizes] = "unequal"

    resample: Resample = "bilinear"
    fill_colour: Colour = (1, 1, 1)
    patch_size: int = 30
    max_height: int = 1080
    max_width: int = 1920

    def __post_init__(self) -> None:
        if self.patch_size < 1 or min(self.max_height, self.max_width) < self.patch_size:
            raise ConfigError(
                f"ShrinkPolicy: patch_size {self.patch_size}, at most {self.max_height} × {self.max_width} pixels",
                "give a patch_size of at least 1, and sides of at least one patch",
            )
        if self.max_height % self.patch_size or self.max_width % self.patch_size:
            raise ConfigError(
                f"ShrinkPolicy: {self.max_height} × {self.max_width} pixels are not whole patches of {self.patch_size}",
                f"give multiples of {self.patch_size}",
            )

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        size = (height, width)
        if height > self.max_height or width > self.max_width:
            scale = min(self.max_height / height, self.max_width / width)
            size = (max(int(height * scale), 1), max(int(width * scale), 1))
        rows, columns = (math.ceil(side / self.patch_size) for side in size)
        grid = Grid(h=rows, w=columns)
        view = ImageView(
            source=(0, 0, height, width),
            resized_size=size,
            offset=(0, 0),
            canvas_size=grid.pixel_size(self.patch_size),
            grid=grid,
        )
        return ImageLayout(
            height=height, width=width, views=(view,), spans=(full_view_span(view).replace(newline="row"),)
        )
