"""Where a token stands: (t, h, w) ids for rotary layouts, and learned tables that can be resized.

B batch, N tokens, D width
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError


def text_positions(length: int, start: int = 0) -> Tensor:
    """(N, 3): one running index on all three axes."""
    return torch.arange(start, start + length)[:, None].expand(-1, 3)


def grid_positions(
    t: int, h: int, w: int, start: int = 0, step: float = 1.0, device: torch.device | None = None
) -> Tensor:
    """(t·h·w, 3): row-major (t, h, w) ids of a picture or video, offset by `start`.

    `step` is absolute time (Qwen2.5-VL): seconds a frame × ids a second. It multiplies before it truncates, so
    half-second frames at two ids a second advance by one; truncating the seconds first would freeze them.
    """
    time = (torch.arange(t, dtype=torch.float64, device=device) * step).long()
    grid = torch.meshgrid(time, torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
    return torch.stack([axis.flatten() for axis in grid], dim=-1) + start


Resize = Literal["bicubic", "bicubic_antialias", "bilinear", "bilinear_antialias", "bilinear_corners"]


class LearnedPositions(nn.Module):
    """A learned row for every cell of an h × w grid, resized in 2-D to any other grid.

    `prefix` rows (CLS, registers) stand apart: they lead the table and are never resized. The ways to resize are
    those of the field: `bicubic` CLIP, DINOv2; `bicubic_antialias` DINOv2 with registers; `bilinear_antialias`
    SigLIP 2; `bilinear_corners` Qwen3-VL.
    """

    def __init__(self, grid: tuple[int, int], width: int, prefix: int = 0, resize: Resize = "bicubic"):
        super().__init__()
        self.grid, self.prefix, self.resize = grid, prefix, resize
        self.table = nn.Parameter(torch.zeros(prefix + grid[0] * grid[1], width))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, h: int, w: int) -> Tensor:
        """(prefix + h·w, D)"""
        if h < 1 or w < 1:
            raise ConfigError(f"a grid of {h} × {w} patches holds nothing", "use a picture of at least one patch")
        if (h, w) == self.grid:
            return self.table
        kind, _, option = self.resize.partition("_")
        cells = self.table[self.prefix :].unflatten(0, self.grid).movedim(-1, 0)[None]  # (1, D, h₀, w₀)
        cells = F.interpolate(
            # Half precision has no resize on every device, and rounds where it has; torch 2.13 on the CPU resizes
            # channels-last tables wrongly to a width of one where it antialiases.
            cells.float().contiguous(),
            size=(h, w),
            mode=kind,
            align_corners=option == "corners",
            antialias=option == "antialias",
        )
        cells = cells[0].flatten(1).T.to(self.table.dtype)  # (h·w, D)
        return torch.cat([self.table[: self.prefix], cells]) if self.prefix else cells
