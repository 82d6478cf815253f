"""How things look beside how they were designed: mirrored, bent, in other shades. What is true of a scene stays true:
boxes are as tight as before, words are read as before, and a colour is still nearest to the one it is called by.

All in whole numbers, a function of (seed, index): two slots that show one sprite are two looks of it.

B scenes, O object slots, K shades
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.scenes.chance import bits, pick, uniform
from vitrail.data.scenes.config import SceneConfig
from vitrail.data.scenes.scene import COLOURS, Scenes, SpriteTable
from vitrail.data.views import colour_map

K = 1024
ONE = 1 << 12  # of a shade's numbers
MARGIN = 0.5  # a shaded colour is at most so far from its own, beside how far it is from the nearest other


class Look(NamedTuple):
    mirrored: Tensor  # (B, O)
    bend: Tensor  # (B, O, 2) how far the middle is drawn over, across and down, in 1/256
    shade: Tensor  # (12, B, O) in 1/ONE: 3 × (red, green, blue, opacity) of what each new colour is the sum of


class Looks:
    """A config and a table made ready on a device; called with (seed, scenes) it gives looks, or None where all things
    are to look as they were designed."""

    def __init__(self, config: SceneConfig, table: SpriteTable, device: torch.device | str = "cpu"):
        self.config, self.some = config, bool(config.mirror or config.bend or config.shade)
        if self.some:
            self.thing = torch.tensor([kind == "thing" for kind in table.kind], device=device)
            made = shades(config.shade)
            self.shades = made.flatten(1).T.contiguous().to(device)  # (12, K)
            self.allowed = allowed(made).to(device)  # (colours, K)

    def __call__(self, seed: int, scenes: Scenes) -> Look | None:
        if not self.some:
            return None
        config, index, slots = self.config, scenes.index, scenes.sprite.shape[1]
        thing = self.thing[scenes.sprite.clamp(min=0)] & scenes.filled  # letters stay as they are written
        mirrored = (bits(seed, index, "mirrored", slots) < round(config.mirror * (1 << 32))) & thing
        far = round(config.bend * 256)
        bend = (pick(seed, index, "bend", slots, 2, of=2 * far + 1) - far) * thing[..., None]
        row = self.allowed[scenes.colour, pick(seed, index, "shade", slots, of=K)]  # (B, O)
        return Look(mirrored, bend, self.shades[:, row])


def shades(far: float) -> Tensor:
    """(K, 3, 4) int64: brightness, contrast, saturation and (a quarter as far) hue up to `far` astray. Made on the
    host, so that every device has the same."""
    bright, contrast, saturation, hue = (1 + (uniform(0, torch.arange(K), "shades", 4).double() * 2 - 1) * far).T
    matrix = colour_map(saturation, (hue - 1) * math.pi / 4) * contrast.view(-1, 1, 1)
    more = (bright[:, None] - matrix.sum(2)) / 2  # (K, 3): of the opacity, since colours are multiplied by it
    made = (torch.cat([matrix, more[..., None]], 2) * ONE).round().long()
    made[0] = ONE * torch.eye(3, 4)  # as it is, which every colour may have
    return made


def allowed(made: Tensor) -> Tensor:
    """(K, 3, 4) → (colours, K) rows that things of each colour may have, in turn: those in which it keeps its name; any
    where a thing has the colours it was designed in, since nobody asks for them."""
    rgb = torch.tensor([colour.rgb for colour in COLOURS[1:]]).double()  # (n, 3)
    full = torch.cat([rgb, torch.full((len(rgb), 1), 255.0).double()], 1)
    worn = torch.einsum("kij,nj->nki", made.double() / ONE, full).clamp(0, 255)
    apart = (worn[:, :, None] - rgb).abs().sum(3)  # (n, K, n)
    own = apart.diagonal(dim1=0, dim2=2)  # (K, n)
    others = apart.permute(1, 0, 2) + 1e9 * torch.eye(len(rgb))  # (K, n, n)
    true = own <= MARGIN * others.amin(2)  # (K, n)
    rows = [torch.arange(K)]
    for column in true.T:
        found = column.nonzero()[:, 0]
        rows.append(found[torch.arange(K) % len(found)])
    return torch.stack(rows)
