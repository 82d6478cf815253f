"""Object placement: integer boxes that satisfy the overlap rules.

Objects are placed from far to near. Each object takes the first of NUM_CANDIDATES random boxes that satisfies the
rules, or the box with the smallest violation. A scene with a violation is placed on a grid instead: objects shrink to
their cells and do not overlap. So every scene keeps its number of objects.

Shapes: B scenes, O object slots, K candidates, 2 = x y.
"""

import torch
from torch import Tensor

from vitrail.data.scenes.config import SceneConfig
from vitrail.data.scenes.counter_rng import random_bits, random_distinct, random_integers
from vitrail.data.scenes.frame_sprites import INNER_FRACTION
from vitrail.data.scenes.scene import GRID

NUM_CANDIDATES = 16
_INNER = round(INNER_FRACTION * GRID)
_MIN_SIDE = 8  # minimum side of a box, in 1/GRID


def place_objects(
    config: SceneConfig, seed: int, index: Tensor, size: Tensor, aspect: Tensor, in_frame: Tensor
) -> Tensor:
    """Place objects and return their boxes (B, O, 4) as x0 y0 x1 y1.

    size      (B, O), 0 in an empty slot
    aspect    (B, O, 2)
    in_frame  (B, O): the object lies in the frame of the previous slot, which determines its size
    """
    field = _Placer(config, seed, index, aspect, in_frame)
    box, is_violated = field.place_randomly(size)
    return torch.where(is_violated[:, None, None], field.place_on_grid(size), box)


class _Placer:
    """Placement of the objects of a batch of scenes."""

    def __init__(self, config: SceneConfig, seed: int, index: Tensor, aspect: Tensor, inside: Tensor):
        self.config, self.seed, self.index, self.aspect, self.inside = config, seed, index, aspect, inside
        self.unit = GRID // config.grid_size if config.grid_size else 1
        self.slots = inside.shape[1]

    def place_randomly(self, size: Tensor) -> tuple[Tensor, Tensor]:
        """Place objects at random. Return boxes (B, O, 4), and whether a scene violates a rule (B,)."""
        extent = self._extents(size)
        area = extent.prod(-1)
        limit = _fraction_of(area, 1 - self.config.min_visible)  # maximum covered area of a box
        chance = random_bits(self.seed, self.index, "place", self.slots, NUM_CANDIDATES, 2)
        order = torch.arange(NUM_CANDIDATES, device=size.device)
        box = size.new_zeros(*size.shape, 4)
        covered, is_violated = torch.zeros_like(size), torch.zeros_like(size[:, 0], dtype=torch.bool)
        for o in range(self.slots):
            origin, room = self._free_range(o, extent, box)
            low = origin + (chance[:, o] * (room // self.unit + 1) >> 32) * self.unit  # (B, K, 2)
            high = low + extent[:, o, None]
            common = _intersection_area(low[:, :, None], high[:, :, None], box[:, None, :o])  # (B, K, o)
            allowed = _fraction_of(torch.minimum(area[:, :o], area[:, o : o + 1]), self.config.max_overlap)  # (B, o)
            if o:
                allowed[:, -1] = torch.where(self.inside[:, o], area[:, o - 1], allowed[:, -1])
            excess = (common - allowed[:, None]).clamp(min=0)
            excess += (covered[:, None, :o] + common - limit[:, None, :o]).clamp(min=0)
            best = (excess.sum(-1) * NUM_CANDIDATES + order).amin(1)  # the first of equal candidates
            is_violated |= best >= NUM_CANDIDATES
            chosen = (best % NUM_CANDIDATES)[:, None, None]
            box[:, o, :2] = low.gather(1, chosen.expand(-1, 1, 2))[:, 0]
            box[:, o, 2:] = box[:, o, :2] + extent[:, o]
            covered[:, :o] += common.gather(1, chosen.expand(-1, 1, o))[:, 0]
        return torch.where(size[..., None] > 0, box, 0), is_violated

    def place_on_grid(self, size: Tensor) -> Tensor:
        """Place each object in its own grid cell. Return boxes (B, O, 4)."""
        count = (size > 0).sum(1, keepdim=True)  # (B, 1)
        squares = torch.arange(self.slots, device=size.device).square()
        across = (count > squares).sum(1, keepdim=True)  # (B, 1): square root, rounded up
        cell = GRID // self.unit // across * self.unit
        size = torch.minimum(size, cell)
        extent = self._extents(size)
        which = random_distinct(self.seed, self.index, "cell", self.slots, high=(across * across)[:, 0])  # (B, O)
        corner = torch.stack([which % across, which // across], -1) * cell[..., None]
        chance = random_bits(self.seed, self.index, "cell place", self.slots, 2)
        low = corner + (chance * ((cell[..., None] - extent) // self.unit + 1) >> 32) * self.unit
        box = torch.cat([low, low + extent], -1)
        for o in range(1, self.slots):
            origin, room = self._free_range(o, extent, box)  # (B, 1, 2)
            low = (origin + (chance[:, o, None] * (room + 1) >> 32))[:, 0]
            within = torch.cat([low, low + extent[:, o]], -1)
            box[:, o] = torch.where(self.inside[:, o, None], within, box[:, o])
        return torch.where(size[..., None] > 0, box, 0)

    def _extents(self, size: Tensor) -> Tensor:
        """Convert sizes (B, O) to widths and heights (B, O, 2) in 1/GRID of the image's width and height."""
        size = torch.where(size > 0, (size // self.unit * self.unit).clamp(min=self.unit), 0)
        # Of the previous slot's frame.
        inner = size.roll(1, 1) * self.aspect.roll(1, 1).amin(-1) // GRID * _INNER // GRID
        fill = 6 * GRID // 10 + random_integers(self.seed, self.index, "fill", self.slots, high=4 * GRID // 10 + 1)
        size = torch.where(self.inside, inner * fill // GRID, size)
        short = min(self.config.aspect_ratio)
        sides = [size * self.aspect[..., i] * short // (GRID * n) for i, n in enumerate(self.config.aspect_ratio)]
        return torch.stack(sides, -1).clamp(min=_MIN_SIDE) * (size > 0)[..., None]

    def _free_range(self, o: int, extent: Tensor, box: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest position of slot o, and the range of positions from there, both (B, 1, 2)."""
        room = GRID - extent[:, o]
        origin = torch.zeros_like(room)
        if o and self.config.inside_probability:
            inner = extent[:, o - 1] * _INNER // GRID
            here = self.inside[:, o, None]
            origin = torch.where(here, box[:, o - 1, :2] + (extent[:, o - 1] - inner) // 2, origin)
            room = torch.where(here, (inner - extent[:, o]).clamp(min=0), room)
        return origin[:, None], room[:, None]


def _intersection_area(low: Tensor, high: Tensor, box: Tensor) -> Tensor:
    """Return the intersection area of boxes given by corners (…, 2) and (…, 2) with boxes (…, 4)."""
    sides = torch.minimum(high, box[..., 2:]) - torch.maximum(low, box[..., :2])
    return sides.clamp(min=0).prod(-1)


def _fraction_of(area: Tensor, share: float) -> Tensor:
    return area * round(share * 1024) >> 10
