"""Things that move while they are looked at: the mean of what is seen at moments on their way.

All in whole numbers, a function of (seed, index). What is true of a scene is true of the middle of the way.

B scenes, O object slots
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from vitrail.data.scenes.chance import pick
from vitrail.data.scenes.scene import GRID, Scenes

MOMENTS = 9
WAYS = 16  # directions, evenly around


@cache  # what is recorded for a GPU must not be sent there anew
def _ways(far: float, device: torch.device) -> Tensor:
    """(WAYS, 2) across and down, in 1/GRID"""
    angles = [2 * math.pi * n / WAYS for n in range(WAYS)]
    ends = [[round(GRID * far * turn(angle)) for turn in (math.cos, math.sin)] for angle in angles]
    return torch.tensor(ends, device=device)


def smeared(scenes: Scenes, seed: int, far: float, draw: Callable[[Scenes], Tensor]) -> Tensor:
    """What `draw` makes of scenes, uint8 (B, 3, H, W), whose things each go `far` in a direction of their own."""
    way = _ways(far, scenes.box.device)[pick(seed, scenes.index, "way", scenes.sprite.shape[1], of=WAYS)]  # (B, O, 2)
    seen: Tensor | None = None
    for moment in range(MOMENTS):
        along = way * (2 * moment - MOMENTS + 1) // (2 * (MOMENTS - 1))  # from half of it before to half of it behind
        shown = draw(replace(scenes, box=scenes.box + torch.cat([along, along], -1))).int()
        seen = shown if seen is None else seen + shown
    assert seen is not None
    return ((seen + MOMENTS // 2) // MOMENTS).to(torch.uint8)
