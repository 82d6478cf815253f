"""The ST-transformer: attention within a frame, then back in time at each place, then one MLP (Genie).

All pairs of a video cost (T·S)², these T·S² + S·T². A block is two of the house's: the first is attention alone.

B batch, T frames, S places of a frame, h × w of them on a grid behind X that are on none, W width, M frames of memory
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn import cost
from vitrail.nn.block import Block, BlockConfig
from vitrail.nn.cache import Kept
from vitrail.nn.cost import Work
from vitrail.nn.norms import make_norm
from vitrail.nn.one_frame import OneFrame, unfit
from vitrail.nn.plan import Plan
from vitrail.nn.positions import LearnedPositions, grid_positions
from vitrail.nn.rotary import Rotary, RotaryConfig, Rotation


class SpaceTimeConfig(Config):
    """
    memory       frames that a layer sees, the one it is at among them. It is a window, and positions in time are
                 rotary, so that a video may be of any length, and one made frame by frame keeps no more than so many
    theta        of the rotary positions in time
    theta_space  of those within a frame, by which what is beside a place is learned once for all places; a grid of many
                 more than ten cells along a side may want a larger one
    """

    layers: int
    block: BlockConfig
    memory: int = 16
    theta: float = 1_000.0
    theta_space: float = 10.0

    def __post_init__(self) -> None:
        if self.layers < 1 or self.memory < 1:
            raise ConfigError(f"{self.layers} layers and {self.memory} frames of memory", "give at least one of each")
        if self.block.chain != ("self", "mlp"):
            raise ConfigError(f"an ST-transformer's block is self, mlp, not {', '.join(self.block.chain)}")
        if (channels := self.block.attention.channels(self.block.width)) % 4:
            raise ConfigError(
                f"heads of {channels} channels: rotary positions turn pairs, as many by rows as by columns",
                "give heads a width that four divides",
            )


class FrameCache:
    """Keys and values of the frames before, layer by layer: those that a memory of M frames can still reach.

    A pass leaves what it made as a draft; `keep` makes it a part of the past. A frame that is drawn in several passes
    is kept once, after the last.
    """

    def __init__(self, layers: int, memory: int):
        self.memory, self.seen = memory, 0  # frames that were kept, whether they are still here or not
        self.past: list[Kept | None] = [None] * layers
        self.draft: list[Kept | None] = [None] * layers
        self._new = 0

    @property
    def held(self) -> int:
        """Frames that are still here."""
        return min(self.seen, self.memory - 1)

    @property
    def full(self) -> bool:
        """Whether every frame to come drives one out."""
        return 0 < self.held == self.memory - 1

    def layer(self, i: int) -> "FrameLayer":
        return FrameLayer(self, i)

    def begin(self, frames: int) -> None:
        self._new = frames

    def keep(self) -> None:
        """The frames of the last pass happened."""
        self.seen += self._new
        for i, made in enumerate(self.draft):
            if made is None:
                raise ConfigError("a cache cannot keep what no pass has made", "run the frames through first")
            first = made.k.shape[1] - self.held
            self.past[i] = Kept(made.k[:, first:], made.v[:, first:]) if self.held else None
            self.draft[i] = None
        self._new = 0


class FrameLayer(NamedTuple):
    """One layer's share of a cache."""

    cache: FrameCache
    layer: int

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the new frames (B·S, T, G, D) behind those of the past."""
        past = self.cache.past[self.layer]
        if past is not None:
            k, v = torch.cat([past.k, k], 1), torch.cat([past.v, v], 1)
        self.cache.draft[self.layer] = Kept(k, v)
        return k, v


class FrameRing:
    """A full cache in buffers that stay where they are, for frames one at a time: what a CUDA graph can go on with.

    Keys carry their positions, so that they may lie in any order: frame t is written to slot t mod M, over the one that
    is out of reach by then. A frame that is drawn in several passes is written by each, and stays when it is kept.
    """

    def __init__(self, cache: FrameCache):
        past = [kept for kept in cache.past if kept is not None]
        if not cache.full:
            raise ConfigError(f"a ring of {cache.memory} frames cannot begin with {cache.held}", "fill the cache first")
        rows, _, *each = past[0].k.shape
        self.memory = cache.memory
        self.k, self.v = ([past[0].k.new_zeros(rows, cache.memory, *each) for _ in past] for _ in range(2))
        self.seen = torch.zeros((), dtype=torch.long, device=past[0].k.device)  # on the device: a graph counts on
        self.fill(cache)

    @property
    def held(self) -> int:
        return self.memory - 1

    def fits(self, cache: FrameCache) -> bool:
        """Whether a full cache can be taken over."""
        kept = cache.past[0]
        if kept is None or (len(cache.past), cache.memory) != (len(self.k), self.memory):
            return False
        mine = self.k[0]
        return (mine.dtype, mine.device, mine[:, 1:].shape) == (kept.k.dtype, kept.k.device, kept.k.shape)

    def fill(self, cache: FrameCache) -> None:
        """Begin anew with what a cache holds."""
        slots = torch.arange(cache.seen - self.held, cache.seen, device=self.seen.device) % self.memory
        for k, v, kept in zip(self.k, self.v, cache.past, strict=True):
            assert kept is not None
            k.index_copy_(1, slots, kept.k)
            v.index_copy_(1, slots, kept.v)
        self.seen.fill_(cache.seen)

    def layer(self, i: int) -> "RingLayer":
        return RingLayer(self.k[i], self.v[i], self.seen)

    def begin(self, frames: int) -> None:
        if frames != 1:
            raise ConfigError(f"{frames} frames at once", "a ring takes one")

    def keep(self) -> None:
        """The frame of the last pass happened."""
        self.seen.add_(1)


class RingLayer(NamedTuple):
    """One layer's share of a ring. It holds no number of a layer, so that what is compiled for one serves all."""

    k: Tensor
    v: Tensor
    seen: Tensor

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the new frame (B·S, 1, G, D) among those of the past."""
        slot = (self.seen % self.k.shape[1])[None]
        return self.k.index_copy_(1, slot, k), self.v.index_copy_(1, slot, v)


Frames = FrameCache | FrameRing | OneFrame


class SpaceTimeBlock(nn.Module):
    def __init__(self, config: BlockConfig):
        super().__init__()
        self.space, self.time = Block(config.with_(chain=("self",))), Block(config)

    def forward(self, x: Tensor, plan: Plan, *, around: Rotation, **given) -> Tensor:
        """(B, T, S, W) → (B, T, S, W); `around` is where places stand, `plan` and what is given are those of time"""
        B, T, S, _ = x.shape
        x = self.space(x.flatten(0, 1), rotation=around).unflatten(0, (B, T))
        x = x.transpose(1, 2).flatten(0, 1)  # (B·S, T, W)
        return self.time(x, plan, **given).unflatten(0, (B, S)).transpose(1, 2)


class SpaceTime(nn.Module):
    """Tokens (B, T, X + h·w, W) → the same, each of its own frame and those before; `grid` is what it was made for."""

    def __init__(self, config: SpaceTimeConfig, grid: tuple[int, int], prefix: int = 0):
        super().__init__()
        self.config, self.prefix = config, prefix
        block = config.block
        self.positions = LearnedPositions(grid, block.width, prefix)
        channels = block.attention.channels(block.width)
        self.frames = Rotary(RotaryConfig(head_dim=channels, theta=config.theta))
        self.places = Rotary(RotaryConfig(head_dim=channels, theta=config.theta_space, layout="2d"))
        self.blocks = nn.ModuleList([SpaceTimeBlock(block) for _ in range(config.layers)])
        self.norm = make_norm(block.norm, block.width, block.eps)

    def forward(self, x: Tensor, grid: tuple[int, int], cache: Frames | None = None) -> Tensor:
        """Frames behind those of the cache, which keeps them when it is told to."""
        x = x + self.positions(*grid)
        if isinstance(cache, OneFrame):
            return self.norm(cache(x, grid))
        T, start = x.shape[1], 0 if cache is None else cache.seen
        if cache is not None:
            cache.begin(T)
        plan = _plan(T, 0 if cache is None else cache.held, self.config.memory, x.device)
        around, rotation = self.around(*grid), self.frames(start + torch.arange(T, device=x.device)[None])
        for i, block in enumerate(self.blocks):
            x = block(x, plan, around=around, rotation=rotation, cache=None if cache is None else cache.layer(i))
        return self.norm(x)

    def around(self, h: int, w: int) -> Rotation:
        """Where the places of a frame stand, (1, X + h·w, ·): those on no grid are not turned, as its first place."""
        places = grid_positions(1, h, w, device=self.places.frequency.device)
        return self.places(F.pad(places, (0, 0, self.prefix, 0))[None])

    def cache(self) -> FrameCache:
        return FrameCache(self.config.layers, self.config.memory)

    def one_frame(self, cache: FrameCache) -> OneFrame | None:
        """What goes on from a cache in few operations, one frame at a time, where these blocks can."""
        if not cache.held or unfit(self.config.block, self.positions.table.device):
            return None
        return OneFrame(self.blocks, self.around, self.frames, cache.memory, cache.past, cache.seen)

    def work(
        self, frames: int, batch: int = 1, grid: tuple[int, int] | None = None, past: int | None = None
    ) -> "FramesWork":
        """So many frames behind so many of a cache, which keeps them; without one unless `past` is given."""
        h, w = grid or self.positions.grid
        S, M = self.prefix + h * w, self.config.memory
        reached = sum(min((past or 0) + t + 1, M) for t in range(frames))
        return FramesWork(
            tokens=batch * frames * S,
            pairs=batch * frames * S * S,
            time_pairs=batch * S * reached,
            held=0 if past is None else batch * S * min(past + frames, M - 1),
            rows=batch,
        )


def _plan(new: int, past: int, memory: int, device: torch.device) -> Plan:
    """New frames behind past ones, of which each sees `memory`, itself among them."""
    if new == 1:
        return Plan()  # a cache holds no more than may be seen
    if past + new <= memory and not past:
        return Plan(causal=True)
    index = None if not past else torch.arange(past, past + new, device=device)[None]
    return Plan(causal=True, window=(memory - 1, -1), index=index)


# ---- costs ------------------------------------------------------------------------------------------------------


class FramesWork(Work, kw_only=True):
    """`pairs` are those within frames, `time_pairs` those of a place with itself in other frames, and its own."""

    time_pairs: int


def _in_time(work: Work) -> tuple[Work, Work]:
    """The work of the two halves of a block."""
    if not isinstance(work, FramesWork):
        raise ConfigError("an ST-transformer works in space and in time", "take the work that its `work` gives")
    return work.with_(held=0), work.with_(pairs=work.time_pairs)


@cost.flops.register
def _(module: SpaceTimeBlock, work: Work) -> int:
    space, time = _in_time(work)
    return cost.flops(module.space, space) + cost.flops(module.time, time)


@cost.bytes.register
def _(module: SpaceTimeBlock, work: Work) -> cost.Bytes:
    space, time = _in_time(work)
    return cost.bytes(module.space, space) + cost.bytes(module.time, time)


@cost.flops.register
def _(module: SpaceTime, work: Work) -> int:
    return cost.flops(module.blocks, work)


cost.bytes.register(SpaceTime, cost.sum_bytes)
