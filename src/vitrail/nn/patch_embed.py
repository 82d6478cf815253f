"""Conversion between pixels and patches, and the patch embedding.

B batch, C channels, T time, H, W pixels, N patches, D width; t, p, q the patch's time, height and width
"""

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError, ImageError

PatchSize = tuple[int, int, int]


def patchify(pixels: Tensor, patch_size: PatchSize) -> Tensor:
    """Cut (B, C, H, W) or (B, C, T, H, W) into patches (B, N, C·t·p·q) in (time, row, column) order.

    A still image is repeated to fill the temporal patch size, as in video towers.
    """
    t, p, q = patch_size
    if pixels.ndim == 4:
        pixels = pixels[:, :, None].expand(-1, -1, t, -1, -1)
    B, C, T, H, W = pixels.shape
    if T % t or H % p or W % q or not (T and H and W):
        raise ImageError(
            f"{T} × {H} × {W} pixels cannot be cut into patches of {t} × {p} × {q}",
            "choose a resolution policy whose size is a multiple of the patch size",
        )
    blocks = pixels.reshape(B, C, T // t, t, H // p, p, W // q, q)
    return blocks.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(B, (T // t) * (H // p) * (W // q), C * t * p * q)


def unpatchify(patches: Tensor, patch_size: PatchSize, grid: tuple[int, int, int]) -> Tensor:
    """Invert `patchify` for a grid of (time, rows, columns) patches: (B, N, C·t·p·q) → (B, C, T, H, W)."""
    (t, p, q), (gt, gh, gw) = patch_size, grid
    B, N, K = patches.shape
    if N != gt * gh * gw or K % (t * p * q):
        raise ConfigError(f"{N} patches of {K} values do not fill a {gt} × {gh} × {gw} grid of {t} × {p} × {q}")
    blocks = patches.reshape(B, gt, gh, gw, K // (t * p * q), t, p, q)
    return blocks.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(B, K // (t * p * q), gt * t, gh * p, gw * q)


class PatchEmbed(nn.Module):
    """Patch embedding: a convolution with stride = kernel = patch size, computed as a matrix product.

    It takes pixels (B, C, H, W), video (B, C, T, H, W), or patches (…, N, C·t·p·q). The weight is the flattened
    convolution weight, `conv.weight.flatten(1)`.
    """

    def __init__(self, patch_size: PatchSize, width: int, channels: int = 3, bias: bool = True):
        super().__init__()
        self.patch_size, self.channels = patch_size, channels
        t, p, q = patch_size
        self.proj = nn.Linear(channels * t * p * q, width, bias=bias)

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.ndim < 4:
            return self.proj(pixels)
        if pixels.shape[1] != self.channels:
            raise ImageError(
                f"the tower expects {self.channels} channels, but pixels have shape {tuple(pixels.shape)}",
                "load images with vitrail.processing.image_loading.load_image, which returns RGB",
            )
        return self.proj(patchify(pixels, self.patch_size))


def compute_window_ids(t: int, h: int, w: int, window_size: int) -> Tensor:
    """Return the window index of every cell, (t·h·w,): squares of `window_size`, smaller at the right and bottom edges.

    As segments of an attention plan they make attention local (Qwen2.5-VL's ViT) without reordering tokens.
    """
    rows, columns = -(-h // window_size), -(-w // window_size)
    frame = torch.arange(t)[:, None, None] * (rows * columns)
    window = frame + (torch.arange(h) // window_size)[:, None] * columns + torch.arange(w) // window_size
    return window.flatten()
