"""Stitch the visual tokens of the views of an image.

Shapes: M visual tokens of a view, W their width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.processing.image_layout import ImageLayout, ViewSpan


def stitch_views(tokens: Tensor, layout: ImageLayout, span: ViewSpan) -> Tensor:
    """Return the tokens of a span row by row, (rows · columns, W), from the tokens (views, M, W) of all views."""
    (down, across), (top, left, height, width) = span.view_grid, span.window
    grid, W = layout.views[span.first_view].grid, tokens.shape[-1]
    tiles = tokens[span.first_view : span.first_view + down * across].view(
        down, across, grid.num_rows, grid.num_columns, W
    )
    mosaic = tiles.transpose(1, 2).reshape(down * grid.num_rows, across * grid.num_columns, W)
    if span.overlap != (0, 0):
        rows, columns = (_keep(*axis, span) for axis in ((down, grid.num_rows), (across, grid.num_columns)))
        mosaic = mosaic[rows][:, columns]
    window = mosaic[top : top + height, left : left + width]
    if span.size != (height, width):
        window = F.interpolate(window.permute(2, 0, 1)[None], size=span.size, mode="bilinear")[0].permute(1, 2, 0)
    return window.reshape(-1, W)


def stitch_spans(tokens: Tensor, layout: ImageLayout, newline: Tensor, separator: Tensor) -> Tensor:
    """Return the tokens of all spans of an image, with `newline` (W,) after rows and `separator` (W,) at ends."""
    pieces = []
    for span in layout.spans:
        rows = stitch_views(tokens, layout, span).view(*span.size, tokens.shape[-1])
        if span.newline == "row":
            rows = torch.cat([rows, newline.expand(len(rows), 1, -1)], dim=1)
        pieces.append(rows.flatten(0, 1))
        if span.newline == "end":
            pieces.append(separator[None])
    return torch.cat(pieces)


def _keep(views: int, length: int, span: ViewSpan) -> list[int]:
    """Return the indices of the tokens along an axis that remain of `views` overlapping views of `length` tokens."""
    before, after = span.overlap
    return [
        view * length + place
        for view in range(views)
        for place in range(before * (view > 0), length - after * (view < views - 1))
    ]
