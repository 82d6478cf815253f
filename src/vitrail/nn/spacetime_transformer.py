"""Space-time transformer (Genie): attention within a frame, causal attention in time at each position, then an MLP.

Full attention over a video costs (T·S)² pairs, this T·S² + S·T². A block consists of two `Block`s; the first has
attention only.

B batch, T frames, S tokens of a frame: X prefix tokens, then an h × w grid; W width, M context frames
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config, LayerCount, PositiveInt
from vitrail.errors import ConfigError
from vitrail.nn import cost
from vitrail.nn.attention_plans import AttentionPlan
from vitrail.nn.block import Block, BlockConfig
from vitrail.nn.cost import Workload
from vitrail.nn.kv_cache import KeyValues
from vitrail.nn.norms import make_norm
from vitrail.nn.position_embedding import LearnedPositionEmbedding, build_grid_positions
from vitrail.nn.rotary_embedding import RotaryConfig, RotaryEmbedding, Rotation
from vitrail.nn.single_frame import SingleFrameRunner, explain_unsupported


class SpaceTimeConfig(Config):
    """Space-time transformer settings.

    context_frames  frames that a layer attends to, including the current one: a sliding window, so a video may have any
                    length and the cache stays this small
    theta           base of the rotary positions in time
    theta_space     base of the rotary positions within a frame; use a larger one for grids much wider than ten cells
    """

    layers: LayerCount
    block: BlockConfig
    context_frames: PositiveInt = 16
    theta: float = 1_000.0
    theta_space: float = 10.0

    def __post_init__(self) -> None:
        if self.block.branches != ("self", "mlp"):
            raise ConfigError(f"a space-time block needs branches self, mlp, not {', '.join(self.block.branches)}")
        if (channels := self.block.attention.resolve_head_dim(self.block.width)) % 4:
            raise ConfigError(
                f"head width {channels} is not divisible by 4, which 2-D rotary positions need",
                "change width or heads",
            )


class FrameCache:
    """Keys and values of past frames in the context window, for each layer.

    A pass stores its keys and values as a draft; `commit` appends the draft to the past. A frame that takes several
    passes is committed once, after the last pass.
    """

    def __init__(self, num_layers: int, context_frames: int):
        self.context_frames, self.num_frames = context_frames, 0  # frames committed so far, in the cache or not
        self.past_key_values: list[KeyValues | None] = [None] * num_layers
        self.draft: list[KeyValues | None] = [None] * num_layers
        self._new = 0

    @property
    def num_cached_frames(self) -> int:
        """Number of frames in the cache."""
        return min(self.num_frames, self.context_frames - 1)

    @property
    def is_full(self) -> bool:
        """Whether every new frame replaces the oldest one."""
        return 0 < self.num_cached_frames == self.context_frames - 1

    def layer(self, i: int) -> "FrameLayerCache":
        return FrameLayerCache(self, i)

    def start_pass(self, frames: int) -> None:
        self._new = frames

    def commit(self) -> None:
        """Append the frames of the last pass to the past."""
        self.num_frames += self._new
        for i, draft in enumerate(self.draft):
            if draft is None:
                raise ConfigError("the frame cache has no draft to commit", "run the frames through the model first")
            first = draft.k.shape[1] - self.num_cached_frames
            self.past_key_values[i] = (
                KeyValues(draft.k[:, first:], draft.v[:, first:]) if self.num_cached_frames else None
            )
            self.draft[i] = None
        self._new = 0


class FrameLayerCache(NamedTuple):
    """View of one layer of a `FrameCache`."""

    cache: FrameCache
    layer: int

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new frames (B·S, T, G, D) to those of the past and return all."""
        past = self.cache.past_key_values[self.layer]
        if past is not None:
            k, v = torch.cat([past.k, k], 1), torch.cat([past.v, v], 1)
        self.cache.draft[self.layer] = KeyValues(k, v)
        return k, v


