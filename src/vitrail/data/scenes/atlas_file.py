"""Atlas files: safetensors with the sprite table as JSON and compressed levels. Invalid files raise `DataError`.

Shapes: S sprites, C concepts.
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

SPRITE_KINDS = ("thing", "word", "frame")
SPRITE_COLUMNS, CONCEPT_COLUMNS = ("id", "vendor", "key", "kind"), ("names", "plurals", "category")  # text columns
_FORMAT = "vitrail atlas 1"


def write_atlas(path: Path | str, table: SpriteTable, levels: dict[int, Tensor]) -> None:
    texts = {column: getattr(table, column) for column in SPRITE_COLUMNS + CONCEPT_COLUMNS}
    tensors = {f"level.{side}": _compress_level(level) for side, level in levels.items()}
    tensors |= {"concept": table.concept.cpu(), "aspect": table.aspect.cpu()}
    save_file(tensors, str(path), {"format": _FORMAT, "table": json.dumps(texts)})


def read_atlas(path: Path | str) -> tuple[SpriteTable, dict[int, Tensor]]:
    """Read the sprite table and the levels, smallest first."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError("it is not an atlas")
            texts = {name: tuple(values) for name, values in json.loads(metadata["table"]).items()}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        table = SpriteTable(**texts, concept=tensors.pop("concept"), aspect=tensors.pop("aspect"))
        _check_table(table)
        sides = sorted(int(name.removeprefix("level.")) for name in tensors)
        return table, {side: _decompress_level(tensors[f"level.{side}"], len(table), side) for side in sides}
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, zlib.error) as error:
        raise DataError(f"{path} cannot be read as an atlas: {error}", "copy or build it again") from error


def _compress_level(level: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(zlib.compress(level.cpu().contiguous().numpy().tobytes(), 1)), dtype=torch.uint8)


def _decompress_level(packed: Tensor, sprites: int, side: int) -> Tensor:
    """Decompress a level to uint8 (S, 4, side, side), with a limit on the size."""
    size = sprites * 4 * side * side
    if packed.dtype != torch.uint8 or not 4 <= side <= 1024:
        raise ValueError(f"level {side} has dtype {packed.dtype}")
    cells = zlib.decompressobj().decompress(packed.numpy().tobytes(), size + 1)
    if len(cells) != size:
        raise ValueError(f"level {side} does not have {sprites} sprites")
    level = torch.frombuffer(bytearray(cells), dtype=torch.uint8).view(sprites, 4, side, side)
    rim = [level[..., [0, -1]].any(), level[..., [0, -1], :].any()]
    if any(rim) or (level[:, :3] > level[:, 3:]).any():  # required by the renderer's arithmetic
        raise ValueError(f"level {side} has an opaque rim, or colours that are not premultiplied by opacity")
    return level


def _check_table(table: SpriteTable) -> None:
    S, C = len(table.id), len(table.names)
    texts = [getattr(table, column) for column in SPRITE_COLUMNS + CONCEPT_COLUMNS]
    concept, aspect = table.concept, table.aspect
    shapes = (concept.dtype, concept.shape, aspect.dtype, aspect.shape)
    checks = {
        "columns": S > 0 and [len(t) for t in texts] == [S] * len(SPRITE_COLUMNS) + [C] * len(CONCEPT_COLUMNS),
        "texts": all(isinstance(value, str) for column in texts for value in column),
        "ids": len(set(table.id)) == S,
        "kinds": set(table.kind) <= set(SPRITE_KINDS),
        "tensors": shapes == (torch.int64, (S,), torch.int64, (S, 2)),
    }
    if all(checks.values()):
        checks["concepts"] = bool(((concept >= 0) & (concept < C)).all())
        checks["aspects"] = bool((aspect.amax(1) == GRID).all() and (aspect > 0).all())
    for name, is_consistent in checks.items():
        if not is_consistent:
            raise ValueError(f"its {name} are inconsistent")
