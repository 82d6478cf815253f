"""Procedural backgrounds: a small lattice of colours, interpolated over the image.

A background is one integer. Its remainder determines the kind, and its random numbers determine the rest. Colours
between lattice points change linearly (gradients), smoothly (noise) or within one pixel (stripes and checks). The
colours are muted, so that tinted objects stand out.

Shapes: B scenes, N lattice points per side, H × W pixels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.scenes.counter_rng import random_integers
from vitrail.data.scenes.packed_pixels import lerp, pack_channels

LATTICE_SIZE = 16
_STRAIGHT, _SMOOTH, _SHARP = range(3)


class BackgroundKind(NamedTuple):
    """A kind of background."""

    name: str
    cell_range: tuple[int, int]  # minimum and maximum number of cells across the image
    interpolation: int  # interpolation between lattice points


BACKGROUND_KINDS = (
    BackgroundKind("flat", (1, 1), _STRAIGHT),
    BackgroundKind("gradient", (4, 4), _STRAIGHT),
    BackgroundKind("stripes", (3, 12), _SHARP),
    BackgroundKind("checks", (3, 12), _SHARP),
    BackgroundKind("noise", (5, 15), _SMOOTH),
    BackgroundKind(
        "photo", (9, 15), _STRAIGHT
    ),  # like a blurred photo: light at the top, dark at the bottom, with large and small blotches
)
BACKGROUND_NAMES = tuple(kind.name for kind in BACKGROUND_KINDS)


def render_backgrounds(background: Tensor, height: int, width: int) -> Tensor:
    """Render backgrounds (B,) to packed, opaque pixels (B, H, W)."""
    kind = background % len(BACKGROUND_KINDS)
    min_cells, max_cells, curve = (
        _select_by_kind(kind, values)
        for values in zip(*((*k.cell_range, k.interpolation) for k in BACKGROUND_KINDS), strict=True)
    )
    cells = min_cells + random_integers(0, background, "cells", high=(max_cells - min_cells + 1))
    colours = _sample_lattice(background, kind, cells)  # (B, N, N)
    # (B, H) each, (B, W) each
    (row, down), (column, across) = (_lattice_coordinates(cells, curve, n) for n in (height, width))
    above, below = (colours.gather(1, (row + i)[:, :, None].expand(-1, -1, LATTICE_SIZE)) for i in (0, 1))
    lines = lerp(above, below, down[:, :, None])  # (B, H, N)
    left, right = (lines.gather(2, (column + i)[:, None, :].expand(-1, height, -1)) for i in (0, 1))
    return lerp(left, right, across[:, None, :])


def _lattice_coordinates(cells: Tensor, curve: Tensor, pixels: int) -> tuple[Tensor, Tensor]:
    """Return the lattice point before each pixel's centre (B, pixels), and the weight of the next one, 0…256."""
    cells, curve = cells[:, None], curve[:, None]
    at = (2 * torch.arange(pixels, device=cells.device) + 1) * 256 * cells // (2 * pixels)
    share = at & 255
    smooth = share * share * (768 - 2 * share) >> 16
    sharp = ((share - 128) * pixels // cells + 128).clamp(0, 256)
    return at >> 8, torch.where(curve == _SMOOTH, smooth, torch.where(curve == _SHARP, sharp, share))


def _sample_lattice(background: Tensor, kind: Tensor, cells: Tensor) -> Tensor:
    """Return the lattice colours (B, N, N), packed."""
    kind, cells = kind[:, None, None], cells[:, None, None]
    i = torch.arange(LATTICE_SIZE, device=background.device)
    y, x = i[:, None].expand(LATTICE_SIZE, LATTICE_SIZE), i.expand(LATTICE_SIZE, LATTICE_SIZE)
    turned = random_integers(0, background, "turned", 1, 1, high=2)
    slope = random_integers(0, background, "slope", 1, 2, high=257)  # of the gradient, vertical and horizontal
    fine = random_integers(0, background, "fine", LATTICE_SIZE, LATTICE_SIZE, high=257)
    coarse = _upsample(random_integers(0, background, "coarse", 5, 5, high=257))
    run = slope[:, :, :1] + slope[:, :, 1:]
    gradient = (y * slope[:, :, :1] + x * slope[:, :, 1:]) * 256 // (cells * run.clamp(min=1))
    stripes = (torch.where(turned == 0, y, x) & 1) << 8
    checks = (y + x & 1) << 8
    photo = (y * 256 // cells * 2 + coarse * 5 + fine - 512) // 4  # mean 128, often outside 0…256
    fields = (torch.zeros_like(fine), gradient, stripes.expand_as(fine), checks.expand_as(fine), fine, photo)
    field = (
        torch.stack([f.expand_as(fine) for f in fields])
        .gather(0, kind[None].expand(1, -1, LATTICE_SIZE, LATTICE_SIZE))[0]
        .clamp(0, 256)
    )
    first, second, third = _sample_palette(background)[:, :, None, None]
    # "photo" interpolates three colours, the other kinds two.
    two, three = lerp(first, second, field), lerp(lerp(first, second, field), lerp(second, third, field), field)
    return torch.where(kind == BACKGROUND_NAMES.index("photo"), three, two)


def _upsample(points: Tensor) -> Tensor:
    """Upsample points (B, 5, 5) to (B, N, N) by linear interpolation, four steps between points."""
    for axis in (1, 2):
        before, behind = points.narrow(axis, 0, 4), points.narrow(axis, 1, 4)
        steps = [(before * (4 - k) + behind * k) // 4 for k in range(4)]
        points = torch.stack(steps, axis + 1).flatten(axis, axis + 1)
    return points


def _sample_palette(background: Tensor) -> Tensor:
    """Return three muted colours (3, B), packed. Each differs from the previous one by a step of lightness."""
    lightness = 60 + random_integers(0, background, "lightness", 1, high=160)
    hue = random_integers(0, background, "hue", 3, high=81) - 40
    # Minimum contrast, in the direction that stays in range.
    step = 24 + random_integers(0, background, "step", 2, high=48)
    colours = [lightness + hue]
    for k in range(2):
        away = torch.where(colours[-1].sum(1, keepdim=True) > 420, -1, 1)
        shift = random_integers(0, background, f"shift {k}", 3, high=41) - 20
        colours.append(colours[-1] + away * step[:, k : k + 1] + shift)
    return torch.stack(
        [pack_channels(torch.cat([c.clamp(24, 240), torch.full_like(c[:, :1], 255)], 1).T) for c in colours]
    )


def _select_by_kind(kind: Tensor, values: tuple[int, ...]) -> Tensor:
    """Select a value by kind, without a lookup table on the device."""
    out = torch.zeros_like(kind)
    for i, value in enumerate(values):
        out = torch.where(kind == i, value, out)
    return out