class FrameRingCache:
    """Full frame cache in fixed buffers, for one frame at a time: usable inside a CUDA graph.

    Keys contain their rotary positions, so their order does not matter. Frame t is written to slot t mod M, over a
    frame outside the window. Every pass over a frame overwrites its slot, until `commit` advances to the next.
    """

    def __init__(self, cache: FrameCache):
        past = [layer for layer in cache.past_key_values if layer is not None]
        if not cache.is_full:
            raise ConfigError(
                f"a ring of {cache.context_frames} frames needs a full cache, not {cache.num_cached_frames} frames",
                "fill the cache first",
            )
        rows, _, *each = past[0].k.shape
        self.context_frames = cache.context_frames
        self.k, self.v = ([past[0].k.new_zeros(rows, cache.context_frames, *each) for _ in past] for _ in range(2))
        self.num_frames = torch.zeros((), dtype=torch.long, device=past[0].k.device)  # on the device, for graphs
        self.copy_from(cache)

    @property
    def num_cached_frames(self) -> int:
        return self.context_frames - 1

    def is_compatible(self, cache: FrameCache) -> bool:
        """Return whether this ring can copy from a full cache without a new allocation."""
        kept = cache.past_key_values[0]
        if kept is None or (len(cache.past_key_values), cache.context_frames) != (len(self.k), self.context_frames):
            return False
        own = self.k[0]
        return (own.dtype, own.device, own[:, 1:].shape) == (kept.k.dtype, kept.k.device, kept.k.shape)

    def copy_from(self, cache: FrameCache) -> None:
        """Copy the frames of a cache."""
        slots = (
            torch.arange(cache.num_frames - self.num_cached_frames, cache.num_frames, device=self.num_frames.device)
            % self.context_frames
        )
        for k, v, kept in zip(self.k, self.v, cache.past_key_values, strict=True):
            assert kept is not None
            k.index_copy_(1, slots, kept.k)
            v.index_copy_(1, slots, kept.v)
        self.num_frames.fill_(cache.num_frames)

    def layer(self, i: int) -> "RingLayerCache":
        return RingLayerCache(self.k[i], self.v[i], self.num_frames)

    def start_pass(self, frames: int) -> None:
        if frames != 1:
            raise ConfigError(f"{frames} frames in one pass", "pass one frame at a time")

    def commit(self) -> None:
        """Make the frame of the last pass part of the past."""
        self.num_frames.add_(1)


class RingLayerCache(NamedTuple):
    """View of one layer of a `FrameRingCache`. It has no layer index, so compiled code serves all layers."""

    k: Tensor
    v: Tensor
    num_frames: Tensor

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of a new frame (B·S, 1, G, D) and return the buffers."""
        slot = (self.num_frames % self.k.shape[1])[None]
        return self.k.index_copy_(1, slot, k), self.v.index_copy_(1, slot, v)


AnyFrameCache = FrameCache | FrameRingCache | SingleFrameRunner


class SpaceTimeBlock(nn.Module):
    """Spatial attention, then temporal attention and an MLP."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.space, self.time = Block(config.replace(branches=("self",))), Block(config)

    def forward(
        self,
        x: Tensor,
        plan: AttentionPlan,
        *,
        space_rotation: Rotation,
        rotation: Rotation | None = None,
        cache: Any = None,  # of one layer
    ) -> Tensor:
        """(B, T, S, W) → (B, T, S, W). `space_rotation` is for spatial attention, the rest for temporal attention."""
        B, T, S, _ = x.shape
        x = self.space(x.flatten(0, 1), rotation=space_rotation).unflatten(0, (B, T))
        x = x.transpose(1, 2).flatten(0, 1)  # (B·S, T, W)
        return self.time(x, plan, rotation=rotation, cache=cache).unflatten(0, (B, S)).transpose(1, 2)


