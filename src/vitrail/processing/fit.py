"""What `cut.render` makes of one picture, of a batch of pictures of one size, wherever it lies.

B pictures, C channels, H, W pixels
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.processing.cut import Padded, Policy, View


def fit(pixels: Tensor, policy: Policy) -> Tensor:
    """uint8 (B, 3 or 4, H, W) → uint8 (B, 3 or 4, h, w): the one view of each that the policy makes, opaque where it
    fills up"""
    view = only_view(policy, *pixels.shape[2:])
    if policy.resample == "lanczos":
        raise ConfigError("a batch is not resampled by lanczos", "use bicubic or bilinear")
    colour = (*(policy.fill if isinstance(policy, Padded) else (0, 0, 0)), 255)
    fill = pixels.new_tensor(colour[: pixels.shape[1]]).view(-1, 1, 1).float()
    x = pixels.float() - fill  # what is added at the edges is 0
    (H, W), (top, left, height, width) = x.shape[2:], view.source
    x = F.pad(x, (-left, left + width - W, -top, top + height - H))  # what would be negative is cut away
    if x.shape[2:] != view.resized:
        x = F.interpolate(x, view.resized, mode=policy.resample, antialias=True)
    (down, across), (h, w) = view.offset, view.canvas
    x = F.pad(x, (across, w - across - x.shape[3], down, h - down - x.shape[2]))
    return (x + fill).round().clamp(0, 255).to(pixels.dtype)


def only_view(policy: Policy, height: int, width: int) -> View:
    """That of a policy whose pictures are one view each."""
    views = policy.cut(height, width).views
    if len(views) != 1:
        raise ConfigError(
            f"{type(policy).__name__} makes {len(views)} views of a picture of {height} × {width}",
            "use naive, letterbox or crop where all pictures are to have one shape",
        )
    return views[0]


def squashes(policy: Policy, height: int, width: int) -> bool:
    """Whether all of a picture, and nothing else, fills the view."""
    view = only_view(policy, height, width)
    return view.source == (0, 0, height, width) and view.resized == view.canvas and view.offset == (0, 0)


# ---- Pillow's arithmetic ----------------------------------------------------------------------------------------

WHOLE = 2**22  # weights are whole numbers of this part


def resized(squares: Tensor, side: int, resample: str) -> Tensor:
    """Squares (…, S, S) of levels 0 … 255 → (…, side, side), in float64: those of `Image.resize`, bit for bit. Weights
    are rounded, rows come before columns, which of other shapes they need not, and levels are rounded after each."""
    weights = _weights(squares.shape[-1], side, resample, squares.device)  # (side, S)
    for axis in (-1, -2):
        sums = squares.double().movedim(axis, -1) @ weights.T
        squares = ((sums + WHOLE // 2) / WHOLE).floor().clamp(0, 255).movedim(-1, axis)
    return squares


@lru_cache(maxsize=16)
def _weights(before: int, after: int, resample: str, device: torch.device) -> Tensor:
    """(after, before): what each place of a line counts for each of the new ones"""
    scale = before / after
    wide, places = max(scale, 1.0), torch.arange(before, dtype=torch.float64)
    middle = (torch.arange(after, dtype=torch.float64)[:, None] + 0.5) * scale
    reach = {"bilinear": 1, "bicubic": 2}[resample] * wide
    seen = (places >= (middle - reach + 0.5).floor()) & (places < (middle + reach + 0.5).floor())
    far = ((places - middle + 0.5) * (1 / wide)).abs()
    if resample == "bilinear":
        found = (1 - far).clamp(min=0)
    else:
        near = (1.5 * far - 2.5) * far**2 + 1
        found = torch.where(far < 1, near, (((5 - far) * far - 8) * far + 4) / 2).where(far < 2, 0)
    found = found.where(seen, 0)
    found = found * (1 / found.sum(1, keepdim=True)) * WHOLE
    return (found + 0.5 * found.sign()).trunc().to(device)
