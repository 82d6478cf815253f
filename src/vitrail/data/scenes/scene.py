"""Scene descriptions: batches of scenes as tensors, without pixels.

Shapes: B scenes, O object slots, S sprites, C concepts.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import torch
from torch import Tensor

GRID = 4096  # box coordinates are integers in 1/GRID of the image size, so scenes are identical on every device


class Colour(NamedTuple):
    name: str
    rgb: tuple[int, int, int]


# Row 0 keeps the sprite's own colours. The other rows tint it: the shading stays, tone and hue change.
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


@dataclass(frozen=True, eq=False)
class TensorBatch:
    """Base class of dataclasses whose fields are tensors with a common first axis."""

    def __getitem__(self, rows: slice | Tensor) -> Self:
        return type(self)(*(getattr(self, f.name)[rows] for f in fields(self)))

    def to(self, device: torch.device | str) -> Self:
        return type(self)(*(getattr(self, f.name).to(device) for f in fields(self)))


@dataclass(frozen=True)
class SceneBatch(TensorBatch):
    """A batch of scenes. All tensors are on one device and follow from (seed, index).

    The slot number is the depth: slot 0 is farthest, and higher slots cover lower ones. Filled slots come first.
    """

    index: Tensor  # (B,) int64      sample index
    sprite: Tensor  # (B, O) int64   row of the sprite table; −1 in an empty slot
    colour: Tensor  # (B, O) int64   row of COLOURS
    box: Tensor  # (B, O, 4) int64   x0 y0 x1 y1 in 1/GRID: tight box of the whole object, including covered parts
    frame_slot: Tensor  # (B, O) int64   slot of the frame that contains the object; −1 if none
    background: Tensor  # (B,) int64 background id, see `backgrounds`

    def __len__(self) -> int:
        return len(self.index)

    @property
    def is_filled(self) -> Tensor:
        """Whether each slot holds an object (B, O)."""
        return self.sprite >= 0

    @property
    def num_objects(self) -> Tensor:
        """Number of objects (B,)."""
        return self.is_filled.sum(1)

    @property
    def doubled_centre(self) -> Tensor:
        """Box centres (B, O, 2) as x y in 1/(2·GRID), so that they are integers."""
        return self.box[..., :2] + self.box[..., 2:]


@dataclass(frozen=True)
class SpriteTable:
    """Metadata of the sprites, without pixels.

    Several sprites (of several vendors) can show one concept. Texts about scenes name concepts. A rendered word is a
    sprite of kind "word" whose concept is its text. A frame is an object that can contain another object.
    """

    id: tuple[str, ...]  # "twemoji/1f436", unique
    vendor: tuple[str, ...]
    key: tuple[str, ...]  # codepoint, file or text, unique per vendor
    kind: tuple[str, ...]  # "thing", "word" or "frame"
    concept: Tensor  # (S,) int64: row of `names`
    names: tuple[str, ...]  # C singular names without an article: "dog face"
    plurals: tuple[str, ...]  # C
    category: tuple[str, ...]  # C: "animal", "food", …; "word", "frame"
    aspect: Tensor  # (S, 2) int64: width and height of the opaque part in 1/GRID, the longer being GRID

    def __len__(self) -> int:
        return len(self.id)

    def rows_of_kind(self, kind: str) -> Tensor:
        """Return the row indices of one kind."""
        return torch.tensor([i for i, k in enumerate(self.kind) if k == kind], dtype=torch.int64)
