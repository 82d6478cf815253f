"""The ST-transformer on a CPU, for one frame after the other: the numbers of `SpaceTime`, in few operations.

A frame of a small world is 64 tokens, of which the products take less time than all the small operations around them.
So queries and keys are normed and turned together, and looking back in time is two batched products on buffers that
stay where they are, in float32: for one query and a few keys, a CPU is slower in half precision.
No gradient comes back.

B rows, S places of a frame, N = B·S, W width, H heads, G key/value heads, D head width, M frames of memory
"""

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.nn.block import BlockConfig, Residual
from vitrail.nn.cache import Kept
from vitrail.nn.rotary import Rotary, Rotation


def unfit(config: BlockConfig, device: torch.device) -> str | None:
    """Why blocks must go the usual way."""
    attention = config.attention
    if device.type != "cpu":
        return f"blocks on {device}"
    if config.norm_at != "before" or config.layer_scale is not None or config.gated:
        return "branches that are weighed, or normed after"
    if attention.qk_norm != "rms" or attention.qk_norm_over != "head" or attention.inner_norm is not None:
        return "attention with other norms than one of queries and keys, head by head"
    return None


class Branch:
    """A branch of a block on tokens (N, W) float32: its products are in the type of its weights."""

    def __init__(self, branch: nn.Module):
        assert isinstance(branch, Residual)
        self.op: Any = branch.op
        self.norm = copy.deepcopy(branch.norm).float()
        self.dtype = next(branch.op.parameters()).dtype

    def normed(self, x: Tensor) -> Tensor:
        return self.norm(x).to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.op(self.normed(x))


class Looking(Branch):
    """One of attention. `gain` (H + G, D) is that of its norms of queries and keys."""

    def __init__(self, branch: nn.Module):
        super().__init__(branch)
        config = self.op.config
        self.H, self.G, self.D, self.eps = config.heads, config.groups, self.op.head_dim, config.eps
        q, k = self.op.q_norm.weight.float(), self.op.k_norm.weight.float()
        self.gain = torch.cat([q.expand(self.H, -1), k.expand(self.G, -1)])

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(N, W) → queries and keys (N, H + G, D), values (N, G, D)"""
        made = self.op._qkv(self.normed(x)).float().view(len(x), -1, self.D)
        qk, v = made.split([self.H + self.G, self.G], 1)
        return F.rms_norm(qk, (self.D,), None, self.eps).mul_(self.gain), v

    def join(self, x: Tensor, seen: Tensor) -> Tensor:
        """(N, W) and what was seen, (N, H, D) or of that order → (N, W)"""
        return x + self.op.out(seen.reshape(len(x), -1).to(self.dtype))


class Turn(NamedTuple):
    """A rotation of all channels of a head, cos and sin (·, 1, D), in two operations."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def of(rotation: Rotation) -> "Turn":
        """cos and sin (1, L, D / 2) of channels i with i + D/2 → (L, 1, D)"""
        cos, sin = (part[0, :, None] for part in (rotation.cos, rotation.sin))
        return Turn(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


class OneFrame:
    """Blocks, and the keys and values of the frames before, of which frame t is in slot t mod M: a `FrameRing` that
    need not be full, and takes frames through the blocks itself."""

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        around: Callable[[int, int], Rotation],
        frames: Rotary,
        memory: int,
        past: list[Kept | None],
        seen: int,
    ):
        """`around` says where the places of a grid stand, `frames` where a frame does."""
        self.around = functools.cache(lambda h, w: Turn.of(around(h, w)))  # the same in every pass
        self.frames, self.memory, self.seen = frames, memory, seen
        self.layers = [
            (
                Looking(block.get_submodule("space.branches.self")),
                Looking(block.get_submodule("time.branches.self")),
                Branch(block.get_submodule("time.branches.mlp")),
            )
            for block in blocks
        ]
        self.past = [self._buffers(kept) for kept in past]

    def _buffers(self, kept: Kept | None) -> Kept:
        """(N, G, M, D) float32"""
        assert kept is not None
        N, T, G, D = kept.k.shape
        slots = torch.arange(self.seen - T, self.seen) % self.memory
        k, v = (torch.zeros(N, G, self.memory, D).index_copy_(2, slots, x.transpose(1, 2).float()) for x in kept)
        return Kept(k, v)

    @property
    def held(self) -> int:
        return min(self.seen, self.memory - 1)

    def keep(self) -> None:
        """The frame of the last pass happened."""
        self.seen += 1

    def __call__(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """(B, 1, S, W) → (B, 1, S, W), of the frame behind those that were kept"""
        B, T, S, W = x.shape
        if T != 1:
            raise ConfigError(f"{T} frames at once", "give one")
        places, frame = self.around(*grid), Turn.of(self.frames(torch.tensor([[self.seen]])))
        dtype, x = x.dtype, x.reshape(B * S, W).float()
        for (space, time, mlp), past in zip(self.layers, self.past, strict=True):
            x = self._around(space, x, B, places)
            x = self._back(time, x, past, frame)
            x = mlp(x)
        return x.view(B, 1, S, W).to(dtype)

    def _around(self, look: Looking, x: Tensor, rows: int, places: Turn) -> Tensor:
        qk, v = (made.unflatten(0, (rows, -1)) for made in look.project(x))  # (B, S, H + G or G, D)
        q, k = places(qk).split([look.H, look.G], 2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, enable_gqa=look.G != look.H)
        return look.join(x, seen.transpose(1, 2))

    def _back(self, look: Looking, x: Tensor, past: Kept, frame: Turn) -> Tensor:
        qk, v = look.project(x)
        q, k = frame(qk).split([look.H, look.G], 1)
        slot, held = self.seen % self.memory, min(self.seen + 1, self.memory)
        past.k[:, :, slot], past.v[:, :, slot] = k, v
        q = q.unflatten(1, (look.G, -1))  # (N, G, H / G, D)
        weights = (q @ past.k[:, :, :held].transpose(2, 3)).mul_(look.D**-0.5).softmax(-1)  # (N, G, H / G, M)
        return look.join(x, weights @ past.v[:, :, :held])
