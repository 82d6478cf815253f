"""One ViT for pictures and videos of any size, packed in one row: Qwen2-VL, Qwen2.5-VL and Qwen3-VL by config alone.

Patches come already cut, item behind item, in the order of `processing.patches.to_blocks`: block by block of M × M.
Every frame is a segment of its own, so nothing is seen across items, nor across the frames of a video; windows are
smaller segments, which some blocks have.

N patches of all items, t, h, w of one, C channels, P patch, S frames of a patch, M merge, D width
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.depth import depth_of, run_depths
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import (
    BlockConfig,
    LearnedPositions,
    PatchEmbed,
    Plan,
    Rotary,
    RotaryConfig,
    Work,
    attention_plan,
    cost,
    grid_positions,
    grid_windows,
)
from vitrail.nn.block import Block
from vitrail.processing.grid import Grid

Grids = Tensor | Sequence[Grid] | Sequence[tuple[int, int, int]]
"""(t, h, w) patches of every item: a tensor (items, 3), the grids that processing gives, or triples."""


class PackedViTConfig(Config, tag="packed_vit", tag_field="kind"):
    """What Qwen's towers differ in. All have rotary positions in 2-D, and no last norm: that is the merger's.

    temporal   frames of a patch; a still fills it by being repeated
    merge      M × M patches stand together, since they will be one token
    positions  side of a learned table, resized bilinearly from corner to corner (Qwen3-VL: 48); 0 for none
    window     side of the windows that attention keeps to, in tokens of M × M patches (Qwen2.5-VL: 4); 0 for none
    full       blocks that see the whole frame all the same, counted from 0
    taps       layers (see `depth_of`) whose features go along with the last ones (DeepStack)
    """

    layers: int
    block: BlockConfig
    patch: int = 14
    temporal: int = 2
    merge: int = 2
    channels: int = 3
    patch_bias: bool = False
    theta: float = 10_000.0
    positions: int = 0
    window: int = 0
    full: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()

    @property
    def numbers(self) -> int:
        """Of one patch."""
        return self.channels * self.temporal * self.patch**2

    @property
    def rotary(self) -> RotaryConfig:
        return RotaryConfig(head_dim=self.block.attention.channels(self.block.width), layout="2d", theta=self.theta)

    def __post_init__(self) -> None:
        if min(self.patch, self.temporal, self.merge, self.channels) < 1:
            raise ConfigError(
                f"patches of {self.channels} × {self.temporal} × {self.patch}², merged by {self.merge}",
                "all are at least 1",
            )
        if self.block.chain != ("self", "mlp"):
            raise ConfigError(f"a ViT's block is self, mlp, not {', '.join(self.block.chain)}")
        if min(self.positions, self.window) < 0:
            raise ConfigError(f"positions {self.positions}, window {self.window}", "use 0 for none")
        if self.full and not self.window:
            raise ConfigError(f"blocks {self.full} are to see more than their window, and there is none")
        if self.full and not 0 <= min(self.full) <= max(self.full) < self.layers:
            raise ConfigError(f"a tower of {self.layers} blocks has not all of {self.full}", "count from 0")
        for layer in self.taps:
            depth_of(layer, self.layers)
        self.rotary.rotated  # noqa: B018  refuses heads that two axes cannot share


class Arrangement(NamedTuple):
    """How packed items lie. `order` puts windows one behind the other, so that they, like the frames, are unbroken
    runs: no mask is made of them. None where there are no windows."""

    cells: Tensor  # (N, 3)
    frames: Plan
    windows: Plan
    order: Tensor | None  # (N,)


class PackedViT(nn.Module):
    """patches (N, C·S·P·P) of all items and their `grids` → features (N, D), in the same order."""

    def __init__(self, config: PackedViTConfig):
        super().__init__()
        self.config = config
        width, side = config.block.width, config.positions
        patch = (config.temporal, config.patch, config.patch)
        self.embed = PatchEmbed(patch, width, config.channels, config.patch_bias)
        self.positions = LearnedPositions((side, side), width, resize="bilinear_corners") if side else None
        self.rotary = Rotary(config.rotary)
        self.blocks = nn.ModuleList([Block(config.block) for _ in range(config.layers)])

    def forward(self, patches: Tensor, grids: Grids, *, layer: int | None = None) -> Tensor:
        """(N, D), from `layer` (see `depth_of`) or from the end; later blocks are not run."""
        return self.depths(patches, grids, (layer,))[0]

    def depths(self, patches: Tensor, grids: Grids, layers: Sequence[int | None] | None = None) -> list[Tensor]:
        """Features (N, D) of several layers, from one pass: of the config's taps and then the last, unless told."""
        items = self._items(patches, grids)
        placed = self.arranged(items, patches.device)
        x = self.embed(patches.to(self.embed.proj.weight.dtype))  # (N, D)
        if self.positions is not None:
            x = x + self._learned(self.positions, items)
        cells = placed.cells
        if placed.order is not None:
            x, cells = x[placed.order], cells[placed.order]
        plans = [placed.windows if self.windowed(i) else placed.frames for i in range(self.config.layers)]
        wanted = (*self.config.taps, None) if layers is None else tuple(layers)
        states = run_depths(self.blocks, x[None], wanted, plans, self.rotary(cells[None]))  # (1, N, D) each
        back = None if placed.order is None else placed.order.argsort()
        return [state[0] if back is None else state[0, back] for state in states]

    def arranged(self, grids: Grids, device: torch.device) -> Arrangement:
        """`arrange` for this tower."""
        return _arranged(tuple(self._grids(grids)), self.config.window, device)

    def windowed(self, block: int) -> bool:
        return self.config.window > 0 and block not in self.config.full

    def work(self, grids: Grids) -> "PackedWork":
        """What `cost` needs to know of such items."""
        items = self._grids(grids)
        frame, window = (_pairs(_segments(items, size)) for size in (0, self.config.window))
        return PackedWork(
            tokens=sum(g.patches for g in items), pairs=frame, windowed=window, rows=sum(g.t for g in items)
        )

    def _grids(self, grids: Grids) -> list[Grid]:
        rows = grids.tolist() if isinstance(grids, Tensor) else grids
        triples = [(g.t, g.h, g.w) if isinstance(g, Grid) else g for g in rows]
        return [Grid(t=int(t), h=int(h), w=int(w), merge=self.config.merge) for t, h, w in triples]

    def _items(self, patches: Tensor, grids: Grids) -> list[Grid]:
        items, K = self._grids(grids), self.config.numbers
        expected = sum(grid.patches for grid in items)
        if patches.ndim != 2 or patches.shape[1] != K or not items or len(patches) != expected:
            raise ImageError(
                f"{len(items)} grids count {expected} patches of {K} numbers, and the patches are "
                f"{tuple(patches.shape)}",
                "cut every item with processing.patches.to_blocks, and put the rows one behind the other",
            )
        return items

    def _learned(self, positions: LearnedPositions, items: list[Grid]) -> Tensor:
        """(N, D). All frames of a video have the same."""
        tables = {}
        for grid in items:
            if (grid.h, grid.w) not in tables:
                tables[grid.h, grid.w] = in_blocks(positions(grid.h, grid.w), grid.with_(t=1))
        return torch.cat([tables[grid.h, grid.w].repeat(grid.t, 1) for grid in items])


