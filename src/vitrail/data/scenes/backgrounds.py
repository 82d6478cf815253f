"""What lies behind a scene: no stored pictures, but a small lattice of colours stretched over the picture.

A background is one whole number; its remainder says the kind and all else is drawn from it. Between the points of the
lattice colours go straight (gradients), smoothly (noise) or at once, over one pixel (stripes and checks). The colours
are muted, so that tinted objects stand out.

B scenes, N points a side, H, W pixels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.scenes.chance import pick
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
    kind = background % len(KINDS)
    least, most, curve = (_of(kind, values) for values in zip(*((*k.cells, k.curve) for k in KINDS), strict=True))
    cells = least + pick(0, background, "cells", of=(most - least + 1))
    colours = _lattice(background, kind, cells)  # (B, N, N)
    (row, down), (column, across) = (_places(cells, curve, n) for n in (H, W))  # (B, H) each, (B, W) each
    above, below = (colours.gather(1, (row + i)[:, :, None].expand(-1, -1, N)) for i in (0, 1))
    lines = lerp(above, below, down[:, :, None])  # (B, H, N)
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


def _lattice(background: Tensor, kind: Tensor, cells: Tensor) -> Tensor:
    """(B,) → (B, N, N) packed colours"""
    kind, cells = kind[:, None, None], cells[:, None, None]
    i = torch.arange(N, device=background.device)
    y, x = i[:, None].expand(N, N), i.expand(N, N)
    turned = pick(0, background, "turned", 1, 1, of=2)
    slope = pick(0, background, "slope", 1, 2, of=257)  # of the gradient, down and across
    fine = pick(0, background, "fine", N, N, of=257)
    coarse = _stretched(pick(0, background, "coarse", 5, 5, of=257))
    run = slope[:, :, :1] + slope[:, :, 1:]
    gradient = (y * slope[:, :, :1] + x * slope[:, :, 1:]) * 256 // (cells * run.clamp(min=1))
    stripes = (torch.where(turned == 0, y, x) & 1) << 8
    checks = (y + x & 1) << 8
    photo = (y * 256 // cells * 2 + coarse * 5 + fine - 512) // 4  # 128 in the mean, and often beyond 0…256
    fields = (torch.zeros_like(fine), gradient, stripes.expand_as(fine), checks.expand_as(fine), fine, photo)
    field = torch.stack([f.expand_as(fine) for f in fields]).gather(0, kind[None].expand(1, -1, N, N))[0].clamp(0, 256)
    first, second, third = _palette(background)[:, :, None, None]
    # The photograph goes through three colours, all else from the first to the second.
    two, three = lerp(first, second, field), lerp(lerp(first, second, field), lerp(second, third, field), field)
    return torch.where(kind == NAMES.index("photo"), three, two)


def _stretched(points: Tensor) -> Tensor:
    """(B, 5, 5) → (B, N, N): straight between points that lie four apart"""
    for axis in (1, 2):
        before, behind = points.narrow(axis, 0, 4), points.narrow(axis, 1, 4)
        steps = [(before * (4 - k) + behind * k) // 4 for k in range(4)]
        points = torch.stack(steps, axis + 1).flatten(axis, axis + 1)
    return points


def _palette(background: Tensor) -> Tensor:
    """(B,) → (3, B) packed: three muted colours, the second and third each a step of lightness from the one before"""
    lightness = 60 + pick(0, background, "lightness", 1, of=160)
    hue = pick(0, background, "hue", 3, of=81) - 40
    step = 24 + pick(0, background, "step", 2, of=48)  # always some contrast, in a direction that has room
    colours = [lightness + hue]
    for k in range(2):
        away = torch.where(colours[-1].sum(1, keepdim=True) > 420, -1, 1)
        shift = pick(0, background, f"shift {k}", 3, of=41) - 20
        colours.append(colours[-1] + away * step[:, k : k + 1] + shift)
    return torch.stack([pack(torch.cat([c.clamp(24, 240), torch.full_like(c[:, :1], 255)], 1).T) for c in colours])


def _of(kind: Tensor, values: tuple[int, ...]) -> Tensor:
    """One value a kind, looked up without a table on the device."""
    out = torch.zeros_like(kind)
    for i, value in enumerate(values):
        out = torch.where(kind == i, value, out)
    return out
