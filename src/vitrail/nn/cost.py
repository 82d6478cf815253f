"""What a block costs: one rule a kind, walked over the real module (the meta device will do, so size is free).

`flops` counts a multiply-add as two and leaves out what is not a matrix product (norms, activations, softmax), as
torch's own counter does. `bytes` is what the weights and the cache weigh, and what a pass must at least read.
A kind without a rule is refused: a missing rule must not look like a free layer.

B batch, N tokens, H heads, G key/value heads, D head width
"""

from functools import singledispatch
from typing import NamedTuple

import torch
from torch import nn

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn.attention import Attention
from vitrail.nn.block import Block, Residual
from vitrail.nn.mlp import Experts, Gated, Plain
from vitrail.nn.patches import PatchEmbed
from vitrail.nn.plan import Plan
from vitrail.nn.positions import LearnedPositions
from vitrail.nn.rotary import Rotary


class Work(Config):
    """One pass, as a block sees it.

    tokens         tokens that go through
    pairs          (query, key) pairs that see each other among the tokens and what is cached of them
    context        tokens of the context that cross-attention projects
    context_pairs  (query, key) pairs between tokens and context
    held           tokens whose keys and values are kept afterwards
    rows           sequences the tokens belong to: pictures, texts
    asked          tokens whose logits are asked for; all unless given
    """

    tokens: int
    pairs: int
    context: int = 0
    context_pairs: int = 0
    held: int = 0
    rows: int = 1
    asked: int | None = None

    @classmethod
    def full(cls, tokens: int, batch: int = 1) -> "Work":
        """Everything sees everything: a tower."""
        return cls(tokens=batch * tokens, pairs=batch * tokens * tokens, rows=batch)

    @classmethod
    def causal(cls, tokens: int, batch: int = 1) -> "Work":
        """Every token sees its past and is asked for its logits: a training pass, forward."""
        return cls(tokens=batch * tokens, pairs=batch * tokens * (tokens + 1) // 2, rows=batch)

    @classmethod
    def prefill(cls, tokens: int, batch: int = 1) -> "Work":
        """A causal pass over a prompt whose keys and values are kept, asked for the next token alone."""
        return cls.causal(tokens, batch).with_(held=batch * tokens, asked=batch)

    @classmethod
    def decode(cls, length: int, batch: int = 1) -> "Work":
        """One more token a row, the `length`-th: it sees all, itself included."""
        return cls(tokens=batch, pairs=batch * length, held=batch * length, rows=batch)

    @classmethod
    def planned(cls, plan: Plan, tokens: int, batch: int | None = None) -> "Work":
        """The pairs a plan really allows, counted, over the plan's own rows or `batch` copies of its one."""
        seen = plan.mask(tokens, tokens, torch.device("cpu"))
        batch = len(seen) if batch is None else batch
        if batch % len(seen):
            raise ConfigError(f"a plan of {len(seen)} rows does not fit a batch of {batch}")
        return cls(tokens=batch * tokens, pairs=int(seen.sum()) * (batch // len(seen)), rows=batch)

    def across(self, context: int, batch: int = 1) -> "Work":
        """The same with a context of so many tokens a row, which every token sees."""
        return self.with_(context=batch * context, context_pairs=self.tokens * context)


class Bytes(NamedTuple):
    """weights: all there are · read: those a pass must touch · cache: keys and values kept"""

    weights: int = 0
    read: int = 0
    cache: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":  # type: ignore[override]
        return Bytes(*(a + b for a, b in zip(self, other, strict=True)))


FREE = (nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Embedding, nn.Dropout, LearnedPositions, Rotary)
"""Kinds without a matrix product."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, Block, Residual, Plain, Gated)
"""Kinds that cost what their parts cost, each on the same work."""


def _no_rule(module: nn.Module) -> ConfigError:
    return ConfigError(
        f"no cost rule for {type(module).__name__}",
        "register one: @flops.register and @bytes.register in its room",
    )


# ---- operations -------------------------------------------------------------------------------------------------


@singledispatch
def flops(module: nn.Module, work: Work) -> int:
    """Floating-point operations of one forward pass."""
    if isinstance(module, FREE):
        return 0
    if isinstance(module, CONTAINERS):
        return sum(flops(part, work) for part in module.children())
    raise _no_rule(module)


@flops.register
def _(module: nn.Linear, work: Work) -> int:
    return 2 * module.in_features * module.out_features * work.tokens


@flops.register
def _(module: PatchEmbed, work: Work) -> int:
    return flops(module.proj, work)


@flops.register
def _(module: Attention, work: Work) -> int:
    core = 4 * module.config.heads * module.head_dim  # q·k and weights·v, a pair
    if module.source == "self":
        return flops(module.qkv, work) + core * work.pairs + flops(module.out, work)
    keys = work.context + (work.tokens if module.source == "joint" else 0)
    projected = flops(module.q, work) + flops(module.kv, work.with_(tokens=keys)) + flops(module.out, work)
    return projected + core * work.context_pairs


@flops.register
def _(module: Experts, work: Work) -> int:
    one = 2 * (module.gate_up[0].numel() + module.down[0].numel())  # a token through an expert
    always = sum(flops(part, work) for part in module.children())  # router, shared expert and its gate
    return always + one * module.config.active * work.tokens


# ---- bytes ------------------------------------------------------------------------------------------------------


@singledispatch
def bytes(module: nn.Module, work: Work) -> Bytes:
    """Bytes of weights and cache, in the types the module's parameters have."""
    if isinstance(module, (*FREE, nn.Linear, PatchEmbed)):
        return _own(module)
    if isinstance(module, CONTAINERS):
        return sum_bytes(module, work)
    raise _no_rule(module)


@bytes.register
def _(module: Attention, work: Work) -> Bytes:
    G, D = module.config.groups, module.head_dim
    kept = work.held if module.source == "self" else work.context
    return _own(module) + Bytes(cache=2 * G * D * kept * module.out.weight.element_size())


@bytes.register
def _(module: nn.Embedding, work: Work) -> Bytes:
    """A lookup touches a row a token."""
    table = _own(module).weights
    return Bytes(weights=table, read=table * min(work.tokens, module.num_embeddings) // module.num_embeddings)


@bytes.register
def _(module: Experts, work: Work) -> Bytes:
    every = sum((bytes(part, work) for part in module.children()), Bytes())
    stacked = _direct(module).weights
    E, A = module.config.count, module.config.active
    touched = E * (1 - (1 - A / E) ** work.tokens)  # distinct experts, on average, when the load is even
    return every + Bytes(weights=stacked, read=round(stacked * touched / E))


def sum_bytes(module: nn.Module, work: Work) -> Bytes:
    """The bytes of a module's parts and of the parameters that hang on it; a rule for whole models."""
    return sum((bytes(part, work) for part in module.children()), Bytes()) + _direct(module)


def _own(module: nn.Module) -> Bytes:
    """All of a module's parameters, each read once."""
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    return Bytes(weights=size, read=size)


def _direct(module: nn.Module) -> Bytes:
    """The parameters that hang on the module itself: gates, layer scales, stacked experts."""
    size = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
    return Bytes(weights=size, read=size)
