"""FLOPs and memory of modules. One rule per module class walks over the real module, also on the meta device.

`count_flops` counts a multiply-add as two and ignores everything but matrix products (no norms, activations, softmax),
as torch's counter does. `count_bytes` gives the size of the weights and the cache, and the weights a pass must read.
A module class without a rule raises an error.

B batch, N tokens, H heads, G key/value heads, D head width
"""

from functools import singledispatch
from typing import NamedTuple

import torch
from torch import nn

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn.attention import Attention
from vitrail.nn.attention_plans import AttentionPlan
from vitrail.nn.block import Block, ResidualBranch
from vitrail.nn.gated_delta_net import CHUNK_LENGTH, GatedDeltaNet
from vitrail.nn.latent_attention import LatentAttention, is_absorbed_cheaper
from vitrail.nn.mlp import GatedMLP, MoE, PlainMLP
from vitrail.nn.patch_embed import PatchEmbed
from vitrail.nn.position_embedding import LearnedPositionEmbedding
from vitrail.nn.rotary_embedding import RotaryEmbedding


class Workload(Config):
    """Size of one forward pass of a block.

    tokens           tokens of the pass
    attention_pairs  visible (query, key) pairs among the tokens and the cache
    span_pairs       those of attention_pairs whose key is later than the query, in the same bidirectional span
    context_tokens   context tokens that cross-attention projects
    context_pairs    visible (query, key) pairs between tokens and context
    cached_tokens    tokens whose keys and values are cached after the pass
    sequences        sequences of the batch: images, texts
    logit_tokens     tokens whose logits are computed; None for all
    """

    tokens: int
    attention_pairs: int
    span_pairs: int = 0
    context_tokens: int = 0
    context_pairs: int = 0
    cached_tokens: int = 0
    sequences: int = 1
    logit_tokens: int | None = None

    @classmethod
    def full_attention(cls, tokens: int, batch_size: int = 1) -> "Workload":
        """Full attention, as in a vision tower."""
        return cls(tokens=batch_size * tokens, attention_pairs=batch_size * tokens * tokens, sequences=batch_size)

    @classmethod
    def causal_attention(cls, tokens: int, batch_size: int = 1) -> "Workload":
        """Causal attention with logits of all tokens: the forward pass of training."""
        return cls(
            tokens=batch_size * tokens, attention_pairs=batch_size * tokens * (tokens + 1) // 2, sequences=batch_size
        )

    @classmethod
    def prefill(cls, tokens: int, batch_size: int = 1) -> "Workload":
        """Causal pass over a prompt that fills the cache and computes only the next token's logits."""
        return cls.causal_attention(tokens, batch_size).replace(
            cached_tokens=batch_size * tokens, logit_tokens=batch_size
        )

    @classmethod
    def decode(cls, length: int, batch_size: int = 1) -> "Workload":
        """Decode one token per row, the `length`-th, which attends to all tokens including itself."""
        return cls(
            tokens=batch_size,
            attention_pairs=batch_size * length,
            cached_tokens=batch_size * length,
            sequences=batch_size,
        )

    @classmethod
    def from_plan(cls, plan: AttentionPlan, tokens: int, batch_size: int | None = None) -> "Workload":
        """Count the pairs that an attention plan allows, over its rows or over `batch_size` copies of them."""
        mask = plan.mask(tokens, tokens, torch.device("cpu"))
        batch_size = len(mask) if batch_size is None else batch_size
        if batch_size % len(mask):
            raise ConfigError(f"an attention plan of {len(mask)} rows does not fit batch_size {batch_size}")
        return cls(
            tokens=batch_size * tokens,
            attention_pairs=int(mask.sum()) * (batch_size // len(mask)),
            sequences=batch_size,
        )

    def limit_to_window(self, window: int) -> "Workload":
        """Return the workload of a causal pass whose tokens attend to the last `window` tokens only."""
        n = self.tokens / self.sequences
        cached = (self.attention_pairs - self.span_pairs) / self.tokens - (
            n + 1
        ) / 2  # tokens before the pass, of each sequence
        full = min(max(window - cached, 0), n)  # tokens that are closer to the start than the window
        pairs = full * cached + full * (full + 1) / 2 + (n - full) * window
        return self.replace(attention_pairs=min(self.attention_pairs, round(self.sequences * pairs) + self.span_pairs))

    def with_context(self, context_tokens: int, batch_size: int = 1) -> "Workload":
        """Return the workload with a context of so many tokens per row, visible to every token."""
        return self.replace(context_tokens=batch_size * context_tokens, context_pairs=self.tokens * context_tokens)


class MemoryBytes(NamedTuple):
    """Bytes of a module: all weights, the weights that a pass reads, and cached keys and values."""

    weights: int = 0
    read: int = 0
    cache: int = 0

    def __add__(self, other: "MemoryBytes") -> "MemoryBytes":  # type: ignore[override]
        return MemoryBytes(*(a + b for a, b in zip(self, other, strict=True)))


ZERO_FLOP_MODULES = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Identity,
    nn.Embedding,
    nn.Dropout,
    LearnedPositionEmbedding,
    RotaryEmbedding,
)
"""Modules without a matrix product."""

