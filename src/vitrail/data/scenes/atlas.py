"""Sprite atlas: small images with opacity, stored at several resolutions (levels).

Each sprite is cropped to its opaque part and resized into square cells. Its longer side fills the cell except for one
transparent texel on each side, which gives clean edges when sampling between texels. The shorter side keeps the aspect
ratio to a fraction of a texel, from the upper left. Colours are premultiplied by opacity.

Shapes: S sprites, C concepts, H × W pixels of an image.
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

from vitrail.data.scenes.atlas_file import CONCEPT_COLUMNS, SPRITE_COLUMNS, SPRITE_KINDS, read_atlas, write_atlas
from vitrail.data.scenes.plurals import pluralize
from vitrail.data.scenes.scene import GRID, SpriteTable
from vitrail.data.scenes.sprite_textures import SpriteTextures
from vitrail.errors import DataError, ImageError, suggest_name

CELL_SIZES = (8, 12, 16, 24, 32, 48, 64)
OPACITY_THRESHOLD = 32  # minimum opacity of a visible pixel


class Sprite(NamedTuple):
    """One sprite image with its metadata."""

    id: str
    vendor: str
    key: str
    kind: str
    name: str
    category: str
    rgba: np.ndarray  # uint8 (H, W, 4), not premultiplied


@dataclass(frozen=True, eq=False)
class Atlas:
    """A sprite table with the pixels of its sprites."""

    table: SpriteTable
    levels: dict[int, Tensor]  # side → uint8 (S, 4, side, side), the smallest first
    _copies: dict[torch.device, "Atlas"] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def build(cls, sprites: Iterable[Sprite], cell_sizes: Sequence[int] = CELL_SIZES) -> "Atlas":
        """Build an atlas. Sprites with the same kind and name show the same concept."""
        cell_sizes = sorted(set(cell_sizes))
        if not cell_sizes or cell_sizes[0] < 4:
            raise DataError(f"cell_sizes is {cell_sizes}", "give sizes of at least 4 texels")
        rows: dict[str, Sprite] = {}
        aspects, cells = [], [[] for _ in cell_sizes]
        for sprite in sprites:
            if sprite.kind not in SPRITE_KINDS:
                raise DataError(
                    f"sprite {sprite.id} has unknown kind {sprite.kind!r}", suggest_name(sprite.kind, SPRITE_KINDS)
                )
            if sprite.id in rows:
                raise DataError(f"two sprites have the id {sprite.id}", "give every sprite a unique id")
            image = _crop_to_opaque(sprite)
            for side, column in zip(cell_sizes, cells, strict=True):
                column.append(_resize_to_cell(image, side))
            aspects.append([max(1, round(n * GRID / max(image.size))) for n in image.size])
            rows[sprite.id] = sprite._replace(rgba=np.empty(0))
        if not rows:
            raise DataError("the atlas has no sprites", "check the sprite sources and the filters")
        concepts: dict[tuple[str, str], int] = {}
        concept = [concepts.setdefault((s.kind, s.name), len(concepts)) for s in rows.values()]
        category = {(s.kind, s.name): s.category for s in rows.values()}
        table = SpriteTable(
            **{column: tuple(getattr(s, column) for s in rows.values()) for column in SPRITE_COLUMNS},
            concept=torch.tensor(concept),
            names=tuple(name for _, name in concepts),
            plurals=tuple(pluralize(name) for _, name in concepts),
            category=tuple(category[c] for c in concepts),
            aspect=torch.tensor(aspects),
        )
        return cls(table, {side: torch.from_numpy(np.stack(c)) for side, c in zip(cell_sizes, cells, strict=True)})

    def __len__(self) -> int:
        return len(self.table)

    def to(self, device: torch.device | str) -> "Atlas":
        """Return the atlas on a device. Each device has one cached copy, so derived tensors are computed only once."""
        device = torch.empty(0, device=device).device  # resolves "cuda" to the current device
        if device == self.table.concept.device:
            return self
        if device not in self._copies:
            table = replace(self.table, concept=self.table.concept.to(device), aspect=self.table.aspect.to(device))
            self._copies[device] = Atlas(table, {side: level.to(device) for side, level in self.levels.items()})
        return self._copies[device]

    def select(self, rows: Tensor | Sequence[int]) -> "Atlas":
        """Return an atlas with only these rows, in this order, and their concepts."""
        table, device = self.table, self.table.concept.device
        selected = torch.as_tensor(rows, dtype=torch.int64, device=device)
        if not len(selected):
            raise DataError("the selection has no sprites", "select at least one row")
        concepts, concept = table.concept[selected].unique(return_inverse=True)
        chosen = SpriteTable(
            **{column: tuple(getattr(table, column)[i] for i in selected.tolist()) for column in SPRITE_COLUMNS},
            **{column: tuple(getattr(table, column)[i] for i in concepts.tolist()) for column in CONCEPT_COLUMNS},
            concept=concept,
            aspect=table.aspect[selected],
        )
        return Atlas(chosen, {side: level[selected] for side, level in self.levels.items()})

    @cached_property
    def textures(self) -> SpriteTextures:
        """Texels for the renderer, on the atlas's device; computed on first use (before any compilation)."""
        word = torch.tensor([kind == "word" for kind in self.table.kind], device=self.table.concept.device)
        return SpriteTextures.from_levels(self.levels, word)

    def save(self, path: Path | str) -> None:
        """Save the atlas as one safetensors file."""
        write_atlas(path, self.table, self.levels)

    @classmethod
    def load(cls, path: Path | str, device: torch.device | str = "cpu") -> "Atlas":
        """Load an atlas written by `save`. Other files raise `DataError`."""
        return cls(*read_atlas(path)).to(device)