def in_blocks(rows: Tensor, grid: Grid) -> Tensor:
    """(t·h·w, …) in raster order → the order of `to_blocks`."""
    M = grid.merge
    return rows.unflatten(0, (grid.t, grid.rows, M, grid.columns, M)).transpose(2, 3).flatten(0, 4)


def arrange(items: Sequence[Grid], window: int, device: torch.device | str = "cpu") -> Arrangement:
    """Where the patches of packed items stand and which see each other. Made on the CPU: plans count their runs."""
    cells = torch.cat([in_blocks(grid_positions(g.t, g.h, g.w), g) for g in items])
    frames, order = _segments(items, 0), None
    plan = windows = _plan(frames).to(device)
    if window:
        inside = _segments(items, window)
        order = inside.argsort(stable=True)  # of a frame all windows come before the next frame's
        windows = _plan(inside[order]).to(device)
        order = order.to(device)
    return Arrangement(cells.to(device), plan, windows, order)


# Pictures of a size come again, and a captured pass can bring nothing to the device.
_arranged = lru_cache(maxsize=16)(arrange)


def _segments(items: Sequence[Grid], window: int) -> Tensor:
    """(N,) the frame of every patch, or its window, counted through all items; patches in the order of blocks."""
    found, first = [], 0
    for grid in items:
        size = window or max(grid.rows, grid.columns)  # one window holds a whole frame
        one = grid_windows(grid.t, grid.rows, grid.columns, size).repeat_interleave(grid.merge**2)
        found.append(one + first)
        first += int(one[-1]) + 1
    return torch.cat(found)


def _plan(segments: Tensor) -> Plan:
    return attention_plan(segments[None]) if int(segments[-1]) else Plan()


# ---- costs ------------------------------------------------------------------------------------------------------


class PackedWork(Work):
    """`pairs` are those within frames, `windowed` those within windows; `rows` are frames."""

    windowed: int = 0


def _pairs(segments: Tensor) -> int:
    return int(segments.bincount().square().sum())


@cost.flops.register
def _(module: PackedViT, work: Work) -> int:
    """Of `model(patches, grids)`, with the work that `model.work(grids)` gives."""
    if not isinstance(work, PackedWork):
        raise ConfigError("the cost of packed items depends on their grids", "give the work of `model.work(grids)`")
    inside = work.with_(pairs=work.windowed)
    blocks = (cost.flops(block, inside if module.windowed(i) else work) for i, block in enumerate(module.blocks))
    return cost.flops(module.embed, work) + sum(blocks)


@cost.bytes.register
def _(module: PackedViT, work: Work) -> cost.Bytes:
    return cost.sum_bytes(module, work)
