"""Appearance augmentation of objects: flips, distortion and colour changes that keep the ground truth valid.

Boxes stay tight, words stay readable, and each colour stays nearest to its name. The appearance is computed in
integers as a function of (seed, index), separately for each slot.

Shapes: B scenes, O object slots, K colour matrices.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.augmentation import build_hue_saturation_matrix
from vitrail.data.scenes.config import SceneConfig
from vitrail.data.scenes.counter_rng import random_bits, random_integers, random_uniform
from vitrail.data.scenes.scene import COLOURS, SceneBatch, SpriteTable

NUM_COLOUR_MATRICES = 1024
FIXED_POINT_ONE = 1 << 12  # fixed-point scale of the colour matrices
COLOUR_MARGIN = 0.5  # maximum distance to the colour's own value, relative to the distance to the nearest other colour


class Appearance(NamedTuple):
    """Appearance of the objects of a batch of scenes."""

    is_mirrored: Tensor  # (B, O)
    bend: Tensor  # (B, O, 2) shift of the middle, horizontally and vertically, in 1/256
    colour_matrix: (
        Tensor  # (12, B, O) in 1/FIXED_POINT_ONE: 3 × (red, green, blue, opacity) weights of each new channel
    )


class AppearanceSampler:
    """Samples appearances for a config and a sprite table on a device. Call it with (seed, scenes).

    Returns None if the config has no appearance augmentation.
    """

    def __init__(self, config: SceneConfig, table: SpriteTable, device: torch.device | str = "cpu"):
        self.config, self.enabled = config, bool(config.flip_probability or config.shape_jitter or config.colour_jitter)
        if self.enabled:
            self.is_thing = torch.tensor([kind == "thing" for kind in table.kind], device=device)
            matrices = sample_colour_matrices(config.colour_jitter)
            self.colour_matrices = matrices.flatten(1).T.contiguous().to(device)  # (12, K)
            self.allowed_rows = select_allowed_matrices(matrices).to(device)  # (colours, K)

    def __call__(self, seed: int, scenes: SceneBatch) -> Appearance | None:
        if not self.enabled:
            return None
        config, index, slots = self.config, scenes.index, scenes.sprite.shape[1]
        thing = self.is_thing[scenes.sprite.clamp(min=0)] & scenes.is_filled  # words do not change
        mirrored = (random_bits(seed, index, "mirrored", slots) < round(config.flip_probability * (1 << 32))) & thing
        max_bend = round(config.shape_jitter * 256)
        bend = (random_integers(seed, index, "bend", slots, 2, high=2 * max_bend + 1) - max_bend) * thing[..., None]
        # (B, O)
        row = self.allowed_rows[scenes.colour, random_integers(seed, index, "shade", slots, high=NUM_COLOUR_MATRICES)]
        return Appearance(mirrored, bend, self.colour_matrices[:, row])


def sample_colour_matrices(max_change: float) -> Tensor:
    """Sample colour matrices (K, 3, 4), int64, on the CPU, so that every device uses the same.

    Brightness, contrast and saturation change by up to `max_change`, hue by a quarter of it.
    """
    brightness, contrast, saturation, hue = (
        1 + (random_uniform(0, torch.arange(NUM_COLOUR_MATRICES), "shades", 4).double() * 2 - 1) * max_change
    ).T
    matrix = build_hue_saturation_matrix(saturation, (hue - 1) * math.pi / 4) * contrast.view(-1, 1, 1)
    offset = (
        brightness[:, None] - matrix.sum(2)
    ) / 2  # (K, 3): offset times opacity, because colours are premultiplied
    matrices = (torch.cat([matrix, offset[..., None]], 2) * FIXED_POINT_ONE).round().long()
    matrices[0] = FIXED_POINT_ONE * torch.eye(3, 4)  # the identity, which is allowed for every colour
    return matrices


def select_allowed_matrices(matrices: Tensor) -> Tensor:
    """Return the allowed matrices (K, 3, 4) of each colour as row indices (colours, K), repeated cyclically.

    A matrix is allowed if the changed colour keeps its name. Untinted objects (row 0) allow all matrices.
    """
    rgb = torch.tensor([colour.rgb for colour in COLOURS[1:]]).double()  # (n, 3)
    full = torch.cat([rgb, torch.full((len(rgb), 1), 255.0).double()], 1)
    changed = torch.einsum("kij,nj->nki", matrices.double() / FIXED_POINT_ONE, full).clamp(0, 255)
    distance = (changed[:, :, None] - rgb).abs().sum(3)  # (n, K, n)
    own = distance.diagonal(dim1=0, dim2=2)  # (K, n)
    others = distance.permute(1, 0, 2) + 1e9 * torch.eye(len(rgb))  # (K, n, n)
    true = own <= COLOUR_MARGIN * others.amin(2)  # (K, n)
    rows = [torch.arange(NUM_COLOUR_MATRICES)]
    for column in true.T:
        found = column.nonzero()[:, 0]
        rows.append(found[torch.arange(NUM_COLOUR_MATRICES) % len(found)])
    return torch.stack(rows)
