"""Renders PushT's images from its states, on any device.

The simulator draws 512 × 512 pixels with hard edges and downscales by bilinear interpolation of four pixels. Only those
four are computed here. A pixel is inside a shape according to its signed distance.

Shapes: T frames, V corners of a convex shape, S pixels a side, N = 2S sampled rows and columns.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import DataError

SIMULATOR_SIZE = 512  # pixels a side that the simulator draws
GOAL_POSE = (256.0, 256.0, np.pi / 4)
OUTLINE_HALF_WIDTH = 2.0  # half the width of an outline, in pixels
DISC, HOLLOW = 15.0, 11.0  # radii of the agent
EDGE_TOLERANCE = 0.5  # a pixel is filled if its centre is this close, in pixels

WHITE, WALL, PLACE, EDGE, AGENT, BLOCK, OUTLINE = range(7)
PALETTE = torch.tensor(
    [
        [255, 255, 255],
        [211, 211, 211],  # light grey
        [144, 238, 144],  # light green
        [65, 105, 225],  # royal blue
        [78, 126, 255],  # the same, lighter
        [142, 163, 183],  # lighter
        [119, 136, 153],  # light slate grey
    ],
    dtype=torch.float32,
)

TEE_POLYGONS = torch.tensor(  # (2, V, 2) the bar and the stem, relative to the block's origin
    [[[-60.0, 30], [60, 30], [60, 0], [-60, 0]], [[-15, 30], [-15, 120], [15, 120], [15, 30]]]
)


def render_pusht(state: np.ndarray, image_size: int) -> np.ndarray:
    """Render states (T, 5), agent x, y, block x, y, angle, to images uint8 (T, S, S, 3)."""
    return render_pusht_tensor(torch.from_numpy(np.ascontiguousarray(state)), image_size).numpy()


@torch.no_grad()
def render_pusht_tensor(state: Tensor, image_size: int) -> Tensor:
    """Render states float32 (T, 5) to images uint8 (T, S, S, 3) on the device of the states."""
    if state.ndim != 2 or state.shape[1] != 5:
        raise DataError(
            f"PushT states have the shape {tuple(state.shape)}", "give (T, 5): agent x, y, block x, y, angle"
        )
    positions, weights, background = _prepare_static(image_size, state.device)
    x, y = (positions - state[:, i, None].round() for i in (0, 1))  # (T, N)
    disc = x.square()[:, None] + y.square()[:, :, None]  # (T, N, N)
    labels = background.expand_as(disc).masked_fill(disc <= DISC**2, EDGE).masked_fill_(disc <= HOLLOW**2, AGENT)
    for part in TEE_POLYGONS.to(state.device):
        distance = _signed_distance(positions, _transform(part, state[:, 2:]))
        labels.masked_fill_(distance <= OUTLINE_HALF_WIDTH + EDGE_TOLERANCE, OUTLINE).masked_fill_(
            distance < -OUTLINE_HALF_WIDTH - EDGE_TOLERANCE, BLOCK
        )
    colours = PALETTE.to(state.device).index_select(0, labels.flatten()).view(*labels.shape, 3)  # (T, N, N, 3)
    # (2, S, 1, 1): weights of the upper and the lower neighbour
    rows = torch.stack([weights[:, :1], weights[:, 1:]])[..., None]
    rows_done = colours[:, 0::2] * rows[0] + colours[:, 1::2] * rows[1]  # (T, S, N, 3)
    image = rows_done[:, :, 0::2] * weights[:, :1] + rows_done[:, :, 1::2] * weights[:, 1:]  # (T, S, S, 3)
    return image.round_().to(torch.uint8)


@functools.lru_cache(maxsize=8)
def _prepare_static(side: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return sampled positions (N,), interpolation weights of two neighbours (S, 2), and the static
    background (N, N)."""
    middle = ((torch.arange(side, device=device) + 0.5) * SIMULATOR_SIZE / side - 0.5).clamp(0, SIMULATOR_SIZE - 1)
    first = middle.floor().clamp(max=SIMULATOR_SIZE - 2)
    weights = torch.stack([1 - (middle - first), middle - first], 1)
    positions = torch.stack([first, first + 1], 1).flatten()
    background = torch.full((len(positions), len(positions)), WHITE, dtype=torch.int32, device=device)
    for part in TEE_POLYGONS.to(device):
        distance = _signed_distance(
            positions, _transform(part, torch.tensor([GOAL_POSE], device=device, dtype=torch.float32))
        )[0]
        background[distance <= EDGE_TOLERANCE] = PLACE
    wall_distance = (positions - 255.5).abs() - 250.5  # 0 on the walls, which lie at 5 and 506
    background[torch.maximum(wall_distance[:, None], wall_distance[None]).abs() <= OUTLINE_HALF_WIDTH] = WALL
    return positions, weights, background


def _transform(part: Tensor, pose: Tensor) -> Tensor:
    """Transform corners (V, 2) by poses (T, x · y · angle) to (T, V, 2), rounded to whole pixels like the simulator."""
    cos, sin = pose[:, 2].cos(), pose[:, 2].sin()
    rotation = torch.stack([torch.stack([cos, sin], 1), torch.stack([-sin, cos], 1)], 1)  # (T, 2, 2)
    return (part @ rotation + pose[:, None, :2]).round()


def _signed_distance(positions: Tensor, corners: Tensor) -> Tensor:
    """Signed distance (T, N, N) of grid points (N,) to convex shapes (T, V, 2); negative inside, a lower bound near
    corners."""
    edges = corners.roll(-1, 1) - corners
    normals = torch.stack([edges[..., 1], -edges[..., 0]], 2) / edges.norm(dim=2, keepdim=True)  # (T, V, 2)
    centre = corners.mean(1, keepdim=True)
    # independent of the corners' orientation
    normals = normals * (normals * (corners - centre)).sum(2, keepdim=True).sign()
    x, y = (normals[..., i, None] * positions for i in (0, 1))  # (T, V, N)
    y = y - (normals * corners).sum(2)[..., None]
    distance = x[:, 0, None] + y[:, 0, :, None]
    for side in range(1, corners.shape[1]):
        distance = torch.maximum(distance, x[:, side, None] + y[:, side, :, None])
    return distance
