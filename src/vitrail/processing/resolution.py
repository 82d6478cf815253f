"""The resolution policies: how a picture of any size is fitted to a tower, and how many tokens that costs.

Every policy is a frozen config with `cut(height, width)` (integers only) and `apply(image)` (pixels). The sizes and
the rounding are those of the models they come from; see `docs/processing.md` for which to use when.
"""

import math

from vitrail.errors import ConfigError, ImageError, nearest
from vitrail.processing.anyres import GRIDS_ONEVISION, HD9, AnyRes
from vitrail.processing.canvas import Canvas
from vitrail.processing.cut import (
    Colour,
    Cut,
    Padded,
    Policy,
    Resample,
    Size,
    Span,
    View,
    centred_square,
    check_picture,
    square,
    whole,
)
from vitrail.processing.grid import Grid
from vitrail.processing.tiles import Tiles

__all__ = ["HD9", "POLICIES", "PRESETS", "AnyRes", "Crop", "Cut", "Framed", "Letterbox", "NaFlex", "Naive", "Native"]
__all__ += ["AnyPolicy", "Canvas", "Policy", "Span", "Tiles", "View", "named"]


def _single(height: int, width: int, view: View) -> Cut:
    return Cut(height=height, width=width, views=(view,), spans=(whole(view),))


class Naive(Policy, tag="naive"):
    """Squash to size × size. Nothing is lost or added; everything is distorted."""

    size: int = 336
    patch: int = 14
    unread: int = 0

    def __post_init__(self) -> None:
        square(self.size, self.patch, self.unread)

    def cut(self, height: int, width: int) -> Cut:
        check_picture(height, width)
        canvas = (self.size, self.size)
        grid = square(self.size, self.patch, self.unread)
        view = View(source=(0, 0, height, width), resized=canvas, offset=(0, 0), canvas=canvas, grid=grid)
        return _single(height, width, view)


class Letterbox(Padded, tag="letterbox"):
    """Pad to a square with the picture in the middle, then resize: LLaVA-1.5's "pad".

    The order is LLaVA's (expand2square, then the CLIP processor): pad first, so the edge of the picture is blended
    with the padding by the resampling filter. The fill is CLIP's mean, which normalises to zero.
    """

    fill: Colour = (122, 116, 104)
    size: int = 336
    patch: int = 14
    unread: int = 0

    def __post_init__(self) -> None:
        square(self.size, self.patch, self.unread)

    def cut(self, height: int, width: int) -> Cut:
        check_picture(height, width)
        canvas = (self.size, self.size)
        grid = square(self.size, self.patch, self.unread)
        view = View(source=centred_square(height, width), resized=canvas, offset=(0, 0), canvas=canvas, grid=grid)
        return _single(height, width, view)