CONTAINER_MODULES = (nn.ModuleList, nn.ModuleDict, nn.Sequential, Block, ResidualBranch, PlainMLP, GatedMLP)
"""Modules whose cost is the sum of their children's costs, for the same workload."""


def _no_rule(module: nn.Module) -> ConfigError:
    return ConfigError(
        f"no cost rule for {type(module).__name__}",
        "register one with @cost.count_flops.register and @cost.count_bytes.register in its module",
    )


# ---- FLOPs ------------------------------------------------------------------------------------------------------


@singledispatch
def count_flops(module: nn.Module, workload: Workload) -> int:
    """Count the floating-point operations of one forward pass."""
    if isinstance(module, ZERO_FLOP_MODULES):
        return 0
    if isinstance(module, CONTAINER_MODULES):
        return sum_child_flops(module, workload)
    raise _no_rule(module)


@count_flops.register
def _(module: nn.Linear, work: Workload) -> int:
    return 2 * module.in_features * module.out_features * work.tokens


@count_flops.register
def _(module: Attention, work: Workload) -> int:
    core = 4 * module.config.heads * module.head_dim  # q·k and weights·v, per pair
    if module.source == "self":
        return count_flops(module.qkv, work) + core * work.attention_pairs + count_flops(module.out, work)
    keys = work.context_tokens + (work.tokens if module.source == "joint" else 0)
    projected = (
        count_flops(module.q, work) + count_flops(module.kv, work.replace(tokens=keys)) + count_flops(module.out, work)
    )
    return projected + core * work.context_pairs