class SpaceTimeTransformer(nn.Module):
    """Space-time transformer over tokens (B, T, X + h·w, W).

    Each token attends to its own frame and to its position in past frames. `grid_size` is the grid of the learned
    positions.
    """

    def __init__(self, config: SpaceTimeConfig, grid_size: tuple[int, int], num_prefix_tokens: int = 0):
        super().__init__()
        self.config, self.num_prefix_tokens = config, num_prefix_tokens
        block = config.block
        self.positions = LearnedPositionEmbedding(grid_size, block.width, num_prefix_tokens)
        channels = block.attention.resolve_head_dim(block.width)
        self.time_rotary = RotaryEmbedding(RotaryConfig(head_dim=channels, theta=config.theta))
        self.space_rotary = RotaryEmbedding(RotaryConfig(head_dim=channels, theta=config.theta_space, layout="2d"))
        self.blocks = nn.ModuleList([SpaceTimeBlock(block) for _ in range(config.layers)])
        self.norm = make_norm(block.norm, block.width, block.eps)

    def forward(self, x: Tensor, grid: tuple[int, int], cache: AnyFrameCache | None = None) -> Tensor:
        """Run frames that follow those of the cache. Call `cache.commit()` to add them to the cache."""
        x = x + self.positions(*grid)
        if isinstance(cache, SingleFrameRunner):
            return self.norm(cache(x, grid))
        T, start = x.shape[1], 0 if cache is None else cache.num_frames
        if cache is not None:
            cache.start_pass(T)
        plan = _plan(T, 0 if cache is None else cache.num_cached_frames, self.config.context_frames, x.device)
        around, rotation = self.space_rotation(*grid), self.time_rotary(start + torch.arange(T, device=x.device)[None])
        for i, block in enumerate(self.blocks):
            x = block(
                x, plan, space_rotation=around, rotation=rotation, cache=None if cache is None else cache.layer(i)
            )
        return self.norm(x)

    def space_rotation(self, h: int, w: int) -> Rotation:
        """Return the spatial rotation of a frame, (1, X + h·w, ·). Prefix tokens have position 0."""
        places = build_grid_positions(1, h, w, device=self.space_rotary.frequency.device)
        return self.space_rotary(F.pad(places, (0, 0, self.num_prefix_tokens, 0))[None])

    def make_cache(self) -> FrameCache:
        return FrameCache(self.config.layers, self.config.context_frames)

    def make_single_frame_runner(self, cache: FrameCache) -> SingleFrameRunner | None:
        """Return a fast CPU runner that continues from a cache, or None if the config or device is not supported."""
        if not cache.num_cached_frames or explain_unsupported(self.config.block, self.positions.table.device):
            return None
        return SingleFrameRunner(
            self.blocks,
            self.space_rotation,
            self.time_rotary,
            cache.context_frames,
            cache.past_key_values,
            cache.num_frames,
        )

    def workload(
        self, num_frames: int, batch_size: int = 1, grid: tuple[int, int] | None = None, past_frames: int | None = None
    ) -> "FramesWorkload":
        """Return the workload of a pass over frames after `past_frames` cached ones; None for a pass without cache."""
        h, w = grid or self.positions.grid_size
        S, M = self.num_prefix_tokens + h * w, self.config.context_frames
        time_pairs = sum(min((past_frames or 0) + t + 1, M) for t in range(num_frames))
        return FramesWorkload(
            tokens=batch_size * num_frames * S,
            attention_pairs=batch_size * num_frames * S * S,
            time_pairs=batch_size * S * time_pairs,
            cached_tokens=0 if past_frames is None else batch_size * S * min(past_frames + num_frames, M - 1),
            sequences=batch_size,
        )


def _plan(new: int, past: int, memory: int, device: torch.device) -> AttentionPlan:
    """Return the temporal plan of new frames after past ones; each attends to `memory` frames including itself."""
    if new == 1:
        return AttentionPlan()  # the cache has no more frames than the window
    if past + new <= memory and not past:
        return AttentionPlan(causal=True)
    index = None if not past else torch.arange(past, past + new, device=device)[None]
    return AttentionPlan(causal=True, window=(memory - 1, -1), query_slots=index)


# ---- costs ------------------------------------------------------------------------------------------------------


class FramesWorkload(Workload, kw_only=True):
    """Workload of frames: `attention_pairs` are within frames, `time_pairs` are across frames at one position."""

    time_pairs: int


def _in_time(work: Workload) -> tuple[Workload, Workload]:
    """Return the workloads of spatial and temporal attention."""
    if not isinstance(work, FramesWorkload):
        raise ConfigError("the cost of a space-time block needs a FramesWorkload", "use `model.workload(…)`")
    return work.replace(cached_tokens=0), work.replace(attention_pairs=work.time_pairs)


@cost.count_flops.register
def _(module: SpaceTimeBlock, work: Workload) -> int:
    space, time = _in_time(work)
    return cost.count_flops(module.space, space) + cost.count_flops(module.time, time)


@cost.count_bytes.register
def _(module: SpaceTimeBlock, work: Workload) -> cost.MemoryBytes:
    space, time = _in_time(work)
    return cost.count_bytes(module.space, space) + cost.count_bytes(module.time, time)


@cost.count_flops.register
def _(module: SpaceTimeTransformer, work: Workload) -> int:
    return cost.count_flops(module.blocks, work)


cost.count_bytes.register(SpaceTimeTransformer, cost.sum_child_bytes)
