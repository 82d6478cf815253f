"""Positions of tokens: (t, h, w) ids for rotary embeddings, and learned embeddings that can be resized.

B batch, N tokens, D width
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError


def build_text_positions(length: int, start: int = 0, device: torch.device | None = None) -> Tensor:
    """Return text positions (N, 3): the token index on all three axes."""
    return torch.arange(start, start + length, device=device)[:, None].expand(-1, 3)


def build_grid_positions(
    t: int, h: int, w: int, start: int = 0, step: float = 1.0, device: torch.device | None = None
) -> Tensor:
    """Return row-major (t, h, w) positions of an image or video, (t·h·w, 3), offset by `start`.

    `step` is seconds per frame × ids per second (absolute time of Qwen2.5-VL). Time is multiplied before it is
    truncated, so half-second frames at two ids per second advance by one.
    """
    time = (torch.arange(t, dtype=torch.float64, device=device) * step).long()
    grid = torch.meshgrid(time, torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
    return torch.stack([axis.flatten() for axis in grid], dim=-1) + start


def build_sincos_embedding(h: int, w: int, width: int, device: torch.device | None = None) -> Tensor:
    """Return fixed embeddings of an h × w grid, (h·w, width): sines and cosines of the column, then of the row."""
    frequency = 10_000.0 ** -(torch.arange(width // 4, dtype=torch.float64, device=device) / (width // 4))
    row, column = (torch.arange(size, dtype=torch.float64, device=device)[:, None] * frequency for size in (h, w))
    row, column = (torch.cat([angle.sin(), angle.cos()], dim=-1) for angle in (row, column))
    return torch.cat([column.repeat(h, 1), row.repeat_interleave(w, dim=0)], dim=-1).float()


Interpolation = Literal["bicubic", "bicubic_antialias", "bilinear", "bilinear_antialias", "bilinear_corners", "bucket"]


class LearnedPositionEmbedding(nn.Module):
    """Learned embedding for every cell of an h × w grid, interpolated in 2-D for other grids.

    The first `num_prefix_tokens` rows (CLS, registers) are never interpolated. Interpolations: `bicubic` (CLIP,
    DINOv2, GLM-4V), `bicubic_antialias` (DINOv2 with registers), `bilinear_antialias` (SigLIP 2), `bilinear_corners`
    (Qwen3-VL). With `bucket` a cell takes the embedding at its place in the learned grid, rounded down (MiniCPM-V).
    """

    def __init__(
        self,
        grid_size: tuple[int, int],
        width: int,
        num_prefix_tokens: int = 0,
        interpolation: Interpolation = "bicubic",
    ):
        super().__init__()
        self.grid_size, self.num_prefix_tokens, self.interpolation = grid_size, num_prefix_tokens, interpolation
        self.table = nn.Parameter(torch.zeros(num_prefix_tokens + grid_size[0] * grid_size[1], width))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, h: int, w: int) -> Tensor:
        """Return the embeddings of an h × w grid, (prefix + h·w, D)."""
        if h < 1 or w < 1:
            raise ConfigError(f"a grid of {h} × {w} patches is empty", "use an image of at least one patch")
        if self.interpolation == "bucket":
            rows, columns = (_find_buckets(n, size) for n, size in zip((h, w), self.grid_size, strict=True))
            cells = self.table[self.num_prefix_tokens :].unflatten(0, self.grid_size)  # (h₀, w₀, D)
            # Views instead of an index tensor: a CUDA graph cannot copy that tensor from the CPU.
            cells = torch.stack([cells[row] for row in rows])
            cells = torch.stack([cells[:, column] for column in columns], 1)  # (h, w, D)
            return torch.cat([self.table[: self.num_prefix_tokens], cells.flatten(0, 1)])
        if (h, w) == self.grid_size:
            return self.table
        kind, _, option = self.interpolation.partition("_")
        cells = self.table[self.num_prefix_tokens :].unflatten(0, self.grid_size).movedim(-1, 0)[None]  # (1, D, h₀, w₀)
        cells = F.interpolate(
            # Some devices cannot interpolate half precision, others round. torch 2.13 on the CPU interpolates
            # channels-last tables to a width of one wrongly with antialiasing.
            cells.float().contiguous(),
            size=(h, w),
            mode=kind,
            align_corners=option == "corners",
            antialias=option == "antialias",
        )
        cells = cells[0].flatten(1).T.to(self.table.dtype)  # (h·w, D)
        return torch.cat([self.table[: self.num_prefix_tokens], cells]) if self.num_prefix_tokens else cells


def _find_buckets(count: int, size: int) -> list[int]:
    """Return the learned index of each of `count` rows, in the float32 arithmetic of the reference."""
    boundaries = torch.arange(1 / size, 1.0, 1 / size)
    places = torch.arange(0, 1 - 1e-6, float(1 / torch.tensor(count)))[:count]
    return torch.bucketize(places, boundaries, right=True).tolist()
