"""Where objects lie: boxes in whole numbers that keep to the rules of overlap.

Objects are placed from the farthest to the nearest. Each has TRIES candidates and takes the first that keeps to the
rules, or else the one that breaks them least. A scene in which a rule is broken is laid out on a grid instead, where
objects are shrunk to their cells and none overlap; so every scene has the number of objects that it drew.

B scenes, O object slots, K tries, 2 = x y.
"""

import torch
from torch import Tensor

from vitrail.data.scenes.chance import bits, distinct, pick
from vitrail.data.scenes.config import SceneConfig
from vitrail.data.scenes.frames import INNER
from vitrail.data.scenes.scene import GRID

TRIES = 16
_INNER = round(INNER * GRID)
_LEAST = 8  # no box is thinner, in 1/GRID


def place(config: SceneConfig, seed: int, index: Tensor, size: Tensor, aspect: Tensor, inside: Tensor) -> Tensor:
    """(B, O, 4) boxes x0 y0 x1 y1 of objects of these sizes (B, O), 0 in an empty slot, and aspects (B, O, 2). What is
    `inside` (B, O) lies in the frame of the slot before it and takes its size from it."""
    field = _Field(config, seed, index, aspect, inside)
    box, broken = field.tried(size)
    return torch.where(broken[:, None, None], field.gridded(size), box)


class _Field:
    """The picture in which objects are placed."""

    def __init__(self, config: SceneConfig, seed: int, index: Tensor, aspect: Tensor, inside: Tensor):
        self.config, self.seed, self.index, self.aspect, self.inside = config, seed, index, aspect, inside
        self.unit = GRID // config.snap if config.snap else 1
        self.slots = inside.shape[1]

    def tried(self, size: Tensor) -> tuple[Tensor, Tensor]:
        """(B, O, 4) boxes, and (B,) whether a rule is broken"""
        extent = self._extents(size)
        area = extent.prod(-1)
        limit = _share(area, 1 - self.config.visible)  # what others may cover of a box
        chance = bits(self.seed, self.index, "place", self.slots, TRIES, 2)
        order = torch.arange(TRIES, device=size.device)
        box = size.new_zeros(*size.shape, 4)
        covered, broken = torch.zeros_like(size), torch.zeros_like(size[:, 0], dtype=torch.bool)
        for o in range(self.slots):
            origin, room = self._room(o, extent, box)
            low = origin + (chance[:, o] * (room // self.unit + 1) >> 32) * self.unit  # (B, K, 2)
            high = low + extent[:, o, None]
            common = _common(low[:, :, None], high[:, :, None], box[:, None, :o])  # (B, K, o)
            allowed = _share(torch.minimum(area[:, :o], area[:, o : o + 1]), self.config.overlap)  # (B, o)
            if o:
                allowed[:, -1] = torch.where(self.inside[:, o], area[:, o - 1], allowed[:, -1])
            excess = (common - allowed[:, None]).clamp(min=0)
            excess += (covered[:, None, :o] + common - limit[:, None, :o]).clamp(min=0)
            best = (excess.sum(-1) * TRIES + order).amin(1)  # of equals the first
            broken |= best >= TRIES
            chosen = (best % TRIES)[:, None, None]
            box[:, o, :2] = low.gather(1, chosen.expand(-1, 1, 2))[:, 0]
            box[:, o, 2:] = box[:, o, :2] + extent[:, o]
            covered[:, :o] += common.gather(1, chosen.expand(-1, 1, o))[:, 0]
        return torch.where(size[..., None] > 0, box, 0), broken

    def gridded(self, size: Tensor) -> Tensor:
        """(B, O, 4) boxes, each in a cell of its own"""
        count = (size > 0).sum(1, keepdim=True)  # (B, 1)
        squares = torch.arange(self.slots, device=size.device).square()
        across = (count > squares).sum(1, keepdim=True)  # (B, 1): the root, rounded up
        cell = GRID // self.unit // across * self.unit
        size = torch.minimum(size, cell)
        extent = self._extents(size)
        which = distinct(self.seed, self.index, "cell", self.slots, of=(across * across)[:, 0])  # (B, O)
        corner = torch.stack([which % across, which // across], -1) * cell[..., None]
        chance = bits(self.seed, self.index, "cell place", self.slots, 2)
        low = corner + (chance * ((cell[..., None] - extent) // self.unit + 1) >> 32) * self.unit
        box = torch.cat([low, low + extent], -1)
        for o in range(1, self.slots):
            origin, room = self._room(o, extent, box)  # (B, 1, 2)
            low = (origin + (chance[:, o, None] * (room + 1) >> 32))[:, 0]
            within = torch.cat([low, low + extent[:, o]], -1)
            box[:, o] = torch.where(self.inside[:, o, None], within, box[:, o])
        return torch.where(size[..., None] > 0, box, 0)

    def _extents(self, size: Tensor) -> Tensor:
        """(B, O) → (B, O, 2) width and height in 1/GRID of the picture's own"""
        size = torch.where(size > 0, (size // self.unit * self.unit).clamp(min=self.unit), 0)
        inner = size.roll(1, 1) * self.aspect.roll(1, 1).amin(-1) // GRID * _INNER // GRID  # of the frame before
        fill = 6 * GRID // 10 + pick(self.seed, self.index, "fill", self.slots, of=4 * GRID // 10 + 1)
        size = torch.where(self.inside, inner * fill // GRID, size)
        short = min(self.config.ratio)
        sides = [size * self.aspect[..., i] * short // (GRID * n) for i, n in enumerate(self.config.ratio)]
        return torch.stack(sides, -1).clamp(min=_LEAST) * (size > 0)[..., None]

    def _room(self, o: int, extent: Tensor, box: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 1, 2) the least place that slot o may have, and how far beyond it it may go"""
        room = GRID - extent[:, o]
        origin = torch.zeros_like(room)
        if o and self.config.inside:
            inner = extent[:, o - 1] * _INNER // GRID
            here = self.inside[:, o, None]
            origin = torch.where(here, box[:, o - 1, :2] + (extent[:, o - 1] - inner) // 2, origin)
            room = torch.where(here, (inner - extent[:, o]).clamp(min=0), room)
        return origin[:, None], room[:, None]


def _common(low: Tensor, high: Tensor, box: Tensor) -> Tensor:
    """The area that boxes (…, 2) and (…, 2) have in common with boxes (…, 4)"""
    sides = torch.minimum(high, box[..., 2:]) - torch.maximum(low, box[..., :2])
    return sides.clamp(min=0).prod(-1)


def _share(area: Tensor, share: float) -> Tensor:
    return area * round(share * 1024) >> 10
