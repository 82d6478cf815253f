"""CPU inference of the space-time transformer, one frame at a time.

The results equal those of `SpaceTimeTransformer`. A frame of a small world has 64 tokens, so small operations take more
time than the matrix products. This version normalizes and rotates queries and keys together. Attention in time is two
batched products on preallocated float32 buffers; with one query and few keys, half precision is slower on a CPU.
Inference only: there are no gradients.

B rows, S tokens of a frame, N = B·S, W width, H heads, G key/value heads, D head width, M context frames
"""

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.nn.block import BlockConfig, ResidualBranch
from vitrail.nn.kv_cache import KeyValues
from vitrail.nn.rotary_embedding import RotaryEmbedding, Rotation


def explain_unsupported(config: BlockConfig, device: torch.device) -> str | None:
    """Return why these blocks cannot use `SingleFrameRunner`; None if they can."""
    attention = config.attention
    if device.type != "cpu":
        return f"blocks on {device}"
    if config.norm_position != "before" or config.layer_scale is not None or config.gated:
        return "blocks with layer scales, gates or post-norm"
    if attention.qk_norm != "rms" or attention.qk_norm_over != "head" or attention.inner_norm is not None:
        return "attention without RMS norms of queries and keys per head"
    return None


class BranchRunner:
    """Residual branch on float32 tokens (N, W). Its matrix products have the dtype of its weights."""

    def __init__(self, branch: nn.Module):
        assert isinstance(branch, ResidualBranch)
        self.op: Any = branch.op
        self.norm = copy.deepcopy(branch.norm).float()
        self.dtype = next(branch.op.parameters()).dtype

    def normalize(self, x: Tensor) -> Tensor:
        return self.norm(x).to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.op(self.normalize(x))


class AttentionRunner(BranchRunner):
    """Attention branch. `qk_norm_weight` (H + G, D) holds the norm weights of queries and keys."""

    def __init__(self, branch: nn.Module):
        super().__init__(branch)
        config = self.op.config
        self.heads, self.kv_heads = config.heads, config.num_kv_heads
        self.head_dim, self.eps = self.op.head_dim, config.eps
        q, k = self.op.q_norm.weight.float(), self.op.k_norm.weight.float()
        self.qk_norm_weight = torch.cat([q.expand(self.heads, -1), k.expand(self.kv_heads, -1)])

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project (N, W) to normalized queries and keys (N, H + G, D) and values (N, G, D)."""
        qkv = self.op._qkv(self.normalize(x)).float().view(len(x), -1, self.head_dim)
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], 1)
        return F.rms_norm(qk, (self.head_dim,), None, self.eps).mul_(self.qk_norm_weight), v

    def add_output(self, x: Tensor, values: Tensor) -> Tensor:
        """Add the projected attention output (N, H, D), or a view of that order, to x (N, W)."""
        return x + self.op.out(values.reshape(len(x), -1).to(self.dtype))


class HeadRotation(NamedTuple):
    """Rotary embedding of all channels of a head in two operations; cos and sin are (·, 1, D)."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def from_rotation(rotation: Rotation) -> "HeadRotation":
        """Expand cos and sin (1, L, D / 2) with `half` pairing to (L, 1, D)."""
        cos, sin = (part[0, :, None] for part in (rotation.cos, rotation.sin))
        return HeadRotation(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


class SingleFrameRunner:
    """Run the blocks frame by frame, with keys and values of past frames in a ring buffer.

    Frame t is in slot t mod M. Unlike `FrameRingCache`, it need not be full, and it runs the blocks itself.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        space_rotation: Callable[[int, int], Rotation],
        time_rotary: RotaryEmbedding,
        context_frames: int,
        past_key_values: list[KeyValues | None],
        num_frames: int,
    ):
        """`space_rotation` gives the rotation of the tokens of a grid, `time_rotary` that of a frame."""
        # The same in every pass.
        self.space_rotation = functools.cache(lambda h, w: HeadRotation.from_rotation(space_rotation(h, w)))
        self.time_rotary, self.context_frames, self.num_frames = time_rotary, context_frames, num_frames
        self.layers = [
            (
                AttentionRunner(block.get_submodule("space.branches.self")),
                AttentionRunner(block.get_submodule("time.branches.self")),
                BranchRunner(block.get_submodule("time.branches.mlp")),
            )
            for block in blocks
        ]
        self.past_key_values = [self._buffers(key_values) for key_values in past_key_values]

    def _buffers(self, key_values: KeyValues | None) -> KeyValues:
        """Copy keys and values into ring buffers (N, G, M, D) in float32."""
        assert key_values is not None
        N, T, G, D = key_values.k.shape
        slots = torch.arange(self.num_frames - T, self.num_frames) % self.context_frames
        k, v = (
            torch.zeros(N, G, self.context_frames, D).index_copy_(2, slots, x.transpose(1, 2).float())
            for x in key_values
        )
        return KeyValues(k, v)

    @property
    def num_cached_frames(self) -> int:
        return min(self.num_frames, self.context_frames - 1)

    def commit(self) -> None:
        """Commit the frame of the last pass to the cache."""
        self.num_frames += 1

    def __call__(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Run the next frame, (B, 1, S, W) → (B, 1, S, W)."""
        B, T, S, W = x.shape
        if T != 1:
            raise ConfigError(f"{T} frames in one pass", "pass one frame at a time")
        places = self.space_rotation(*grid)
        frame = HeadRotation.from_rotation(self.time_rotary(torch.tensor([[self.num_frames]])))
        dtype, x = x.dtype, x.reshape(B * S, W).float()
        for (space, time, mlp), past in zip(self.layers, self.past_key_values, strict=True):
            x = self._attend_space(space, x, B, places)
            x = self._attend_time(time, x, past, frame)
            x = mlp(x)
        return x.view(B, 1, S, W).to(dtype)

    def _attend_space(self, runner: AttentionRunner, x: Tensor, rows: int, places: HeadRotation) -> Tensor:
        qk, v = (part.unflatten(0, (rows, -1)) for part in runner.project(x))  # (B, S, H + G or G, D)
        q, k = places(qk).split([runner.heads, runner.kv_heads], 2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=runner.kv_heads != runner.heads)
        return runner.add_output(x, attended.transpose(1, 2))

    def _attend_time(self, runner: AttentionRunner, x: Tensor, past: KeyValues, frame: HeadRotation) -> Tensor:
        qk, v = runner.project(x)
        q, k = frame(qk).split([runner.heads, runner.kv_heads], 1)
        slot, num_frames_held = self.num_frames % self.context_frames, min(self.num_frames + 1, self.context_frames)
        past.k[:, :, slot], past.v[:, :, slot] = k, v
        q = q.unflatten(1, (runner.kv_heads, -1))  # (N, G, H / G, D)
        # (N, G, H / G, M)
        weights = (q @ past.k[:, :, :num_frames_held].transpose(2, 3)).mul_(runner.head_dim**-0.5).softmax(-1)
        return runner.add_output(x, weights @ past.v[:, :, :num_frames_held])
