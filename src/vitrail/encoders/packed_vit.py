"""ViT for images and videos of any size, packed into one sequence: Qwen2-VL, 2.5, 3, GLM-4V, Pixtral, Gemma 4, Kimi.

The input is patches of all items, concatenated, in blocks of M × M in the order of `patchify_blocks`.
Each frame is a segment, so attention does not cross items or frames of a video. Windows are smaller segments, used by
some blocks.

N patches of all items, t, h, w of one item, C channels, P patch size, S temporal patch size, M spatial merge size,
D width
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.config import LayerCount, NonNegativeInt, PositiveInt
from vitrail.encoders.encoder import EncoderConfig, InputKind
from vitrail.encoders.layer_selection import check_layer_indices, resolve_depth, run_blocks_to_layers
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import (
    AttentionPlan,
    BlockConfig,
    LearnedPositionEmbedding,
    PatchEmbed,
    RotaryConfig,
    RotaryEmbedding,
    Workload,
    attention_plan,
    build_grid_positions,
    compute_window_ids,
    cost,
)
from vitrail.nn.block import Block
from vitrail.nn.norms import make_norm
from vitrail.processing.grid import Grid
from vitrail.registry import ENCODERS, MODELS

Grids = Tensor | Sequence[Grid] | Sequence[tuple[int, int, int]]
"""(t, h, w) patches of every item: a tensor (items, 3), `Grid`s of processing, or triples."""


class PackedViTConfig(EncoderConfig, tag="packed-vit", tag_field="kind"):
    """Settings of the vision towers of Qwen, GLM-4V, Pixtral, Gemma 4 and Kimi. All have 2-D rotary positions. A norm
    after the last block mostly belongs to the merger.

    temporal_patch_size    frames of a patch; a still image is repeated
    spatial_merge_size     M × M patches are adjacent in the sequence, because the merger makes one token of them
    norm_first             norm of the patch embeddings before the first block (Pixtral, GLM-4V)
    norm_last              norm after the last block, in the tower itself (Kimi)
    rotary_layout          layout of the rotary positions: 2d (Qwen), 2d_split (Pixtral), or 2d_interleaved with
                           adjacent pairs of channels (Kimi)
    position_grid_size     side of the learned position embedding (Qwen3-VL: 48, GLM-4V: 24, Kimi: 64); 0 for none
    position_table_size    rows of the learned embeddings of columns and of rows, which are added (Gemma 4); 0 for none
    interpolation          how it is resized: bilinear_corners (Qwen3-VL) or bicubic (GLM-4V, Kimi)
    window_size            side of attention windows, in tokens of M × M patches (Qwen2.5-VL: 4); 0 for none
    full_attention_layers  blocks without windows, counted from 0
    feature_layers         layers (see `resolve_depth`) whose features are returned before the last ones (DeepStack)
    """

    layers: LayerCount
    block: BlockConfig
    patch_size: PositiveInt = 14
    temporal_patch_size: PositiveInt = 2
    spatial_merge_size: PositiveInt = 2
    channels: PositiveInt = 3
    patch_bias: bool = False
    theta: float = 10_000.0
    rotary_layout: Literal["2d", "2d_split", "2d_interleaved"] = "2d"
    norm_first: bool = False
    norm_last: bool = False
    position_grid_size: NonNegativeInt = 0
    position_table_size: NonNegativeInt = 0
    interpolation: Literal["bilinear_corners", "bicubic"] = "bilinear_corners"
    window_size: NonNegativeInt = 0
    full_attention_layers: tuple[int, ...] = ()
    feature_layers: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        return self.block.width

    @property
    def input_kind(self) -> InputKind:
        return "patches"

    @property
    def patch_dim(self) -> int:
        """Values of one patch."""
        return self.channels * self.temporal_patch_size * self.patch_size**2

    @property
    def rotary_config(self) -> RotaryConfig:
        return RotaryConfig(
            head_dim=self.block.attention.resolve_head_dim(self.block.width),
            layout=self.rotary_layout,
            theta=self.theta,
            pairing="adjacent" if self.rotary_layout == "2d_interleaved" else "half",
        )

    def __post_init__(self) -> None:
        if self.block.branches != ("self", "mlp"):
            raise ConfigError(f"a ViT block needs branches self, mlp, not {', '.join(self.block.branches)}")
        if self.full_attention_layers and not self.window_size:
            raise ConfigError(f"full_attention_layers {self.full_attention_layers} need windows", "set window_size")
        check_layer_indices("full_attention_layers", self.full_attention_layers, self.layers)
        for layer in self.feature_layers:
            resolve_depth(layer, self.layers)
        self.rotary_config.num_rotated_channels  # noqa: B018  raises if the head width does not fit two axes


class PackedLayout(NamedTuple):
    """Positions and attention plans of packed items.

    `order` sorts patches by window, so that windows are contiguous and need no mask; None without windows.
    """

    positions: Tensor  # (N, 3)
    frame_plan: AttentionPlan
    window_plan: AttentionPlan
    order: Tensor | None  # (N,)


@ENCODERS.register("packed-vit")
@MODELS.register("packed-vit")
class PackedViT(nn.Module):
    """Packed ViT: patches (N, C·S·P·P) of all items and their `grids` → features (N, D), in the same order."""

    Config = PackedViTConfig

    def __init__(self, config: PackedViTConfig):
        super().__init__()
        self.config = config
        width, side = config.block.width, config.position_grid_size
        patch = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.embed = PatchEmbed(patch, width, config.channels, config.patch_bias)
        self.norm_first, self.norm_last = (
            make_norm(config.block.norm, width, config.block.eps) if has_norm else None
            for has_norm in (config.norm_first, config.norm_last)
        )
        self.positions = (
            LearnedPositionEmbedding((side, side), width, interpolation=config.interpolation) if side else None
        )
        table = config.position_table_size
        self.position_table = nn.Parameter(torch.randn(2, table, width) * 0.02) if table else None  # columns, rows
        self.rotary = RotaryEmbedding(config.rotary_config)
        self.blocks = nn.ModuleList([Block(config.block) for _ in range(config.layers)])

    def forward(self, patches: Tensor, grids: Grids, *, layer: int | None = None) -> Tensor:
        """Return features (N, D) of `layer` (see `resolve_depth`), or of the last; later blocks are not run."""
        return self.forward_layers(patches, grids, (layer,))[0]

    def forward_layers(self, patches: Tensor, grids: Grids, layers: Sequence[int | None] | None = None) -> list[Tensor]:
        """Return features (N, D) of several layers from one pass. Default: `feature_layers`, then the last layer."""
        items = self._check_patches(patches, grids)
        layout = self.layout(items, patches.device)
        x = self.embed(patches.to(self.embed.proj.weight.dtype))  # (N, D)
        if self.norm_first is not None:
            x = self.norm_first(x)
        if self.positions is not None:
            x = x + self._position_embeddings(self.positions, items)
        cells = layout.positions
        if self.position_table is not None:
            x = x + (self.position_table[0, cells[:, 2]] + self.position_table[1, cells[:, 1]])
        if layout.order is not None:
            x, cells = x[layout.order], cells[layout.order]
        plans = [layout.window_plan if self.is_windowed(i) else layout.frame_plan for i in range(self.config.layers)]
        layers = (*self.config.feature_layers, None) if layers is None else tuple(layers)
        states = run_blocks_to_layers(self.blocks, x[None], layers, plans, self.rotary(cells[None]))  # (1, N, D) each
        if self.norm_last is not None:
            last = zip(states, layers, strict=True)
            states = [self.norm_last(state) if layer is None else state for state, layer in last]
        inverse = None if layout.order is None else layout.order.argsort()
        return [state[0] if inverse is None else state[0, inverse] for state in states]

    def layout(self, grids: Grids, device: torch.device) -> PackedLayout:
        """Return the cached layout of these grids."""
        return _cached_packed_layout(tuple(self._to_grids(grids)), self.config.window_size, device)

    def is_windowed(self, block: int) -> bool:
        """Return whether a block has windowed attention."""
        return self.config.window_size > 0 and block not in self.config.full_attention_layers

    def workload(self, grids: Grids) -> "PackedWorkload":
        """Return the workload of these items."""
        items = self._to_grids(grids)
        frame, window = (_count_pairs(_segments(items, size)) for size in (0, self.config.window_size))
        return PackedWorkload(
            tokens=sum(g.num_patches for g in items),
            attention_pairs=frame,
            window_pairs=window,
            sequences=sum(g.t for g in items),
        )

    def _to_grids(self, grids: Grids) -> list[Grid]:
        rows = grids.tolist() if isinstance(grids, Tensor) else grids
        triples = [(g.t, g.h, g.w) if isinstance(g, Grid) else g for g in rows]
        return [Grid(t=int(t), h=int(h), w=int(w), merge_size=self.config.spatial_merge_size) for t, h, w in triples]

    def _check_patches(self, patches: Tensor, grids: Grids) -> list[Grid]:
        items, K = self._to_grids(grids), self.config.patch_dim
        expected = sum(grid.num_patches for grid in items)
        if patches.ndim != 2 or patches.shape[1] != K or not items or len(patches) != expected:
            raise ImageError(
                f"patches have shape {tuple(patches.shape)}; {len(items)} grids need {expected} patches of {K} values",
                "cut every item with `patchify_blocks` of vitrail.processing, and concatenate the rows",
            )
        size = self.config.position_table_size
        if size and (largest := max(max(grid.h, grid.w) for grid in items)) > size:
            raise ImageError(f"an image has {largest} patches in a row or column, but the tower embeds {size}")
        return items

    def _position_embeddings(self, positions: LearnedPositionEmbedding, items: list[Grid]) -> Tensor:
        """Return position embeddings (N, D), equal for all frames of a video."""
        tables = {}
        for grid in items:
            if (grid.h, grid.w) not in tables:
                tables[grid.h, grid.w] = to_block_order(positions(grid.h, grid.w), grid.replace(t=1))
        return torch.cat([tables[grid.h, grid.w].repeat(grid.t, 1) for grid in items])


def to_block_order(rows: Tensor, grid: Grid) -> Tensor:
    """Reorder rows (t·h·w, …) from raster order to the order of `patchify_blocks`."""
    M = grid.merge_size
    return rows.unflatten(0, (grid.t, grid.num_rows, M, grid.num_columns, M)).transpose(2, 3).flatten(0, 4)


def build_packed_layout(grids: Sequence[Grid], window_size: int, device: torch.device | str = "cpu") -> PackedLayout:
    """Build the layout of packed items. It runs on the CPU, because plans need the segment lengths."""
    cells = torch.cat([to_block_order(build_grid_positions(g.t, g.h, g.w), g) for g in grids])
    frames, order = _segments(grids, 0), None
    plan = _plan(frames).to(device)
    windows = plan
    if window_size:
        inside = _segments(grids, window_size)
        order = inside.argsort(stable=True)  # windows of one frame precede those of the next
        windows = _plan(inside[order]).to(device)
        order = order.to(device)
    return PackedLayout(cells.to(device), plan, windows, order)


# Cached, because image sizes repeat, and because a captured CUDA graph cannot copy to the device.
_cached_packed_layout = lru_cache(maxsize=16)(build_packed_layout)


def _segments(items: Sequence[Grid], window: int) -> Tensor:
    """Return the index of the frame or window of every patch, (N,), counted over all items."""
    segments, start = [], 0
    for grid in items:
        size = window or max(grid.num_rows, grid.num_columns)  # one window per frame
        ids = compute_window_ids(grid.t, grid.num_rows, grid.num_columns, size).repeat_interleave(grid.merge_size**2)
        segments.append(ids + start)
        start += int(ids[-1]) + 1
    return torch.cat(segments)


def _plan(segments: Tensor) -> AttentionPlan:
    return attention_plan(segments[None]) if int(segments[-1]) else AttentionPlan()


# ---- costs ------------------------------------------------------------------------------------------------------


class PackedWorkload(Workload):
    """`attention_pairs` are within frames, `window_pairs` within windows; `sequences` are frames."""

    window_pairs: int = 0


def _count_pairs(segments: Tensor) -> int:
    return int(segments.bincount().square().sum())


@cost.count_flops.register
def _(module: PackedViT, work: Workload) -> int:
    """FLOPs of `model(patches, grids)`, for the workload of `model.workload(grids)`."""
    if not isinstance(work, PackedWorkload):
        raise ConfigError("the cost of packed items depends on their grids", "pass `model.workload(grids)`")
    inside = work.replace(attention_pairs=work.window_pairs)
    blocks = (
        cost.count_flops(block, inside if module.is_windowed(i) else work) for i, block in enumerate(module.blocks)
    )
    return cost.count_flops(module.embed, work) + sum(blocks)


cost.count_bytes.register(PackedViT, cost.sum_child_bytes)
