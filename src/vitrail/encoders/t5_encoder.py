"""Text encoder of T5 and UMT5, which generation models read prompts with: relative position biases, RMS norms.

B batch, L tokens, D width, H heads, K head width
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.layer_selection import run_blocks
from vitrail.errors import ConfigError
from vitrail.nn import MLPConfig, Workload, cost, make_mlp
from vitrail.nn.norms import make_norm
from vitrail.registry import MODELS


class T5EncoderConfig(Config):
    """T5 encoder settings.

    num_buckets           buckets of relative positions: half for each direction
    max_distance          distance from which all positions share a bucket
    shared_position_bias  one table of biases for all layers (T5), or one for each layer (UMT5)
    context_length        length of prompts in the cost ledger; the encoder takes any length
    """

    vocab_size: int
    layers: int
    width: int
    heads: int
    head_dim: int
    mlp: MLPConfig
    eps: float = 1e-6
    num_buckets: int = 32
    max_distance: int = 128
    shared_position_bias: bool = True
    context_length: int = 512

    def __post_init__(self) -> None:
        if self.num_buckets < 4 or self.num_buckets % 2 or self.max_distance <= self.num_buckets // 4:
            raise ConfigError(
                f"{self.num_buckets} buckets do not cover distances up to {self.max_distance}",
                "use an even number of at least 4 buckets, and a max_distance above a quarter of it",
            )


class RelativePositionBias(nn.Module):
    """Learned bias of every head for the bucket of a relative position."""

    def __init__(self, num_buckets: int, max_distance: int, heads: int):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.table = nn.Embedding(num_buckets, heads)

    def forward(self, length: int) -> Tensor:
        """Return the biases of all pairs, (1, H, L, L)."""
        index = torch.arange(length, device=self.table.weight.device)
        return self.table(self.find_buckets(index[None] - index[:, None])).movedim(-1, 0)[None]

    def find_buckets(self, offset: Tensor) -> Tensor:
        """Return the bucket of key − query offsets: exact for near keys, logarithmic up to max_distance."""
        half, exact = self.num_buckets // 2, self.num_buckets // 4
        distance = offset.abs()
        ratio = torch.log(distance.float() / exact) / math.log(self.max_distance / exact)
        far_bucket = (exact + (ratio * (half - exact)).to(torch.long)).clamp(max=half - 1)
        return (offset > 0).long() * half + torch.where(distance < exact, distance, far_bucket)


class T5Block(nn.Module):
    """Pre-norm block: attention without scaling, then an MLP. No layer has a bias."""

    def __init__(self, config: T5EncoderConfig):
        super().__init__()
        inner = config.heads * config.head_dim
        self.head_dim = config.head_dim
        self.attention_norm = make_norm("rms", config.width, config.eps)
        self.qkv = nn.Linear(config.width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, config.width, bias=False)
        self.bias = (
            None
            if config.shared_position_bias
            else RelativePositionBias(config.num_buckets, config.max_distance, config.heads)
        )
        self.mlp_norm = make_norm("rms", config.width, config.eps)
        self.mlp = make_mlp(config.width, config.mlp)

    def forward(self, x: Tensor, position_bias: Tensor | None, mask: Tensor | None) -> Tensor:
        projected = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, self.head_dim))  # (B, L, 3, H, K)
        q, k, v = (y.transpose(1, 2) for y in projected.unbind(2))
        bias = self.bias(x.shape[1]) if self.bias is not None else position_bias  # (1, H, L, L)
        assert bias is not None
        if mask is not None:
            bias = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), scale=1.0)  # (B, H, L, K)
        x = _clamp_half(x + self.out(attended.movedim(1, 2).flatten(2)))
        return _clamp_half(x + self.mlp(self.mlp_norm(x)))


def _clamp_half(x: Tensor) -> Tensor:
    """Clamp float16 states to finite values: those of T5-XXL overflow."""
    return x.clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max) if x.dtype == torch.float16 else x


@MODELS.register("t5-encoder")
class T5Encoder(nn.Module):
    """T5 encoder: token ids (B, L) → hidden states (B, L, D)."""

    Config = T5EncoderConfig

    def __init__(self, config: T5EncoderConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.bias = (
            RelativePositionBias(config.num_buckets, config.max_distance, config.heads)
            if config.shared_position_bias
            else None
        )
        self.blocks = nn.ModuleList([T5Block(config) for _ in range(config.layers)])
        self.norm = make_norm("rms", config.width, config.eps)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, *, layer: int | None = None) -> Tensor:
        """Return hidden states (B, L, D) of `layer` (see `resolve_depth`), or of the last layer with the last norm.

        `attention_mask` (B, L) is 0 for padding, which no token attends to. Diffusion pipelines pass none.
        """
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None]  # (B, 1, 1, L)
        position_bias = None if self.bias is None else self.bias(ids.shape[1])
        x = run_blocks(self.blocks, self.embed(ids), layer, position_bias=position_bias, mask=mask)
        return self.norm(x) if layer is None else x

    def workload(self, batch_size: int = 1, length: int | None = None) -> Workload:
        """Return the workload of a batch of prompts. The default length is the context length."""
        return Workload.full_attention(length or self.config.context_length, batch_size)


# ---- costs ------------------------------------------------------------------------------------------------------


@cost.count_flops.register
def _(module: T5Block, work: Workload) -> int:
    scores = 4 * module.out.in_features * work.attention_pairs  # q·k and weights·v
    return scores + sum(cost.count_flops(part, work) for part in (module.qkv, module.out, module.mlp))


@cost.count_flops.register
def _(module: T5Encoder, work: Workload) -> int:
    return cost.count_flops(module.blocks, work)


@cost.count_flops.register
def _(module: RelativePositionBias, work: Workload) -> int:
    return 0


@cost.count_bytes.register(RelativePositionBias)
def _(module: RelativePositionBias, work: Workload) -> cost.MemoryBytes:
    table_bytes = cost.count_bytes(module.table, work).weights
    return cost.MemoryBytes(weights=table_bytes, read=table_bytes)


cost.count_bytes.register(T5Block, cost.sum_child_bytes)
cost.count_bytes.register(T5Encoder, cost.sum_child_bytes)
