"""An atlas as a file: safetensors with its table as JSON and its levels deflated. What does not fit is refused.

S sprites, C concepts.
"""

import json
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitrail.data.scenes.scene import GRID, SpriteTable
from vitrail.errors import DataError

KINDS = ("thing", "word", "frame")
OF_SPRITES, OF_CONCEPTS = ("id", "vendor", "key", "kind"), ("names", "plurals", "category")  # columns of texts
_FORMAT = "vitrail atlas 1"


def write_atlas(path: Path | str, table: SpriteTable, levels: dict[int, Tensor]) -> None:
    texts = {column: getattr(table, column) for column in OF_SPRITES + OF_CONCEPTS}
    tensors = {f"level.{side}": _deflated(level) for side, level in levels.items()}
    tensors |= {"concept": table.concept.cpu(), "aspect": table.aspect.cpu()}
    save_file(tensors, str(path), {"format": _FORMAT, "table": json.dumps(texts)})


def read_atlas(path: Path | str) -> tuple[SpriteTable, dict[int, Tensor]]:
    """The table and the levels, the smallest first."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError("it is not one")
            texts = {name: tuple(values) for name, values in json.loads(metadata["table"]).items()}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        table = SpriteTable(**texts, concept=tensors.pop("concept"), aspect=tensors.pop("aspect"))
        _check(table)
        sides = sorted(int(name.removeprefix("level.")) for name in tensors)
        return table, {side: _inflated(tensors[f"level.{side}"], len(table), side) for side in sides}
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, zlib.error) as error:
        raise DataError(f"{path} cannot be read as an atlas: {error}", "copy it again, or build it anew") from error


def _deflated(level: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(zlib.compress(level.cpu().contiguous().numpy().tobytes(), 1)), dtype=torch.uint8)


def _inflated(packed: Tensor, sprites: int, side: int) -> Tensor:
    """uint8 (S, 4, side, side), and never more than that"""
    size = sprites * 4 * side * side
    if packed.dtype != torch.uint8 or not 4 <= side <= 1024:
        raise ValueError(f"its level {side} is {packed.dtype}")
    cells = zlib.decompressobj().decompress(packed.numpy().tobytes(), size + 1)
    if len(cells) != size:
        raise ValueError(f"its level {side} does not hold {sprites} sprites")
    level = torch.frombuffer(bytearray(cells), dtype=torch.uint8).view(sprites, 4, side, side)
    rim = [level[..., [0, -1]].any(), level[..., [0, -1], :].any()]
    if any(rim) or (level[:, :3] > level[:, 3:]).any():  # what the renderer's arithmetic relies on
        raise ValueError(f"its level {side} has an opaque rim, or colours that are not multiplied by opacity")
    return level


def _check(table: SpriteTable) -> None:
    S, C = len(table.id), len(table.names)
    texts = [getattr(table, column) for column in OF_SPRITES + OF_CONCEPTS]
    concept, aspect = table.concept, table.aspect
    shapes = (concept.dtype, concept.shape, aspect.dtype, aspect.shape)
    fits = {
        "columns": S > 0 and [len(t) for t in texts] == [S] * len(OF_SPRITES) + [C] * len(OF_CONCEPTS),
        "texts": all(isinstance(value, str) for column in texts for value in column),
        "ids": len(set(table.id)) == S,
        "kinds": set(table.kind) <= set(KINDS),
        "tensors": shapes == (torch.int64, (S,), torch.int64, (S, 2)),
    }
    if all(fits.values()):
        fits["concepts"] = bool(((concept >= 0) & (concept < C)).all())
        fits["aspects"] = bool((aspect.amax(1) == GRID).all() and (aspect > 0).all())
    for what, fit in fits.items():
        if not fit:
            raise ValueError(f"its {what} do not fit")
