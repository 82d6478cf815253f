"""What lies behind a scene: no stored pictures, but a small lattice of colours stretched over the picture.

A background is one whole number; its remainder says the kind and all else is drawn from it. Between the points of the
lattice colours go straight (gradients), smoothly (noise) or at once, over one pixel (stripes and checks). The colours
are muted, so that tinted objects stand out.

B scenes, N points a side, H, W pixels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.scenes.chance import below, bits, happens
from vitrail.data.scenes.lanes import lerp, pack

N = 16
_STRAIGHT, _SMOOTH, _SHARP = range(3)


class Kind(NamedTuple):
    name: str
    cells: tuple[int, int]  # the least and the greatest number of cells across the picture
    curve: int


KINDS = (
    Kind("flat", (1, 1), _STRAIGHT),
    Kind("gradient", (4, 4), _STRAIGHT),
    Kind("stripes", (3, 12), _SHARP),
    Kind("checks", (3, 12), _SHARP),
    Kind("noise", (5, 15), _SMOOTH),
    Kind("photo", (9, 15), _STRAIGHT),  # light above, dark below, large and small blotches between
)
NAMES = tuple(kind.name for kind in KINDS)


def backdrop(background: Tensor, H: int, W: int) -> Tensor:
    """(B,) → (B, H, W) packed, opaque"""
    drawn = bits(0, background, "background", N * N + 25 + 13)
    fine, coarse, few = drawn.split([N * N, 25, 13], 1)
    kind = background % len(KINDS)
    least, most, curve = (_of(kind, values) for values in zip(*((*k.cells, k.curve) for k in KINDS), strict=True))
    cells = least + below(most - least + 1, few[:, 0])
    colours = _lattice(kind, cells, below(257, fine).view(-1, N, N), below(257, coarse).view(-1, 5, 5), few[:, 1:])
    (row, down), (column, across) = (_places(cells, curve, n) for n in (H, W))  # (B, H) each, (B, W) each
    above, beneath = (colours.gather(1, (row + i)[:, :, None].expand(-1, -1, N)) for i in (0, 1))
    lines = lerp(above, beneath, down[:, :, None])  # (B, H, N)
    left, right = (lines.gather(2, (column + i)[:, None, :].expand(-1, H, -1)) for i in (0, 1))
    return lerp(left, right, across[:, None, :])


def _places(cells: Tensor, curve: Tensor, pixels: int) -> tuple[Tensor, Tensor]:
    """(B,) → (B, pixels): the lattice point before each pixel's centre, and the share of the one behind it, of 256"""
    cells, curve = cells[:, None], curve[:, None]
    at = (2 * torch.arange(pixels, device=cells.device) + 1) * 256 * cells // (2 * pixels)
    share = at & 255
    smooth = share * share * (768 - 2 * share) >> 16
    sharp = ((share - 128) * pixels // cells + 128).clamp(0, 256)
    return at >> 8, torch.where(curve == _SMOOTH, smooth, torch.where(curve == _SHARP, sharp, share))


def _lattice(kind: Tensor, cells: Tensor, fine: Tensor, coarse: Tensor, few: Tensor) -> Tensor:
    """(B,) kinds and cells, noise of 0…256 at (B, N, N) and (B, 5, 5) points, (B, 12) draws → (B, N, N) packed"""
    kind, cells = kind[:, None, None], cells[:, None, None]
    i = torch.arange(N, device=kind.device)
    y, x = i[:, None], i
    turned = happens(0.5, few[:, 0, None, None])
    down, along = (below(257, few[:, k, None, None]) for k in (1, 2))  # the gradient's direction
    fields = (
        torch.zeros_like(fine),
        (y * down + x * along) * 256 // (cells * (down + along).clamp(min=1)),
        (torch.where(turned, y, x) & 1) << 8,
        (y + x & 1) << 8,
        fine,
        (y * 256 // cells * 2 + _stretched(coarse) * 5 + fine - 512) // 4,  # 128 in the mean, and often beyond 0…256
    )
    field = torch.zeros_like(fine)
    for number, values in enumerate(fields):
        field = torch.where(kind == number, values, field)
    field = field.clamp(0, 256)
    first, second, third = _palette(few[:, 3:])[:, :, None, None]
    # The photograph goes through three colours, all else from the first to the second.
    near, far = lerp(first, second, field), lerp(second, third, field)
    return torch.where(kind == NAMES.index("photo"), lerp(near, far, field), near)


def _stretched(points: Tensor) -> Tensor:
    """(B, 5, 5) → (B, N, N): straight between points that lie four apart"""
    share = torch.arange(4, device=points.device)
    for axis in (1, 2):
        before, behind = (points.narrow(axis, k, 4).unsqueeze(axis + 1) for k in (0, 1))
        along = share.view(4, 1) if axis == 1 else share
        points = ((before * (4 - along) + behind * along) // 4).flatten(axis, axis + 1)
    return points


def _palette(drawn: Tensor) -> Tensor:
    """(B, 9) → (3, B) packed: three muted colours, the second and third each a step of lightness from the one before"""
    colour = 60 + below(160, drawn[:, :1]) + below(81, drawn[:, 1:4]) - 40  # (B, 3)
    steps = 24 + below(48, drawn[:, 4:6])  # always some contrast
    shifts = below(41, drawn[:, 6:9]) - 20  # of hue
    colours = [colour]
    for k in range(2):
        away = torch.where(colour.sum(1, keepdim=True) > 420, -1, 1)  # in a direction that has room
        colour = colour + away * steps[:, k : k + 1] + shifts * (1 - 2 * k)
        colours.append(colour)
    rgb = torch.stack(colours, 1).clamp(24, 240)  # (B, 3 colours, 3)
    return pack(torch.cat([rgb, torch.full_like(rgb[..., :1], 255)], 2).permute(2, 1, 0))


def _of(kind: Tensor, values: tuple[int, ...]) -> Tensor:
    """One value a kind, looked up without a table on the device."""
    out = torch.zeros_like(kind)
    for i, value in enumerate(values):
        out = torch.where(kind == i, value, out)
    return out
