"""The atlas: small pictures with opacity, ready to be laid into scenes at any size.

Every sprite is cropped to its opaque part and fitted into square cells of several sides (levels). Its longer side fills
the cell but for one transparent texel all around, so that sampling between texels has clean edges; the shorter side
takes its true share, from the upper left, to a fraction of a texel. Colours are multiplied by opacity.

S sprites, C concepts, H, W pixels of a picture.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.scenes.keep import KINDS, OF_CONCEPTS, OF_SPRITES, read_atlas, write_atlas
from vitrail.data.scenes.plurals import plural
from vitrail.data.scenes.scene import GRID, SpriteTable
from vitrail.data.scenes.texture import Texture
from vitrail.errors import DataError, ImageError, nearest

LEVELS = (8, 12, 16, 24, 32, 48, 64)
OPAQUE = 32  # opacity from which a pixel belongs to what is seen


class Sprite(NamedTuple):
    """One picture for the atlas."""

    id: str
    vendor: str
    key: str
    kind: str
    name: str
    category: str
    rgba: np.ndarray  # uint8 (H, W, 4), colours not multiplied by opacity


@dataclass(frozen=True, eq=False)
class Atlas:
    """The sprite table and its pixels."""

    table: SpriteTable
    levels: dict[int, Tensor]  # side → uint8 (S, 4, side, side), the smallest first
    _copies: dict[torch.device, "Atlas"] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def build(cls, sprites: Iterable[Sprite], sides: Sequence[int] = LEVELS) -> "Atlas":
        """Sprites of one kind and one name show one concept."""
        sides = sorted(set(sides))
        if not sides or sides[0] < 4:
            raise DataError(f"an atlas with cells of {sides} texels", "give sides of at least 4")
        rows: dict[str, Sprite] = {}
        aspects, cells = [], [[] for _ in sides]
        for sprite in sprites:
            if sprite.kind not in KINDS:
                raise DataError(f"sprite {sprite.id} is of kind {sprite.kind!r}", nearest(sprite.kind, KINDS))
            if sprite.id in rows:
                raise DataError(f"two sprites are called {sprite.id}", "give every sprite an id of its own")
            picture = _cropped(sprite)
            for side, column in zip(sides, cells, strict=True):
                column.append(_fitted(picture, side))
            aspects.append([max(1, round(n * GRID / max(picture.size))) for n in picture.size])
            rows[sprite.id] = sprite._replace(rgba=np.empty(0))
        if not rows:
            raise DataError("an atlas of no sprites", "check what the source reads and what the filters leave")
        concepts: dict[tuple[str, str], int] = {}
        concept = [concepts.setdefault((s.kind, s.name), len(concepts)) for s in rows.values()]
        category = {(s.kind, s.name): s.category for s in rows.values()}
        table = SpriteTable(
            **{column: tuple(getattr(s, column) for s in rows.values()) for column in OF_SPRITES},
            concept=torch.tensor(concept),
            names=tuple(name for _, name in concepts),
            plurals=tuple(plural(name) for _, name in concepts),
            category=tuple(category[c] for c in concepts),
            aspect=torch.tensor(aspects),
        )
        return cls(table, {side: torch.from_numpy(np.stack(c)) for side, c in zip(sides, cells, strict=True)})

    def __len__(self) -> int:
        return len(self.table)

    def to(self, device: torch.device | str) -> "Atlas":
        """Itself, or its one copy on another device: what is made of it there is made once, whoever asks."""
        device = torch.empty(0, device=device).device  # cuda is cuda:0, or whichever is current
        if device == self.table.concept.device:
            return self
        if device not in self._copies:
            table = replace(self.table, concept=self.table.concept.to(device), aspect=self.table.aspect.to(device))
            self._copies[device] = Atlas(table, {side: level.to(device) for side, level in self.levels.items()})
        return self._copies[device]

    def select(self, rows: Tensor | Sequence[int]) -> "Atlas":
        """The atlas of these rows, in this order, with the concepts that they show."""
        table, device = self.table, self.table.concept.device
        kept = torch.as_tensor(rows, dtype=torch.int64, device=device)
        if not len(kept):
            raise DataError("an atlas of no sprites", "choose at least one")
        concepts, concept = table.concept[kept].unique(return_inverse=True)
        chosen = SpriteTable(
            **{column: tuple(getattr(table, column)[i] for i in kept.tolist()) for column in OF_SPRITES},
            **{column: tuple(getattr(table, column)[i] for i in concepts.tolist()) for column in OF_CONCEPTS},
            concept=concept,
            aspect=table.aspect[kept],
        )
        return Atlas(chosen, {side: level[kept] for side, level in self.levels.items()})

    @cached_property
    def texture(self) -> Texture:
        """What the renderer reads, on the atlas's device; made when first asked for (before any compilation)."""
        word = torch.tensor([kind == "word" for kind in self.table.kind], device=self.table.concept.device)
        return Texture.of(self.levels, word)

    def save(self, path: Path | str) -> None:
        """One safetensors file, to be carried to another machine."""
        write_atlas(path, self.table, self.levels)

    @classmethod
    def load(cls, path: Path | str, device: torch.device | str = "cpu") -> "Atlas":
        """An atlas that `save` wrote; anything else is refused."""
        return cls(*read_atlas(path)).to(device)


