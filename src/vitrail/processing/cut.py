"""What a resolution policy decides, as integers, and the one routine that turns the decision into pixels.

A **view** is one picture the tower sees: a rectangle of the source, resized, laid on a canvas. A **span** is one run of
tokens the language model reads: some views side by side, a window of them, and newline tokens. A **cut** is both lists.
Sizes are (height, width) and rectangles (top, left, height, width) everywhere; PIL's (width, height) stays in here.
"""

from typing import Literal, TypeAlias

from PIL import Image

from vitrail.config import Config
from vitrail.errors import ConfigError, ImageError
from vitrail.processing.grid import Grid

Size: TypeAlias = tuple[int, int]
Rectangle: TypeAlias = tuple[int, int, int, int]
Colour: TypeAlias = tuple[int, int, int]
Resample: TypeAlias = Literal["bilinear", "bicubic", "lanczos"]

RESAMPLE: dict[Resample, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

# A thin strip padded to a square, or resized by its short edge, is a bomb of our own making: 1×100000 pixels would
# pass through 10 gigapixels. A quarter of a gigabyte of RGB is where we stop.
MAX_SCRATCH_PIXELS = 89_478_485


class View(Config):
    """One picture the tower sees."""

    source: Rectangle  # of the source picture; may reach outside it, where there is padding
    resized: Size  # the size that rectangle is resized to
    offset: Size  # where its top left corner lands on the canvas; negative: cut away
    canvas: Size  # the size the tower sees
    grid: Grid

    @property
    def stretch(self) -> float:
        """How much wider than true everything looks: 1 where the aspect is kept, 2 when squashed to half height."""
        _, _, height, width = self.source
        return (self.resized[1] * height) / (self.resized[0] * width)


class Span(Config):
    """One run of tokens the model reads, row by row.

    The views `first` … `first + layout rows × columns − 1` are laid side by side in raster order; `window` is what is
    kept of their tokens once those that lie in padding are dropped; `size` is that window after shrinking (only
    `anyres` shrinks, with `max_tiles` and in films; the others have `size` = the window's).
    """

    first: int
    layout: Size
    window: Rectangle
    size: Size
    newline: Literal["none", "row", "end"] = "none"

    @property
    def tokens(self) -> int:
        rows, columns = self.size
        return rows * columns + {"none": 0, "row": rows, "end": 1}[self.newline]


class Cut(Config):
    """How a picture of height × width pixels becomes views and tokens under one policy."""

    height: int
    width: int
    views: tuple[View, ...]
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        """Tokens that reach the model, newlines included."""
        return sum(span.tokens for span in self.spans)

    def picture(self, view: View) -> tuple[float, float, float, float]:
        """The rectangle of the view's canvas plane that holds the picture: what lies beyond it is padding."""
        top, left, height, width = view.source
        y, x = view.resized[0] / height, view.resized[1] / width
        return view.offset[0] - top * y, view.offset[1] - left * x, self.height * y, self.width * x


def whole(view: View, *, first: int = 0, newline: Literal["none", "end"] = "none") -> Span:
    """The span of a single view of which every token is read."""
    size = (view.grid.rows, view.grid.columns)
    return Span(first=first, layout=(1, 1), window=(0, 0, *size), size=size, newline=newline)


class Policy(Config, tag_field="policy"):
    """A way to fit a picture of any size to a tower. `cut` counts, `apply` makes the pixels."""

    resample: Resample = "bicubic"

    def cut(self, height: int, width: int) -> Cut:
        """Views and tokens of a picture of this size: arithmetic only, no pixels."""
        raise NotImplementedError

    def apply(self, image: Image.Image) -> list[Image.Image]:
        """The views of an RGB picture, in the order of `cut`."""
        return render(image, self.cut(image.height, image.width), self.resample)


class Padded(Policy):
    """A policy whose views may hold padding."""

    fill: Colour = (0, 0, 0)

    def apply(self, image: Image.Image) -> list[Image.Image]:
        return render(image, self.cut(image.height, image.width), self.resample, self.fill)


def render(image: Image.Image, cut: Cut, resample: Resample, fill: Colour = (0, 0, 0)) -> list[Image.Image]:
    """Extract, resize, lay on the canvas: every view of every policy. Each distinct resize is done once."""
    if image.mode != "RGB":
        raise ImageError(f"a picture of mode {image.mode}", "read it with vitrail.processing.images.load_image")
    ready: dict[tuple[Rectangle, Size], Image.Image] = {}
    views = []
    for view in cut.views:
        key = (view.source, view.resized)
        if key not in ready:
            ready[key] = _resize(image, view, RESAMPLE[resample], fill)
        if view.offset == (0, 0) and view.canvas == view.resized:
            views.append(ready[key].copy())
            continue
        canvas = Image.new("RGB", view.canvas[::-1], fill)
        canvas.paste(ready[key], view.offset[::-1])
        views.append(canvas)
    return views


def _resize(image: Image.Image, view: View, resample: Image.Resampling, fill: Colour) -> Image.Image:
    top, left, height, width = view.source
    for h, w in ((height, width), view.resized):
        if h * w > MAX_SCRATCH_PIXELS:
            raise ImageError(
                f"a picture of {image.height}×{image.width} would pass through one of {h:,}×{w:,} pixels",
                "it is too thin for this policy: crop it, or use naive, anyres or naflex",
            )
    if view.source != (0, 0, image.height, image.width):
        padded = Image.new("RGB", (width, height), fill)
        padded.paste(image, (-left, -top))
        image = padded
    return image.resize(view.resized[::-1], resample)


def check_picture(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise ImageError(f"a picture of {height}×{width} pixels", "both sides must be at least one pixel")


def square(size: int, patch: int, unread: int = 0, *, merge: int = 1) -> Grid:
    """The grid of a square view of which the patch convolution leaves the last `unread` pixels out.

    SigLIP-so400m/14 at 384 reads 27 × 14 = 378 pixels and drops 6. That must be said in the config: patches that do
    not divide the view are otherwise an error.
    """
    if not 0 <= unread < max(patch, 1) or size <= unread:
        raise ConfigError(f"{unread} unread pixels of {size}", "unread is the remainder of size divided by patch")
    return Grid.of(size - unread, size - unread, patch, merge=merge)


def centred_square(height: int, width: int) -> Rectangle:
    """The smallest square that holds the picture in its middle, as a rectangle of the picture's own plane."""
    side = max(height, width)
    return -((side - height) // 2), -((side - width) // 2), side, side
