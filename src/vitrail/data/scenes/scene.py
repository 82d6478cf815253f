"""What a scene is: a batch of them as tensors, before a single pixel is drawn.

B scenes, O object slots, S sprites, C concepts.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

GRID = 4096  # boxes are whole multiples of 1/GRID of the picture's side, so layouts agree to the last bit everywhere


class Colour(NamedTuple):
    name: str
    rgb: tuple[int, int, int]


# Row 0 leaves a sprite as it is; the others tint it: its shades are kept, its tone and hue become this one's.
COLOURS = (
    Colour("", (0, 0, 0)),
    Colour("red", (214, 39, 40)),
    Colour("orange", (240, 130, 20)),
    Colour("yellow", (238, 205, 30)),
    Colour("green", (44, 150, 60)),
    Colour("blue", (35, 90, 200)),
    Colour("purple", (130, 60, 180)),
    Colour("pink", (240, 120, 180)),
    Colour("brown", (125, 75, 40)),
    Colour("black", (30, 30, 34)),
    Colour("white", (245, 245, 245)),
)


@dataclass(frozen=True)
class Scenes:
    """A batch of scenes. A slot's number is its depth: slot 0 lies farthest, higher slots cover lower ones. Filled
    slots come first. All tensors lie on one device, and all follow from (seed, index)."""

    index: Tensor  # (B,) int64      which sample this is
    sprite: Tensor  # (B, O) int64   row of the sprite table; −1 in an empty slot
    colour: Tensor  # (B, O) int64   row of COLOURS
    box: Tensor  # (B, O, 4) int64   x0 y0 x1 y1 in 1/GRID: tight around the whole object, covered or not
    inside: Tensor  # (B, O) int64   slot of the frame it lies inside; −1 where in none
    background: Tensor  # (B,) int64 what lies behind; drawn by the renderer

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: slice | Tensor) -> "Scenes":
        return Scenes(*(getattr(self, f.name)[rows] for f in fields(self)))

    def to(self, device: torch.device | str) -> "Scenes":
        return Scenes(*(getattr(self, f.name).to(device) for f in fields(self)))

    @property
    def filled(self) -> Tensor:
        """(B, O) which slots hold an object"""
        return self.sprite >= 0

    @property
    def count(self) -> Tensor:
        """(B,) objects"""
        return self.filled.sum(1)

    @property
    def centre(self) -> Tensor:
        """(B, O, 2) x y, doubled so that it stays whole: in 1/(2·GRID)"""
        return self.box[..., :2] + self.box[..., 2:]


@dataclass(frozen=True)
class SpriteTable:
    """What the sprites are, without their pixels. Several sprites (of several vendors) may show one concept; words are
    about concepts. A rendered word is a sprite of kind "word" whose concept is its text; a frame is something that
    other things can lie inside."""

    id: tuple[str, ...]  # "twemoji/1f436", unique
    vendor: tuple[str, ...]
    key: tuple[str, ...]  # the codepoint, file or text within its vendor
    kind: tuple[str, ...]  # "thing", "word" or "frame"
    concept: Tensor  # (S,) int64: row of `names`
    names: tuple[str, ...]  # C singular names without an article: "dog face"
    plurals: tuple[str, ...]  # C
    category: tuple[str, ...]  # C: "animal", "food", …; "word", "frame"
    aspect: Tensor  # (S, 2) int64: width and height of the opaque part in 1/GRID, the longer being GRID

    def __len__(self) -> int:
        return len(self.id)

    def rows(self, kind: str) -> Tensor:
        """The rows of one kind."""
        return torch.tensor([i for i, k in enumerate(self.kind) if k == kind], dtype=torch.int64)
