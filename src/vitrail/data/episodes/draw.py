"""PushT's pictures from its states, on any device.

The simulator paints 512 × 512 pixels with hard edges and shrinks them by looking at four neighbours of each point. Only
those four are painted here: a pixel is inside a shape or not, by its signed distance.

T frames, V corners of a convex shape, S side of a picture, N = 2S rows and columns that are looked at
"""

import functools

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import DataError

FULL = 512  # the simulator's own pixels
GOAL = (256.0, 256.0, np.pi / 4)
RIM = 2.0  # half the width of an outline
DISC, HOLLOW = 15.0, 11.0  # radii of the agent
SLACK = 0.5  # a pixel is painted when its middle is this near

WHITE, WALL, PLACE, EDGE, AGENT, BLOCK, OUTLINE = range(7)
COLOURS = torch.tensor(
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

TEE = torch.tensor(  # (2, V, 2) the bar and the stem, around the block's own middle
    [[[-60.0, 30], [60, 30], [60, 0], [-60, 0]], [[-15, 30], [-15, 120], [15, 120], [15, 30]]]
)


def draw_pusht(state: np.ndarray, side: int) -> np.ndarray:
    """(T, 5) agent x, y, block x, y, angle → uint8 (T, S, S, 3)"""
    return paint_pusht(torch.from_numpy(np.ascontiguousarray(state)), side).numpy()


@torch.no_grad()
def paint_pusht(state: Tensor, side: int) -> Tensor:
    """float32 (T, 5) → uint8 (T, S, S, 3), where the states lie"""
    if state.ndim != 2 or state.shape[1] != 5:
        raise DataError(f"a state of PushT is {tuple(state.shape)}", "give (T, 5): agent x, y, block x, y, angle")
    at, share, ground = _prepared(side, state.device)
    x, y = (at - state[:, i, None].round() for i in (0, 1))  # (T, N)
    disc = x.square()[:, None] + y.square()[:, :, None]  # (T, N, N)
    painted = ground.expand_as(disc).masked_fill(disc <= DISC**2, EDGE).masked_fill_(disc <= HOLLOW**2, AGENT)
    for part in TEE.to(state.device):
        away = _distance(at, _placed(part, state[:, 2:]))
        painted.masked_fill_(away <= RIM + SLACK, OUTLINE).masked_fill_(away < -RIM - SLACK, BLOCK)
    colours = COLOURS.to(state.device).index_select(0, painted.flatten()).view(*painted.shape, 3)  # (T, N, N, 3)
    rows = torch.stack([share[:, :1], share[:, 1:]])[..., None]  # (2, S, 1, 1): of the upper and the lower neighbour
    flat = colours[:, 0::2] * rows[0] + colours[:, 1::2] * rows[1]  # (T, S, N, 3)
    mixed = flat[:, :, 0::2] * share[:, :1] + flat[:, :, 1::2] * share[:, 1:]  # (T, S, S, 3)
    return mixed.round_().to(torch.uint8)


@functools.lru_cache(maxsize=8)
def _prepared(side: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The rows and columns that are looked at (N,), how much each of two neighbours counts (S, 2), and what never moves
    (N, N)."""
    middle = ((torch.arange(side, device=device) + 0.5) * FULL / side - 0.5).clamp(0, FULL - 1)
    first = middle.floor().clamp(max=FULL - 2)
    share = torch.stack([1 - (middle - first), middle - first], 1)
    at = torch.stack([first, first + 1], 1).flatten()
    ground = torch.full((len(at), len(at)), WHITE, dtype=torch.int32, device=device)
    for part in TEE.to(device):
        away = _distance(at, _placed(part, torch.tensor([GOAL], device=device, dtype=torch.float32)))[0]
        ground[away <= SLACK] = PLACE
    off = (at - 255.5).abs() - 250.5  # 0 on the walls, which run from 5 to 506
    ground[torch.maximum(off[:, None], off[None]).abs() <= RIM] = WALL
    return at, share, ground


def _placed(part: Tensor, pose: Tensor) -> Tensor:
    """(V, 2), (T, x · y · angle) → (T, V, 2), on whole pixels as the simulator rounds them"""
    cos, sin = pose[:, 2].cos(), pose[:, 2].sin()
    turn = torch.stack([torch.stack([cos, sin], 1), torch.stack([-sin, cos], 1)], 1)  # (T, 2, 2)
    return (part @ turn + pose[:, None, :2]).round()


def _distance(at: Tensor, corners: Tensor) -> Tensor:
    """(N,), (T, V, 2) → (T, N, N) how far outside a convex shape each point lies; below 0 inside. Beyond a corner it
    is an underestimate."""
    ahead = corners.roll(-1, 1) - corners
    out = torch.stack([ahead[..., 1], -ahead[..., 0]], 2) / ahead.norm(dim=2, keepdim=True)  # (T, V, 2)
    middle = corners.mean(1, keepdim=True)
    out = out * (out * (corners - middle)).sum(2, keepdim=True).sign()  # whichever way round the corners go
    x, y = (out[..., i, None] * at for i in (0, 1))  # (T, V, N)
    y = y - (out * corners).sum(2)[..., None]
    away = x[:, 0, None] + y[:, 0, :, None]
    for side in range(1, corners.shape[1]):
        away = torch.maximum(away, x[:, side, None] + y[:, side, :, None])
    return away
