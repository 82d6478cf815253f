"""Resolution policies: fit images of any size to a vision tower and count their tokens.

Every policy is a frozen config with `layout(height, width)` (integers only) and `apply(image)` (pixels). Sizes and
rounding match the original models. `docs/processing.md` explains when to use which policy.
"""

import math
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from vitrail.config import PositiveInt, make_registered_type
from vitrail.errors import ConfigError, ImageError, suggest_name
from vitrail.processing.anyres import LLAVA_ONEVISION_GRIDS, AnyResPolicy
from vitrail.processing.grid import Grid
from vitrail.processing.hd_tiles import DynamicHDPolicy, HDTransformPolicy
from vitrail.processing.image_layout import (
    Colour,
    ImageLayout,
    ImageView,
    PaddedPolicy,
    Rectangle,
    Resample,
    ResolutionPolicy,
    Size,
    ViewSizes,
    check_image_size,
    compute_centred_square_box,
    full_view_span,
    square_grid,
)
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.processing.mllama_canvas import CanvasPolicy
from vitrail.processing.overlapping_tiles import OverlapPolicy
from vitrail.processing.padded_tiles import PaddedTilesPolicy
from vitrail.processing.shrink_to_fit import ShrinkPolicy
from vitrail.processing.slices import SlicePolicy
from vitrail.processing.split_tiles import SplitPolicy
from vitrail.registry import RESOLUTION_POLICIES


def _single_view_layout(
    height: int,
    width: int,
    grid: Grid,
    resized_size: Size,
    *,
    source: Rectangle | None = None,
    offset: Size = (0, 0),
    canvas_size: Size | None = None,
) -> ImageLayout:
    """Return the layout of one view: by default of the whole image, on a canvas of its resized size."""
    view = ImageView(
        source=source or (0, 0, height, width),
        resized_size=resized_size,
        offset=offset,
        canvas_size=canvas_size or resized_size,
        grid=grid,
    )
    return ImageLayout(height=height, width=width, views=(view,), spans=(full_view_span(view),))


@RESOLUTION_POLICIES.register("naive")
class NaivePolicy(ResolutionPolicy, tag="naive"):
    """Resize to image_size × image_size without keeping the aspect ratio."""

    image_size: int = 336
    patch_size: int = 14
    unread_pixels: int = 0

    def __post_init__(self) -> None:
        square_grid(self.image_size, self.patch_size, self.unread_pixels)

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        grid = square_grid(self.image_size, self.patch_size, self.unread_pixels)
        return _single_view_layout(height, width, grid, (self.image_size, self.image_size))


@RESOLUTION_POLICIES.register("letterbox")
class LetterboxPolicy(PaddedPolicy, tag="letterbox"):
    """Pad to a centred square, then resize, as LLaVA-1.5's "pad" mode does.

    The order matches LLaVA (expand2square, then the CLIP processor). Because padding comes first, the resampling
    filter blends the image edge with the padding. The fill colour is CLIP's mean, which normalizes to zero.
    """

    fill_colour: Colour = (122, 116, 104)
    image_size: int = 336
    patch_size: int = 14
    unread_pixels: int = 0

    def __post_init__(self) -> None:
        square_grid(self.image_size, self.patch_size, self.unread_pixels)

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        grid = square_grid(self.image_size, self.patch_size, self.unread_pixels)
        size, source = (self.image_size, self.image_size), compute_centred_square_box(height, width)
        return _single_view_layout(height, width, grid, size, source=source)


