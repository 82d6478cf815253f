"""Apply a resolution policy to a batch of images of one size, on any device.

Shapes: B images, C channels, H × W pixels.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.processing.image_layout import ImageLayout, ImageView, PaddedPolicy, Rectangle, ResolutionPolicy, Size
from vitrail.processing.mllama_canvas import CanvasPolicy
from vitrail.processing.split_tiles import SplitPolicy


def resize_batch(pixels: Tensor, policy: ResolutionPolicy) -> Tensor:
    """Apply a policy with one view per image: uint8 (B, 3 or 4, H, W) → uint8 (B, 3 or 4, h, w).

    Padding is opaque.
    """
    return resize_to_views(pixels, [single_view(policy, *pixels.shape[2:])], policy)[0]


def resize_to_views(pixels: Tensor, views: Sequence[ImageView], policy: ResolutionPolicy) -> list[Tensor]:
    """Return the views of a policy: uint8 (B, 3 or 4, H, W) → uint8 (B, 3 or 4, h, w) each. Padding is opaque.

    Each distinct resize runs once.
    """
    if policy.resample == "lanczos":
        raise ConfigError("lanczos resampling is not supported for batches", "use bicubic or bilinear")
    colour = (*(policy.fill_colour if isinstance(policy, PaddedPolicy) else (0, 0, 0)), 255)
    fill = pixels.new_tensor(colour[: pixels.shape[1]]).view(-1, 1, 1).float()
    shifted = pixels.float() - fill  # so that zero padding becomes the fill colour
    resized: dict[tuple[Rectangle, Size], Tensor] = {}
    found = []
    for view in views:
        key = (view.source, view.resized_size)
        if key not in resized:
            resized[key] = _resize_source(shifted, view, policy)
        x, (down, across), (h, w) = resized[key], view.offset, view.canvas_size
        x = F.pad(x, (across, w - across - x.shape[3], down, h - down - x.shape[2]))
        found.append((x + fill).round().clamp(0, 255).to(pixels.dtype))
    return found


def _resize_source(x: Tensor, view: ImageView, policy: ResolutionPolicy) -> Tensor:
    """Crop or pad x (B, C, H, W) to the rectangle of a view and resize it."""
    (H, W), (top, left, height, width) = x.shape[2:], view.source
    x = F.pad(x, (-left, left + width - W, -top, top + height - H))  # negative padding crops
    if x.shape[2:] == view.resized_size:
        return x
    return F.interpolate(x, view.resized_size, mode=policy.resample, antialias=True)


def single_view(policy: ResolutionPolicy, height: int, width: int) -> ImageView:
    """Return the view of a policy that makes exactly one view per image, by one resize."""
    if isinstance(policy, SplitPolicy):
        raise ConfigError("SplitPolicy resizes an image several times", "use naive, letterbox or crop")
    views = policy.layout(height, width).views
    if len(views) != 1:
        raise ConfigError(
            f"{type(policy).__name__} makes {len(views)} views of an image of {height} × {width}",
            "use naive, letterbox or crop, which give all images one shape",
        )
    return views[0]


def get_fixed_view(policy: ResolutionPolicy) -> ImageView:
    """Return the view of a policy that makes one view of one size of every image; raise for other policies."""
    if isinstance(policy, CanvasPolicy) or policy.view_sizes != "equal":
        raise ConfigError(
            f"policy {type(policy).__name__} gives images different numbers of tokens",
            "use naive, letterbox or crop, and a tower with one image size",
        )
    return single_view(policy, 1, 1)


def find_view_layout(policy: ResolutionPolicy, image_shape: Size) -> ImageLayout | None:
    """Return the layout of images of one shape under a policy with several views or native sizes; None if it makes one
    view of one size of every image.

    Raises for policies that batches do not support.
    """
    if isinstance(policy, CanvasPolicy | SplitPolicy) or policy.view_sizes == "native":
        get_fixed_view(policy)  # raises
    layout = policy.layout(*image_shape)
    if policy.view_sizes == "unequal":
        if len({view.canvas_size for view in layout.views}) > 1:
            raise ConfigError(
                f"{type(policy).__name__} makes views of several sizes of an image of {image_shape[0]} × "
                f"{image_shape[1]}",
                "use images of another shape, or another policy",
            )
        return layout
    return layout if len(layout.views) > 1 else None


def is_plain_resize(policy: ResolutionPolicy, height: int, width: int) -> bool:
    """Return whether the policy only resizes: the view holds the whole image and no padding."""
    view = single_view(policy, height, width)
    return view.source == (0, 0, height, width) and view.resized_size == view.canvas_size and view.offset == (0, 0)


# ---- resizing with Pillow's arithmetic --------------------------------------------------------------------------

WEIGHT_SCALE = 2**22  # fixed-point scale of the resampling weights


def resize_like_pillow(images: Tensor, image_size: int, resample: str) -> Tensor:
    """Resize square images (…, S, S) of values 0 … 255 to (…, image_size, image_size), in float64.

    The result equals `Image.resize` bit for bit: weights are rounded to fixed point, the horizontal pass comes first,
    and values are rounded after each pass.
    """
    weights = _weights(images.shape[-1], image_size, resample, images.device)  # (side, S)
    for axis in (-1, -2):
        sums = images.double().movedim(axis, -1) @ weights.T
        images = ((sums + WEIGHT_SCALE // 2) / WEIGHT_SCALE).floor().clamp(0, 255).movedim(-1, axis)
    return images


@lru_cache(maxsize=16)
def _weights(before: int, after: int, resample: str, device: torch.device) -> Tensor:
    """Return the resampling weights (after, before) of one axis."""
    scale = before / after
    wide, places = max(scale, 1.0), torch.arange(before, dtype=torch.float64)
    middle = (torch.arange(after, dtype=torch.float64)[:, None] + 0.5) * scale
    reach = {"bilinear": 1, "bicubic": 2}[resample] * wide
    in_support = (places >= (middle - reach + 0.5).floor()) & (places < (middle + reach + 0.5).floor())
    distance = ((places - middle + 0.5) * (1 / wide)).abs()
    if resample == "bilinear":
        weights = (1 - distance).clamp(min=0)
    else:
        inner = (1.5 * distance - 2.5) * distance**2 + 1
        weights = torch.where(distance < 1, inner, (((5 - distance) * distance - 8) * distance + 4) / 2).where(
            distance < 2, 0
        )
    weights = weights.where(in_support, 0)
    weights = weights * (1 / weights.sum(1, keepdim=True)) * WEIGHT_SCALE
    return (weights + 0.5 * weights.sign()).trunc().to(device)
