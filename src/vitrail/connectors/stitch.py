"""The views of a picture side by side again, as soft tokens.

M soft tokens of a view, W their width
"""

import torch.nn.functional as F
from torch import Tensor

from vitrail.processing.cut import Cut, Span


def stitched(soft: Tensor, cut: Cut, span: Span) -> Tensor:
    """The tokens of a span, row by row, from the soft tokens (views, M, W) of its cut: (rows · columns, W)"""
    (down, across), (top, left, height, width) = span.layout, span.window
    grid, W = cut.views[span.first].grid, soft.shape[-1]
    tiles = soft[span.first : span.first + down * across].view(down, across, grid.rows, grid.columns, W)
    mosaic = tiles.transpose(1, 2).reshape(down * grid.rows, across * grid.columns, W)
    window = mosaic[top : top + height, left : left + width]
    if span.size != (height, width):
        window = F.interpolate(window.permute(2, 0, 1)[None], size=span.size, mode="bilinear")[0].permute(1, 2, 0)
    return window.reshape(-1, W)
