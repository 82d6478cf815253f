"""Render clips to pixels on the device of their descriptions. Integer arithmetic: all devices give the same pixels.

Shapes: B clips, O objects, T frames, S side of the canvas
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.clips.clip_sampler import (
    APPEARS,
    CLIP_KINDS,
    COLOURS,
    DISAPPEARS,
    MOVES_LEFT,
    MOVES_RIGHT,
    NUM_OBJECTS,
    SHAPES,
    TURNS,
    ClipBatch,
)
from vitrail.data.scenes.counter_rng import random_integers

SIDE = 32  # of the canvas in which places are given; larger images repeat its pixels
SPRITE = 9  # side of a shape
LANES = (6, 16, 26)  # rows of the centres
COLUMNS = (10, 16, 22)
LEFT, RIGHT = 6, 26  # columns at which moves start or end
JUMP_HEIGHT = 3
PALETTE = (
    (230, 40, 40), (40, 190, 60), (60, 90, 240), (240, 220, 50), (180, 60, 210), (245, 245, 245),
    (0, 0, 0), (40, 40, 48), (56, 36, 20), (16, 44, 44), (40, 16, 44), (20, 28, 64),
)  # fmt: skip
"""Colours of shapes, in the order of `COLOURS`, then those of backgrounds."""


class _Tables(NamedTuple):
    """Constants on a device."""

    sprites: Tensor  # (shapes · SPRITE²,)
    palette: Tensor  # (colours and backgrounds, 3)
    lanes: Tensor
    columns: Tensor


@cache
def _tables_on(device: torch.device) -> _Tables:
    palette = torch.tensor(PALETTE, dtype=torch.uint8)
    tables = (draw_sprites().flatten(), palette, torch.tensor(LANES), torch.tensor(COLUMNS))
    return _Tables(*(table.to(device) for table in tables))


def draw_sprites() -> Tensor:
    """Return the masks of all shapes, (shapes, SPRITE, SPRITE)."""
    half = SPRITE // 2
    y, x = torch.meshgrid(torch.arange(-half, half + 1), torch.arange(-half, half + 1), indexing="ij")
    radius = x * x + y * y
    masks = {
        "circle": radius <= 17,
        "square": (x.abs() <= 3) & (y.abs() <= 3),
        "triangle": (y + half >= 2 * x.abs()) & (y <= 3),
        "cross": ((x.abs() <= 1) | (y.abs() <= 1)) & (radius <= 17),
        "ring": (radius <= 20) & (radius >= 8),
        "diamond": x.abs() + y.abs() <= 4,
    }
    return torch.stack([masks[name] for name in SHAPES])


def render_clips(clips: ClipBatch, image_size: int = SIDE, seed: int = 0, noise: int = 0) -> Tensor:
    """Render clips to uint8 (B, T, 3, S, S). `noise` is the largest change of the brightness of a pixel."""
    device, T = clips.kind.device, clips.num_frames
    y, x, colour, visible = place_objects(clips)  # (B, T, O) each
    tables, half = _tables_on(device), SPRITE // 2
    axis = torch.arange(SIDE, device=device)
    canvas = (len(COLOURS) + clips.background)[:, None, None, None].expand(-1, T, SIDE, SIDE)
    for o in range(NUM_OBJECTS):
        dy = axis[:, None] - y[:, :, o, None, None] + half  # (B, T, S, 1)
        dx = axis[None, :] - x[:, :, o, None, None] + half
        inside = (dy >= 0) & (dy < SPRITE) & (dx >= 0) & (dx < SPRITE) & visible[:, :, o, None, None]
        place = (clips.shape[:, o, None, None, None] * SPRITE + dy) * SPRITE + dx
        covered = inside & tables.sprites[place.clamp(0, len(tables.sprites) - 1)]
        canvas = torch.where(covered, colour[:, :, o, None, None], canvas)
    pixels = tables.palette[canvas].movedim(-1, 2)  # (B, T, 3, S, S)
    if noise:
        rows = (clips.kind + clips.shape.sum(1) + clips.frame.sum(1) * 64).long()
        change = random_integers(seed, rows, "noise", T, 1, SIDE, SIDE, high=2 * noise + 1) - noise
        pixels = (pixels + change).clamp(0, 255).to(torch.uint8)
    scale = image_size // SIDE
    return pixels if scale == 1 else pixels.repeat_interleave(scale, 3).repeat_interleave(scale, 4)


def place_objects(clips: ClipBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the centre (y, x), the colour and the visibility of every object in every frame, (B, T, O) each."""
    device = clips.kind.device
    t = torch.arange(clips.num_frames, device=device)[None, :, None]
    event, frame = clips.event[:, None], clips.frame[:, None]  # (B, 1, O)
    y = _tables_on(device).lanes[clips.lane][:, None].expand(-1, clips.num_frames, -1)
    is_jump = (clips.jumps[:, None] == t[..., None]).any(3)  # (B, T, 2)
    y = torch.cat([y[..., :2] - JUMP_HEIGHT * is_jump, y[..., 2:]], 2)
    x = _tables_on(device).columns[clips.column][:, None].expand_as(y)
    duration = clips.move_frames[:, None]
    path = (RIGHT - LEFT) * (t - frame + 1).clamp(min=0).minimum(duration) // duration
    x = torch.where(event == MOVES_RIGHT, LEFT + path, torch.where(event == MOVES_LEFT, RIGHT - path, x))
    colour = torch.where((event == TURNS) & (t >= frame), clips.new_colour[:, None], clips.colour[:, None])
    visible = ~((event == APPEARS) & (t < frame)) & ~((event == DISAPPEARS) & (t >= frame))
    is_needle = (clips.kind == CLIP_KINDS.index("needle"))[:, None, None] & (torch.arange(3, device=device) == 2)
    return y, x, colour, torch.where(is_needle, t == frame, visible)