@RESOLUTION_POLICIES.register("framed")
class FramedPolicy(PaddedPolicy, tag="framed"):
    """Resize until the long side fits, then pad to a centred square, as DeepSeek-VL does.

    The image edge stays sharp, while `letterbox` blends it with the padding. A thin image keeps at least `min_size`
    pixels on its short side. Set `high_res_size` if the tower takes a larger view than `image_size`, which determines
    the patch count.
    """

    fill_colour: Colour = (127, 127, 127)
    image_size: int = 384
    patch_size: int = 16
    unread_pixels: int = 0
    min_size: int = 14
    high_res_size: int | None = None

    @property
    def view_size(self) -> int:
        """Side of the view in pixels."""
        return self.high_res_size or self.image_size

    def __post_init__(self) -> None:
        square_grid(self.image_size, self.patch_size, self.unread_pixels)
        if not 1 <= self.min_size <= self.view_size:
            raise ConfigError(
                f"FramedPolicy.min_size is {self.min_size}, and the view has {self.view_size} pixels",
                f"give 1 to {self.view_size} pixels",
            )

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        scale = self.view_size / max(height, width)
        tall, wide = (max(round(side * scale), self.min_size) for side in (height, width))
        grid = square_grid(self.image_size, self.patch_size, self.unread_pixels)
        offset = ((self.view_size - tall) // 2, (self.view_size - wide) // 2)
        canvas = (self.view_size, self.view_size)
        return _single_view_layout(height, width, grid, (tall, wide), offset=offset, canvas_size=canvas)


@RESOLUTION_POLICIES.register("crop")
class CropPolicy(ResolutionPolicy, tag="crop"):
    """Resize the short edge to `shortest_edge` (default: image_size), then take the centre crop, as CLIP does."""

    image_size: int = 336
    shortest_edge: int | None = None
    patch_size: int = 14
    unread_pixels: int = 0

    def __post_init__(self) -> None:
        square_grid(self.image_size, self.patch_size, self.unread_pixels)
        if self.shortest_edge is not None and self.shortest_edge < self.image_size:
            raise ConfigError(
                f"CropPolicy.shortest_edge is {self.shortest_edge}, smaller than the crop of {self.image_size}",
                "give a shortest_edge of at least image_size",
            )

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        edge = self.shortest_edge or self.image_size
        short = min(height, width)
        resized = (edge * height // short, edge * width // short)
        grid = square_grid(self.image_size, self.patch_size, self.unread_pixels)
        offset = (-((resized[0] - self.image_size) // 2), -((resized[1] - self.image_size) // 2))
        canvas = (self.image_size, self.image_size)
        return _single_view_layout(height, width, grid, resized, offset=offset, canvas_size=canvas)


@RESOLUTION_POLICIES.register("native")
class NativePolicy(ResolutionPolicy, tag="native"):
    """Qwen's smart_resize: keep the native size, rounded to patch_size × merge_size, between two pixel budgets.

    The grid of a still image has t = 1, although the tower's temporal patch spans two frames (the image twice).

    The budgets are targets, as in the reference. A strip thinner than one block is enlarged to a block and may exceed
    `max_pixels`. An image whose short side rounds to zero is rescaled to `min_pixels`, so that a larger image can
    become smaller than a small one. With `enlarge_strips` (GLM-4V), it is enlarged to one block first.
    """

    view_sizes: ClassVar[ViewSizes] = "native"

    patch_size: PositiveInt = 14
    merge_size: PositiveInt = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    enlarge_strips: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.min_pixels <= self.max_pixels:
            raise ConfigError(
                f"NativePolicy: min_pixels {self.min_pixels} and max_pixels {self.max_pixels}",
                "give 1 ≤ min_pixels ≤ max_pixels",
            )
        if self.max_pixels < self.token_size**2:
            raise ConfigError(
                f"NativePolicy.max_pixels {self.max_pixels} is less than one token",
                f"a token covers {self.token_size}×{self.token_size} pixels: give at least {self.token_size**2}",
            )

    @property
    def token_size(self) -> int:
        """Side of one token in pixels."""
        return self.patch_size * self.merge_size

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        if max(height, width) > 200 * min(height, width):
            raise ImageError(
                f"an image of {height}×{width} pixels has an aspect ratio above 200",
                "crop the image, or use another policy",
            )
        size = self._resize(height, width)
        grid = Grid.from_pixels(*size, self.patch_size, merge_size=self.merge_size)
        return _single_view_layout(height, width, grid, size)

    def _resize(self, height: int, width: int) -> Size:
        # Use float64 and Python's round-half-to-even throughout, as in training of the original models.
        factor = self.token_size
        if self.enlarge_strips and min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        tall, wide = (round(side / factor) * factor for side in (height, width))
        if tall * wide > self.max_pixels:
            beta = math.sqrt((height * width) / self.max_pixels)
            tall, wide = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
        elif tall * wide < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            tall, wide = (math.ceil(side * beta / factor) * factor for side in (height, width))
        return tall, wide


@RESOLUTION_POLICIES.register("longest-edge")
class LongestEdgePolicy(ResolutionPolicy, tag="longest-edge"):
    """Pixtral's resize: keep the native size up to `longest_edge`, rounded up to patch_size × merge_size.

    A strip keeps at least one pixel on its short side, which the reference does not resize.
    """

    view_sizes: ClassVar[ViewSizes] = "native"

    patch_size: PositiveInt = 16
    merge_size: PositiveInt = 1
    longest_edge: PositiveInt = 1024

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        ratio = max(1, height / self.longest_edge, width / self.longest_edge)
        unit = self.patch_size * self.merge_size
        tall, wide = (-(-max(math.floor(side / ratio), 1) // unit) * unit for side in (height, width))
        grid = Grid.from_pixels(tall, wide, self.patch_size, merge_size=self.merge_size)
        return _single_view_layout(height, width, grid, (tall, wide))


@RESOLUTION_POLICIES.register("token-budget")
class TokenBudgetPolicy(ResolutionPolicy, tag="token-budget"):
    """Gemma 4's resize: the largest size of at most `max_tokens` tokens, rounded down to patch_size × merge_size.

    A strip that would round to zero tokens is one token wide, and shrunk to at most `max_tokens`.
    """

    view_sizes: ClassVar[ViewSizes] = "native"

    patch_size: PositiveInt = 16
    merge_size: PositiveInt = 3
    max_tokens: PositiveInt = 280

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        unit = self.patch_size * self.merge_size
        factor = math.sqrt(self.max_tokens * unit**2 / (height * width))
        rows, columns = (math.floor(side * factor / unit) for side in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, self.max_tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.max_tokens), 1
        tall, wide = rows * unit, columns * unit
        grid = Grid.from_pixels(tall, wide, self.patch_size, merge_size=self.merge_size)
        return _single_view_layout(height, width, grid, (tall, wide))


@RESOLUTION_POLICIES.register("patch-limit")
class PatchLimitPolicy(PaddedPolicy, tag="patch-limit"):
    """Kimi's resize: keep the native size up to about `max_patches` patches, and pad to patch_size × merge_size.

    The limits count patches before the padding, at the right and at the bottom. No side has more than
    `max_side_patches` patches.
    """

    view_sizes: ClassVar[ViewSizes] = "native"

    patch_size: int = 14
    merge_size: int = 2
    max_patches: int = 4096
    max_side_patches: int = 512

    def __post_init__(self) -> None:
        sizes = (self.patch_size, self.merge_size, self.max_patches, self.max_side_patches)
        if min(sizes) < 1:
            raise ConfigError(
                f"PatchLimitPolicy: patch_size, merge_size, max_patches and max_side_patches are {sizes}",
                "give at least 1 for each",
            )

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        rows, columns = (max(1, side // self.patch_size) for side in (height, width))
        longest, unit = self.max_side_patches * self.patch_size, self.patch_size * self.merge_size
        scale = min(1.0, math.sqrt(self.max_patches / (rows * columns)), longest / height, longest / width)
        tall, wide = (min(max(1, int(side * scale)), longest) for side in (height, width))
        canvas = (-(-tall // unit) * unit, -(-wide // unit) * unit)
        grid = Grid.from_pixels(*canvas, self.patch_size, merge_size=self.merge_size)
        return _single_view_layout(height, width, grid, (tall, wide), canvas_size=canvas)


@RESOLUTION_POLICIES.register("naflex")
class NaFlexPolicy(ResolutionPolicy, tag="naflex"):
    """SigLIP 2 NaFlex: resize to the largest size in whole patches with at most `max_patches`, keeping the aspect.

    Bisection finds the scale to 1e-5 between 1e-6 and 100, as in the reference. The maximum enlargement is 100.
    """

    view_sizes: ClassVar[ViewSizes] = "unequal"

    resample: Resample = "bilinear"
    patch_size: PositiveInt = 16
    max_patches: PositiveInt = 256

    def layout(self, height: int, width: int) -> ImageLayout:
        check_image_size(height, width)
        low, high = 1e-5 / 10, 100.0  # not 1e-6: the last bit would differ from the reference
        while high - low >= 1e-5:
            middle = (low + high) / 2
            rows, columns = self._patches(middle, height, width)
            low, high = (middle, high) if rows * columns <= self.max_patches else (low, middle)
        rows, columns = self._patches(low, height, width)
        if rows * columns > self.max_patches:
            raise ImageError(
                f"an image of {height}×{width} pixels does not fit into {self.max_patches} patches",
                "crop the image, which is too thin, or raise max_patches",
            )
        grid = Grid(h=rows, w=columns)
        return _single_view_layout(height, width, grid, grid.pixel_size(self.patch_size))

    def _patches(self, scale: float, height: int, width: int) -> Size:
        rows, columns = (max(1, math.ceil(side * scale / self.patch_size)) for side in (height, width))
        return rows, columns


if TYPE_CHECKING:
    AnyResolutionPolicy: TypeAlias = ResolutionPolicy
else:
    AnyResolutionPolicy = make_registered_type(RESOLUTION_POLICIES, ResolutionPolicy, lambda policy: policy, "policy")

# Policies of released models. `image_loading.NORMALIZATIONS` holds the mean and std of their towers.
PRESETS: dict[str, ResolutionPolicy] = {
    "clip": CropPolicy(image_size=224),
    "siglip-384": NaivePolicy(image_size=384, unread_pixels=6),
    "llava-1.5": LetterboxPolicy(),
    "deepseek-vl": FramedPolicy(),
    "deepseek-vl2": PaddedTilesPolicy(),
    "llava-next": AnyResPolicy(),
    "llava-onevision": AnyResPolicy(tile_size=384, unread_pixels=6, grids=LLAVA_ONEVISION_GRIDS, max_tiles=9),
    "qwen2-vl": NativePolicy(),
    "qwen3-vl": NativePolicy(patch_size=16, min_pixels=65_536, max_pixels=16_777_216),
    "pixtral": LongestEdgePolicy(),
    "gemma-4": TokenBudgetPolicy(),
    "kimi-vl": PatchLimitPolicy(),
    "kimi-k2.5": PatchLimitPolicy(max_patches=16_384),
    "siglip2-naflex": NaFlexPolicy(),
    "internvl": TilesPolicy(),
    "idefics3": SplitPolicy(),
    "minicpm-v": SlicePolicy(),
    "molmo": OverlapPolicy(),
    "fuyu": ShrinkPolicy(),
    "smolvlm": SplitPolicy(tile_size=512, patch_size=16, merge_size=4, longest_edge=2048),
    "llama-3.2-vision": CanvasPolicy(),
    "phi-3-vision": HDTransformPolicy(),
    "phi-4-multimodal": DynamicHDPolicy(),
}


def get_policy(name: str) -> ResolutionPolicy:
    """Return a policy with its defaults, or a preset, by name."""
    if name in PRESETS:
        return PRESETS[name]
    if name not in RESOLUTION_POLICIES:
        raise ConfigError(f"unknown resolution policy {name!r}", suggest_name(name, [*RESOLUTION_POLICIES, *PRESETS]))
    return RESOLUTION_POLICIES[name]()
