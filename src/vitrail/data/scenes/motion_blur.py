"""Motion blur: the mean of several renderings along a straight path of each object.

Paths are computed in integers as a function of (seed, index). The ground truth of a scene is the middle of the path.

Shapes: B scenes, O object slots.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from vitrail.data.scenes.counter_rng import random_integers
from vitrail.data.scenes.scene import GRID, SceneBatch

NUM_SUBFRAMES = 9
NUM_DIRECTIONS = 16  # evenly spaced directions


@cache  # CUDA graph capture does not allow new transfers to the GPU
def _displacements(distance: float, device: torch.device) -> Tensor:
    """Return the displacement of each direction (NUM_DIRECTIONS, 2), horizontal and vertical, in 1/GRID."""
    angles = [2 * math.pi * n / NUM_DIRECTIONS for n in range(NUM_DIRECTIONS)]
    displacements = [[round(GRID * distance * axis(angle)) for axis in (math.cos, math.sin)] for angle in angles]
    return torch.tensor(displacements, device=device)


def render_motion_blur(
    scenes: SceneBatch, seed: int, distance: float, render: Callable[[SceneBatch], Tensor]
) -> Tensor:
    """Render scenes, uint8 (B, 3, H, W), with each object moving by `distance` in its own random direction."""
    way = _displacements(distance, scenes.box.device)[
        random_integers(seed, scenes.index, "way", scenes.sprite.shape[1], high=NUM_DIRECTIONS)
    ]  # (B, O, 2)
    total: Tensor | None = None
    for moment in range(NUM_SUBFRAMES):
        # From half the path before to half the path after.
        along = way * (2 * moment - NUM_SUBFRAMES + 1) // (2 * (NUM_SUBFRAMES - 1))
        frame = render(replace(scenes, box=scenes.box + torch.cat([along, along], -1))).int()
        total = frame if total is None else total + frame
    assert total is not None
    return ((total + NUM_SUBFRAMES // 2) // NUM_SUBFRAMES).to(torch.uint8)