@count_flops.register
def _(module: LatentAttention, work: Workload) -> int:
    """Count the form that the module uses for these numbers of queries and keys."""
    latent, H = module.latent, module.config.heads
    R, N, P, V = latent.kv_lora_rank, latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim
    layers = (module.q_down, module.q, module.kv_down, module.out)
    projected = sum(count_flops(layer, work) for layer in layers if layer is not None)
    keys = max(work.tokens, work.cached_tokens)
    if is_absorbed_cheaper(latent, work.tokens // work.sequences, keys // work.sequences):
        return projected + 2 * H * (R * (N + V) * work.tokens + (2 * R + P) * work.attention_pairs)
    return projected + 2 * H * (R * (N + V) * keys + (N + P + V) * work.attention_pairs)


@count_flops.register
def _(module: GatedDeltaNet, work: Workload) -> int:
    """Count the projections and the matrix products of the chunks."""
    K, V, length = module.config.key_dim, module.config.value_dim, -(-work.tokens // work.sequences)
    T = min(CHUNK_LENGTH, length)
    padded = work.sequences * -(-length // T) * T  # tokens
    layers = (module.qkv, module.gate, module.rate, module.decay, module.out)
    return sum(count_flops(layer, work) for layer in layers) + module.config.value_heads * padded * (
        6 * K * V + 2 * T * (2 * K + V)
    )


@count_flops.register
def _(module: MoE, work: Workload) -> int:
    one = 2 * (module.gate_up[0].numel() + module.down[0].numel())  # one token through one expert
    always = sum_child_flops(module, work)  # router, shared expert and its gate
    return always + one * module.config.experts_per_token * work.tokens


def sum_child_flops(module: nn.Module, workload: Workload) -> int:
    """Sum the FLOPs of a module's children. A rule for modules that run them in sequence."""
    return sum(count_flops(part, workload) for part in module.children())


count_flops.register(PatchEmbed, sum_child_flops)


# ---- bytes ------------------------------------------------------------------------------------------------------


@singledispatch
def count_bytes(module: nn.Module, workload: Workload) -> MemoryBytes:
    """Count the bytes of weights and cache, in the dtypes of the module's parameters."""
    if isinstance(module, (*ZERO_FLOP_MODULES, nn.Linear, PatchEmbed)):
        return _own(module)
    if isinstance(module, CONTAINER_MODULES):
        return sum_child_bytes(module, workload)
    raise _no_rule(module)


@count_bytes.register
def _(module: Attention, work: Workload) -> MemoryBytes:
    G, D = module.config.num_kv_heads, module.head_dim
    cached = work.cached_tokens if module.source == "self" else work.context_tokens
    return _own(module) + MemoryBytes(cache=2 * G * D * cached * module.out.weight.element_size())


@count_bytes.register
def _(module: LatentAttention, work: Workload) -> MemoryBytes:
    _, *widths = module.config.cache_shape(module.width)
    return _own(module) + MemoryBytes(cache=sum(widths) * work.cached_tokens * module.out.weight.element_size())


@count_bytes.register
def _(module: GatedDeltaNet, work: Workload) -> MemoryBytes:
    """Count the state of each sequence as cache. Its size does not depend on the length."""
    config, channels = module.config, module.config.num_channels
    inputs = (config.kernel_size - 1) * channels * module.out.weight.element_size()
    state = inputs + 4 * config.value_heads * config.key_dim * config.value_dim
    return _own(module) + MemoryBytes(cache=work.sequences * state if work.cached_tokens else 0)


@count_bytes.register
def _(module: nn.Embedding, work: Workload) -> MemoryBytes:
    """A lookup reads one row per token."""
    table = _own(module).weights
    return MemoryBytes(weights=table, read=table * min(work.tokens, module.num_embeddings) // module.num_embeddings)


@count_bytes.register
def _(module: MoE, work: Workload) -> MemoryBytes:
    every = sum((count_bytes(part, work) for part in module.children()), MemoryBytes())
    stacked = module.gate_up.nbytes + module.down.nbytes
    scales = _direct(module).weights - stacked
    E, A = module.config.num_experts, module.config.experts_per_token
    used = E * (1 - (1 - A / E) ** work.tokens)  # expected number of distinct experts under an even load
    return every + MemoryBytes(weights=stacked + scales, read=round(stacked * used / E) + scales)


def sum_child_bytes(module: nn.Module, workload: Workload) -> MemoryBytes:
    """Sum the bytes of a module's children and of its direct parameters. A rule for whole models."""
    return sum((count_bytes(part, workload) for part in module.children()), MemoryBytes()) + _direct(module)


def sum_tensor_bytes(module: nn.Module, workload: Workload) -> MemoryBytes:
    """Sum the bytes of all parameters and buffers, each read once. A rule for models whose frozen parts are buffers."""
    size = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    return MemoryBytes(weights=size, read=size)


def _own(module: nn.Module) -> MemoryBytes:
    """Return the bytes of all parameters, each read once."""
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    return MemoryBytes(weights=size, read=size)


def _direct(module: nn.Module) -> MemoryBytes:
    """Return the bytes of the module's direct parameters: gates, layer scales, stacked experts."""
    size = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
    return MemoryBytes(weights=size, read=size)