def find_sprites(
    table: SpriteTable,
    kinds: Iterable[str] = SPRITE_KINDS,
    vendors: Iterable[str] | None = None,
    names: Iterable[str] | None = None,
) -> Tensor:
    """Return the rows with these kinds, vendors and concept names; None matches all. Unknown names raise an error."""
    columns = {"kind": table.kind, "vendor": table.vendor, "name": [table.names[c] for c in table.concept.tolist()]}
    mask = torch.ones(len(table), dtype=torch.bool)
    for (column_name, column), values in zip(columns.items(), (kinds, vendors, names), strict=True):
        if values is None:
            continue
        values, known = set(values), set(column)
        missing = sorted(values - known - set(SPRITE_KINDS if column_name == "kind" else ()))
        if missing:
            raise DataError(f"no sprite has the {column_name} {missing[0]!r}", suggest_name(missing[0], sorted(known)))
        mask &= torch.tensor([value in values for value in column])
    return mask.nonzero()[:, 0]


def _crop_to_opaque(sprite: Sprite) -> Image.Image:
    """Return the opaque part of a sprite, with premultiplied colours."""
    rgba = sprite.rgba
    if rgba.dtype != np.uint8 or rgba.ndim != 3 or rgba.shape[2] != 4:
        raise ImageError(f"sprite {sprite.id} has pixels {rgba.dtype} {rgba.shape}", "give uint8 (H, W, 4)")
    opaque = rgba[..., 3] >= OPACITY_THRESHOLD
    if not opaque.any():
        raise ImageError(f"sprite {sprite.id} is fully transparent", "remove it")
    y, x = (np.flatnonzero(opaque.any(axis)) for axis in (1, 0))
    part = rgba[y[0] : y[-1] + 1, x[0] : x[-1] + 1]
    return Image.fromarray(np.ascontiguousarray(part)).convert("RGBa")


def _resize_to_cell(image: Image.Image, side: int) -> np.ndarray:
    """Resize an image into a cell: uint8 (4, side, side), with the longer side over side − 2 texels from (1, 1)."""
    pixels, longest = np.asarray(image), max(image.size)
    texel = longest / (side - 2)  # in pixels of the image
    pad = math.ceil(texel)
    # Repeat the image's edge outside of it, so that opaque edges stay opaque. Then crop to a fraction of a texel.
    around = [(pad, pad + longest - n) for n in pixels.shape[:2]]
    canvas = Image.fromarray(np.pad(pixels, (*around, (0, 0)), mode="edge"), "RGBa")
    box = (pad - texel, pad - texel, pad + longest + texel, pad + longest + texel)
    cell = np.asarray(canvas.resize((side, side), Image.Resampling.BICUBIC, box))
    rows, columns = (np.clip(1 + n / texel - np.arange(side), 0, 1) for n in pixels.shape[:2])
    rows[0] = 0
    columns[0] = 0
    cell = np.rint(cell * (rows[:, None] * columns)[..., None]).astype(np.uint8)
    return np.minimum(cell, cell[..., 3:]).transpose(2, 0, 1)  # bicubic overshoots
