"""Image similarity: PSNR, SSIM and LPIPS, one value per image.

Images are uint8, or floats in −1…1; values outside raise an error. PSNR and SSIM use 0…1, so their data range is 1.

N images, C channels, H, W pixels
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError, ImageError

CHUNK_ELEMENTS = 1 << 20  # elements processed at a time: 4 MiB in float32
SSIM_WINDOW, SSIM_SIGMA = 11, 1.5  # SSIM's Gaussian window
SSIM_MARGINS = {"mirrored": SSIM_WINDOW // 2, "left out": 0}
SSIM_CONSTANTS = (0.01**2, 0.03**2)  # SSIM's constants for a data range of 1
RANGE_TOLERANCE = 1e-3  # tolerance of the range, for half precision


def psnr(x: Tensor, y: Tensor) -> Tensor:
    """PSNR (N,) in dB of image pairs (N, C, H, W): 10 log₁₀ (1 / mean squared error); infinite for equal images."""
    return torch.cat([-10 * (a - b).square().mean((1, 2, 3)).log10() for a, b in _iter_chunks(x, y)])


def ssim(x: Tensor, y: Tensor, *, borders: Literal["mirrored", "left out"] = "mirrored") -> Tensor:
    """SSIM (N,) of image pairs (N, C, H, W), 1 for equal images.

    Gaussian window of 11 × 11 pixels with standard deviation 1.5, K₁ = 0.01, K₂ = 0.03, mean over positions and
    channels. "mirrored" borders are as in torchmetrics. "left out" uses positions inside the image only, as in
    scikit-image and the paper.
    """
    if x.ndim == 4 and min(x.shape[2:]) < SSIM_WINDOW:
        raise ImageError(
            f"images of {x.shape[2]} × {x.shape[3]} pixels are smaller than SSIM's window",
            f"pass images of at least {SSIM_WINDOW} pixels per side",
        )
    if borders not in SSIM_MARGINS:
        raise ConfigError(f"unknown borders {borders!r} of SSIM", f"choose from {', '.join(SSIM_MARGINS)}")
    return torch.cat([_ssim(a, b, SSIM_MARGINS[borders]) for a, b in _iter_chunks(x, y)])


def lpips(x: Tensor, y: Tensor, network: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """LPIPS (N,) of image pairs (N, 3, H, W), 0 for equal images; `network` is a `vitrail.encoders.vgg.LPIPS`."""
    with torch.no_grad():
        return torch.cat([network(a * 2 - 1, b * 2 - 1) for a, b in _iter_chunks(x, y)])


def to_unit_range(images: Tensor) -> Tensor:
    """Convert images to floats in 0…1; raise an error if values are out of range."""
    if images.dtype == torch.uint8:
        return images / 255
    if not images.is_floating_point():
        raise ImageError(f"images of type {images.dtype} have no known range", "pass uint8, or floats in −1…1")
    values = images if images.dtype.itemsize >= 4 else images.float()
    low, high = values.aminmax()
    if not (low >= -1 - RANGE_TOLERANCE and high <= 1 + RANGE_TOLERANCE):  # false for NaN as well
        raise ImageError(
            f"values range from {low:.4g} to {high:.4g}, but float images must be in −1…1",
            "clamp the output of a decoder; rescale other ranges first",
        )
    return (values.clamp(-1, 1) + 1) / 2


def _iter_chunks(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if x.ndim != 4 or x.shape != y.shape or not x.numel():
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise ImageError(f"shapes {shapes} cannot be compared", "pass two batches (N, C, H, W) of equal shape")
    step = max(1, CHUNK_ELEMENTS // x[0].numel())
    for a, b in zip(x.split(step), y.split(step), strict=True):
        a, b = to_unit_range(a), to_unit_range(b)
        dtype = torch.promote_types(a.dtype, b.dtype)
        yield a.to(dtype), b.to(dtype)


def _ssim(x: Tensor, y: Tensor, margin: int) -> Tensor:
    # Subtracting 0.5 leaves variances unchanged and reduces rounding errors.
    x, y = (F.pad(images - 0.5, [margin] * 4, mode="reflect") for images in (x, y))
    means = torch.cat([x, y, x * x, y * y, x * y], dim=1)  # (N, 5C, H, W)
    window = [math.exp(-((i - SSIM_WINDOW // 2) ** 2) / (2 * SSIM_SIGMA**2)) for i in range(SSIM_WINDOW)]
    for axis in (2, 3):
        # Sums of shifted images: a convolution would be slow on CPUs and use TF32 on GPUs.
        length = means.shape[axis] - SSIM_WINDOW + 1
        total = torch.zeros_like(means.narrow(axis, 0, length))
        for i, weight in enumerate(window):
            total.add_(means.narrow(axis, i, length), alpha=weight / sum(window))
        means = total
    mx, my, mxx, myy, mxy = means.unflatten(1, (5, -1)).unbind(1)  # each (N, C, H, W), or 10 less a side
    vx, vy, vxy = (mxx - mx * mx).clamp_min(0), (myy - my * my).clamp_min(0), mxy - mx * my
    mx, my = mx + 0.5, my + 0.5
    luminance = (2 * mx * my + SSIM_CONSTANTS[0]) / (mx * mx + my * my + SSIM_CONSTANTS[0])
    return (luminance * (2 * vxy + SSIM_CONSTANTS[1]) / (vx + vy + SSIM_CONSTANTS[1])).mean((1, 2, 3))