class Framed(Padded, tag="framed"):
    """Resize until the long side fits, then pad to a square with the picture in the middle: DeepSeek-VL.

    The edge stays sharp, where `letterbox` blends it with the padding. A thin picture keeps `least` pixels of its short
    side. `fine` is the side of the view where a tower reads it larger than the `size` by which its patches are counted.
    """

    fill: Colour = (127, 127, 127)
    size: int = 384
    patch: int = 16
    unread: int = 0
    least: int = 14
    fine: int | None = None

    @property
    def side(self) -> int:
        """Of the view, in pixels."""
        return self.fine or self.size

    def __post_init__(self) -> None:
        square(self.size, self.patch, self.unread)
        if not 1 <= self.least <= self.side:
            raise ConfigError(f"Framed.least {self.least} of {self.side} pixels", "give a side that fits the view")

    def cut(self, height: int, width: int) -> Cut:
        check_picture(height, width)
        scale = self.side / max(height, width)
        tall, wide = (max(round(side * scale), self.least) for side in (height, width))
        view = View(
            source=(0, 0, height, width),
            resized=(tall, wide),
            offset=((self.side - tall) // 2, (self.side - wide) // 2),
            canvas=(self.side, self.side),
            grid=square(self.size, self.patch, self.unread),
        )
        return _single(height, width, view)


class Crop(Policy, tag="crop"):
    """Resize the short edge to `edge` (default: size), keep the middle size × size: CLIP. The ends are lost."""

    size: int = 336
    edge: int | None = None
    patch: int = 14
    unread: int = 0

    def __post_init__(self) -> None:
        square(self.size, self.patch, self.unread)
        if self.edge is not None and self.edge < self.size:
            raise ConfigError(
                f"Crop.edge {self.edge} is smaller than the crop of {self.size}", "give an edge of at least the size"
            )

    def cut(self, height: int, width: int) -> Cut:
        check_picture(height, width)
        edge = self.edge or self.size
        short = min(height, width)
        resized = (edge * height // short, edge * width // short)
        view = View(
            source=(0, 0, height, width),
            resized=resized,
            offset=(-((resized[0] - self.size) // 2), -((resized[1] - self.size) // 2)),
            canvas=(self.size, self.size),
            grid=square(self.size, self.patch, self.unread),
        )
        return _single(height, width, view)


class Native(Policy, tag="native"):
    """Qwen's smart-resize: near its own size, sides rounded to patch × merge, between two pixel budgets.

    The grid of a still has t = 1, although the tower's temporal patch spans two frames (the picture twice).

    The budgets are aims, as in the reference: a strip thinner than one block is thickened to a block and may pass
    `max_pixels`, and a picture whose short side rounds to zero is rescaled to `min_pixels`, so a larger picture may
    come out smaller than a smaller one.
    """

    patch: int = 14
    merge: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    def __post_init__(self) -> None:
        if self.patch < 1 or self.merge < 1:
            raise ConfigError(f"Native: patch {self.patch}, merge {self.merge}", "both must be at least 1")
        if not 1 <= self.min_pixels <= self.max_pixels:
            raise ConfigError(
                f"Native: min_pixels {self.min_pixels} and max_pixels {self.max_pixels}",
                "give 1 ≤ min_pixels ≤ max_pixels",
            )
        if self.max_pixels < self.factor**2:
            raise ConfigError(
                f"Native.max_pixels {self.max_pixels} is less than one token",
                f"a token covers {self.factor}×{self.factor} pixels: give at least {self.factor**2}",
            )

    @property
    def factor(self) -> int:
        """Pixels on a side of one token."""
        return self.patch * self.merge

    def cut(self, height: int, width: int) -> Cut:
        check_picture(height, width)
        if max(height, width) > 200 * min(height, width):
            raise ImageError(
                f"a picture of {height}×{width} is more than 200 times longer than wide",
                "native resolution refuses such strips: crop it, or use another policy",
            )
        size = self._resize(height, width)
        grid = Grid.of(*size, self.patch, merge=self.merge)
        view = View(source=(0, 0, height, width), resized=size, offset=(0, 0), canvas=size, grid=grid)
        return _single(height, width, view)

    def _resize(self, height: int, width: int) -> Size:
        # Float64 and Python's round-half-to-even throughout, as the models were trained.
        factor = self.factor
        tall, wide = (round(side / factor) * factor for side in (height, width))
        if tall * wide > self.max_pixels:
            beta = math.sqrt((height * width) / self.max_pixels)
            tall, wide = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
        elif tall * wide < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            tall, wide = (math.ceil(side * beta / factor) * factor for side in (height, width))
        return tall, wide


class NaFlex(Policy, tag="naflex"):
    """SigLIP 2 NaFlex: the largest size with the picture's aspect, in whole patches, of at most `max_patches`.

    The scale is found by bisection to 1e-5 between 1e-6 and 100, as the reference does, so a tiny picture is enlarged
    a hundredfold at most.
    """

    resample: Resample = "bilinear"
    patch: int = 16
    max_patches: int = 256

    def __post_init__(self) -> None:
        if self.patch < 1 or self.max_patches < 1:
            raise ConfigError(f"NaFlex: patch {self.patch}, max_patches {self.max_patches}", "both must be at least 1")

    def cut(self, height: int, width: int) -> Cut:
        check_picture(height, width)
        low, high = 1e-5 / 10, 100.0  # not 1e-6: the last bit differs
        while high - low >= 1e-5:
            middle = (low + high) / 2
            rows, columns = self._patches(middle, height, width)
            low, high = (middle, high) if rows * columns <= self.max_patches else (low, middle)
        rows, columns = self._patches(low, height, width)
        if rows * columns > self.max_patches:
            raise ImageError(
                f"a picture of {height}×{width} does not fit into {self.max_patches} patches",
                "it is too thin: crop it, or raise max_patches",
            )
        grid = Grid(h=rows, w=columns)
        size = grid.pixels(self.patch)
        view = View(source=(0, 0, height, width), resized=size, offset=(0, 0), canvas=size, grid=grid)
        return _single(height, width, view)

    def _patches(self, scale: float, height: int, width: int) -> Size:
        rows, columns = (max(1, math.ceil(side * scale / self.patch)) for side in (height, width))
        return rows, columns


AnyPolicy = Naive | Letterbox | Framed | Crop | AnyRes | Native | NaFlex | HD9 | Tiles | Canvas
"""What the `policy` of a table can say."""

POLICIES: dict[str, type[Policy]] = {
    "naive": Naive,
    "letterbox": Letterbox,
    "framed": Framed,
    "crop": Crop,
    "anyres": AnyRes,
    "native": Native,
    "naflex": NaFlex,
    "hd9": HD9,
    "tiles": Tiles,
    "canvas": Canvas,
}

# As released. A preset is a policy with its numbers; the tower's own normalisation is in `images.NORMS`.
PRESETS: dict[str, Policy] = {
    "clip": Crop(size=224),
    "siglip-384": Naive(size=384, unread=6),
    "llava-1.5": Letterbox(),
    "deepseek-vl": Framed(),
    "llava-next": AnyRes(),
    "llava-onevision": AnyRes(tile=384, unread=6, grids=GRIDS_ONEVISION, max_tiles=9),
    "qwen2-vl": Native(),
    "qwen3-vl": Native(patch=16, min_pixels=65_536, max_pixels=16_777_216),
    "siglip2-naflex": NaFlex(),
    "internvl": Tiles(),
    "llama-3.2-vision": Canvas(),
}


def named(name: str) -> Policy:
    """A policy with its defaults, or a preset, by name."""
    if name in POLICIES:
        return POLICIES[name]()
    if name in PRESETS:
        return PRESETS[name]
    raise ConfigError(f"no resolution policy {name!r}", nearest(name, [*POLICIES, *PRESETS]))
