"""Pixels ⇄ patches, and the embedding of a patch.

B batch, C channels, T time, H, W pixels, N patches, D width; t, p, q the patch's time, height and width
"""

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError, ImageError

Patch = tuple[int, int, int]


def patchify(pixels: Tensor, patch: Patch) -> Tensor:
    """(B, C, H, W) or (B, C, T, H, W) → (B, N, C·t·p·q), patches in (time, row, column) order.

    A still picture is repeated to fill the patch's time, as the video towers do.
    """
    t, p, q = patch
    if pixels.ndim == 4:
        pixels = pixels[:, :, None].expand(-1, -1, t, -1, -1)
    B, C, T, H, W = pixels.shape
    if T % t or H % p or W % q or not (T and H and W):
        raise ImageError(
            f"{T} × {H} × {W} pixels cannot be cut into patches of {t} × {p} × {q}",
            "choose a resolution policy whose size is a multiple of the patch",
        )
    cut = pixels.reshape(B, C, T // t, t, H // p, p, W // q, q)
    return cut.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(B, (T // t) * (H // p) * (W // q), C * t * p * q)


def unpatchify(patches: Tensor, patch: Patch, grid: tuple[int, int, int]) -> Tensor:
    """(B, N, C·t·p·q) → (B, C, T, H, W): the inverse of `patchify` for a grid of (time, rows, columns) patches."""
    (t, p, q), (gt, gh, gw) = patch, grid
    B, N, K = patches.shape
    if N != gt * gh * gw or K % (t * p * q):
        raise ConfigError(f"{N} patches of {K} numbers do not fill a {gt} × {gh} × {gw} grid of {t} × {p} × {q}")
    cut = patches.reshape(B, gt, gh, gw, K // (t * p * q), t, p, q)
    return cut.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(B, K // (t * p * q), gt * t, gh * p, gw * q)


class PatchEmbed(nn.Module):
    """The convolution with stride = kernel = patch, written as the matrix product it is.

    Takes pixels (B, C, H, W), video (B, C, T, H, W), or patches already cut (…, N, C·t·p·q). The weight is that of
    the convolution, flattened: `conv.weight.flatten(1)`.
    """

    def __init__(self, patch: Patch, width: int, channels: int = 3, bias: bool = True):
        super().__init__()
        self.patch, self.channels = patch, channels
        t, p, q = patch
        self.proj = nn.Linear(channels * t * p * q, width, bias=bias)

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.ndim < 4:
            return self.proj(pixels)
        if pixels.shape[1] != self.channels:
            raise ImageError(
                f"the tower reads {self.channels} channels, not {pixels.shape[1]} as in {tuple(pixels.shape)}",
                "load it with vitrail.processing.images.load_image, which always gives RGB",
            )
        return self.proj(patchify(pixels, self.patch))


def grid_windows(t: int, h: int, w: int, size: int) -> Tensor:
    """(t·h·w,) the window every cell lies in: `size` × `size` squares of each frame, smaller at the far edges.

    Used as segments of an attention plan, which makes attention local (Qwen2.5-VL's ViT) without moving a token.
    """
    rows, columns = -(-h // size), -(-w // size)
    frame = torch.arange(t)[:, None, None] * (rows * columns)
    window = frame + (torch.arange(h) // size)[:, None] * columns + torch.arange(w) // size
    return window.flatten()
