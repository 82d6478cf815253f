"""How alike two pictures are: PSNR, SSIM and LPIPS, one number a picture.

Pictures are uint8, or floating and in −1…1; what lies outside is refused, since a file could not hold it. PSNR and SSIM
then measure on 0…1, so their data range is 1.

N pictures, C channels, H, W pixels
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError, ImageError

CHUNK = 1 << 20  # numbers worked on at a time: a float32 copy is 4 MiB
WINDOW, SIGMA = 11, 1.5  # of SSIM's Gaussian
MARGINS = {"mirrored": WINDOW // 2, "left out": 0}
STABLE = (0.01**2, 0.03**2)  # SSIM's constants for a data range of 1
SLACK = 1e-3  # of the range, for sums in half precision


def psnr(x: Tensor, y: Tensor) -> Tensor:
    """10 log₁₀ (1 / mean squared error) of every pair (N, C, H, W) → (N,) in dB, infinite for equals."""
    return torch.cat([-10 * (a - b).square().mean((1, 2, 3)).log10() for a, b in _chunks(x, y)])


def ssim(x: Tensor, y: Tensor, *, borders: Literal["mirrored", "left out"] = "mirrored") -> Tensor:
    """Structural similarity (N, C, H, W) → (N,), 1 for equals: a Gaussian window of 11 × 11 and deviation 1.5,
    K₁ = 0.01, K₂ = 0.03, the mean over places and channels.

    Near a border the window looks at mirrored pixels, as in torchmetrics; with borders "left out" only the places where
    it fits count, as in scikit-image and the paper.
    """
    if x.ndim == 4 and min(x.shape[2:]) < WINDOW:
        raise ImageError(f"SSIM's window does not fit into {x.shape[2]} × {x.shape[3]}", f"at least {WINDOW} a side")
    if borders not in MARGINS:
        raise ConfigError(f"SSIM knows no borders {borders!r}", f"choose from {', '.join(MARGINS)}")
    return torch.cat([_ssim(a, b, MARGINS[borders]) for a, b in _chunks(x, y)])


def lpips(x: Tensor, y: Tensor, network: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """LPIPS (N, 3, H, W) → (N,), 0 for equals; `network` is a `vitrail.encoders.vgg.LPIPS`."""
    with torch.no_grad():
        return torch.cat([network(a * 2 - 1, b * 2 - 1) for a, b in _chunks(x, y)])


def unit(pictures: Tensor) -> Tensor:
    """Pictures as floating numbers in 0…1, after looking whether they can be."""
    if pictures.dtype == torch.uint8:
        return pictures / 255
    if not pictures.is_floating_point():
        raise ImageError(f"pictures of {pictures.dtype} have no known range", "give uint8, or floating in −1…1")
    wide = pictures if pictures.dtype.itemsize >= 4 else pictures.float()
    low, high = wide.aminmax()
    if not (low >= -1 - SLACK and high <= 1 + SLACK):  # false for NaN as well
        raise ImageError(
            f"pictures reach from {low:.4g} to {high:.4g}, and floating ones lie in −1…1",
            "clamp what a decoder drew; bring other ranges there first",
        )
    return (wide.clamp(-1, 1) + 1) / 2


def _chunks(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if x.ndim != 4 or x.shape != y.shape or not x.numel():
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise ImageError(f"pictures of {shapes} cannot be compared", "give two batches (N, C, H, W) of one shape")
    step = max(1, CHUNK // x[0].numel())
    for a, b in zip(x.split(step), y.split(step), strict=True):
        a, b = unit(a), unit(b)
        together = torch.promote_types(a.dtype, b.dtype)
        yield a.to(together), b.to(together)


def _ssim(x: Tensor, y: Tensor, margin: int) -> Tensor:
    # Variances do not change with a shift, and lose fewer digits.
    x, y = (F.pad(each - 0.5, [margin] * 4, mode="reflect") for each in (x, y))
    means = torch.cat([x, y, x * x, y * y, x * y], dim=1)  # (N, 5C, H, W)
    window = [math.exp(-((i - WINDOW // 2) ** 2) / (2 * SIGMA**2)) for i in range(WINDOW)]
    for axis in (2, 3):
        # Sums of shifted pictures and no convolution: that would be slow on a CPU and rounded to TF32 on a GPU.
        length = means.shape[axis] - WINDOW + 1
        total = torch.zeros_like(means.narrow(axis, 0, length))
        for i, weight in enumerate(window):
            total.add_(means.narrow(axis, i, length), alpha=weight / sum(window))
        means = total
    mx, my, mxx, myy, mxy = means.unflatten(1, (5, -1)).unbind(1)  # each (N, C, H, W), or 10 less a side
    vx, vy, vxy = (mxx - mx * mx).clamp_min(0), (myy - my * my).clamp_min(0), mxy - mx * my
    mx, my = mx + 0.5, my + 0.5
    light = (2 * mx * my + STABLE[0]) / (mx * mx + my * my + STABLE[0])
    return (light * (2 * vxy + STABLE[1]) / (vx + vy + STABLE[1])).mean((1, 2, 3))