def rows_where(
    table: SpriteTable,
    kinds: Iterable[str] = KINDS,
    vendors: Iterable[str] | None = None,
    names: Iterable[str] | None = None,
) -> Tensor:
    """The rows of these kinds, vendors and concepts; None is any. A name that nobody has is an error."""
    columns = {"kind": table.kind, "vendor": table.vendor, "name": [table.names[c] for c in table.concept.tolist()]}
    fits = torch.ones(len(table), dtype=torch.bool)
    for (what, column), wanted in zip(columns.items(), (kinds, vendors, names), strict=True):
        if wanted is None:
            continue
        wanted, known = set(wanted), set(column)
        missing = sorted(wanted - known - set(KINDS if what == "kind" else ()))
        if missing:
            raise DataError(f"no sprite has the {what} {missing[0]!r}", nearest(missing[0], sorted(known)))
        fits &= torch.tensor([value in wanted for value in column])
    return fits.nonzero()[:, 0]


def _cropped(sprite: Sprite) -> Image.Image:
    """The opaque part, colours multiplied by opacity."""
    rgba = sprite.rgba
    if rgba.dtype != np.uint8 or rgba.ndim != 3 or rgba.shape[2] != 4:
        raise ImageError(f"sprite {sprite.id} is {rgba.dtype} {rgba.shape}", "give uint8 (H, W, 4)")
    opaque = rgba[..., 3] >= OPAQUE
    if not opaque.any():
        raise ImageError(f"sprite {sprite.id} shows nothing", "leave it out")
    y, x = (np.flatnonzero(opaque.any(axis)) for axis in (1, 0))
    part = rgba[y[0] : y[-1] + 1, x[0] : x[-1] + 1]
    return Image.fromarray(np.ascontiguousarray(part)).convert("RGBa")


def _fitted(picture: Image.Image, side: int) -> np.ndarray:
    """→ uint8 (4, side, side): the longer side over side − 2 texels, from texel (1, 1)."""
    pixels, longest = np.asarray(picture), max(picture.size)
    texel = longest / (side - 2)  # in pixels of the picture
    pad = math.ceil(texel)
    # What lies beyond the picture's edge is its edge, so that opaque edges stay so; then it is cut off, to a fraction.
    around = [(pad, pad + longest - n) for n in pixels.shape[:2]]
    canvas = Image.fromarray(np.pad(pixels, (*around, (0, 0)), mode="edge"), "RGBa")
    box = (pad - texel, pad - texel, pad + longest + texel, pad + longest + texel)
    cell = np.asarray(canvas.resize((side, side), Image.Resampling.BICUBIC, box))
    rows, columns = (np.clip(1 + n / texel - np.arange(side), 0, 1) for n in pixels.shape[:2])
    rows[0] = columns[0] = 0
    cell = np.rint(cell * (rows[:, None] * columns)[..., None]).astype(np.uint8)
    return np.minimum(cell, cell[..., 3:]).transpose(2, 0, 1)  # bicubic overshoots
