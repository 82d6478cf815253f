"""Gated cross-attention: blocks between the layers of a decoder that look at pictures (Flamingo, Idefics, Llama-3.2-V).

B batch, L tokens, C features of a row, P pictures of a row, W width
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.backbones.point import FusionPoint, Sight, check_layers, refuse_other, size
from vitrail.config import Config
from vitrail.errors import ConfigError, StreamError
from vitrail.nn import AttentionConfig, Block, BlockConfig, KVCache, MLPConfig, Plan, Work, cost
from vitrail.nn.cache import Context, Kept


class CrossConfig(Config, tag="cross", tag_field="kind"):
    """
    at             the layers where the blocks stand, counted from 0
    where          "before" these layers of the decoder (Flamingo, Idefics), or "inserted": these are the blocks' own
                   numbers among all layers, as Llama-3.2-V's 3, 8, …, 38 are; the decoder's `layers` are the text's
    context_width  of the features; the decoder's unless given
    attention      the decoder's heads, without biases, unless given
    mlp            the decoder's unless given
    gated          by tanh of a number that starts at zero, or of one a channel; ungated blocks start with an effect
    blind          what a token that sees no picture does: it goes through the "mlp" all the same (Flamingo, Idefics),
                   or "skip"s the block (Llama-3.2-V)
    """

    at: tuple[int, ...]
    where: Literal["before", "inserted"] = "before"
    context_width: int | None = None
    attention: AttentionConfig | None = None
    mlp: MLPConfig | None = None
    gated: bool | Literal["channels"] = True
    blind: Literal["mlp", "skip"] = "mlp"

    def check(self, layers: int, text: BlockConfig) -> None:
        check_layers("cross", self.at, layers + (len(self.at) if self.where == "inserted" else 0))
        attention = self.block(text).attention
        if attention.bias not in ("none", "qkv") or attention.inner_norm is not None:
            raise ConfigError(
                "a bias or a norm on the way out of cross-attention would reach tokens that see no picture",
                "use bias 'none' or 'qkv', and no inner_norm",
            )

    def points(self) -> list[int]:
        """The layer of the decoder that each block stands before; one past the last where it stands behind all."""
        inserted = self.where == "inserted"
        return [layer - before * inserted for before, layer in enumerate(sorted(self.at))]

    def block(self, text: BlockConfig) -> BlockConfig:
        return text.with_(
            chain=("cross", "mlp"),
            attention=self.attention or text.attention.with_(bias="none", inner_norm=None),
            mlp=text.mlp if self.mlp is None else self.mlp,
            norm_at="before",  # a norm after a closed gate would not leave the text as it is
            gated=self.gated,
            layer_scale=None,
            context_width=self.context_width,
        )


class Looked(NamedTuple):
    """Features (B, C, W′), all pictures of a row one behind the other, and which token sees which of them: all see all
    unless `plan` says (`picture_plan`). Passes that follow with the same cache see what the last token of each row saw;
    pictures given anew take the place of these."""

    features: Tensor
    plan: Plan | None = None


def picture_plan(
    marks: Tensor, features: int | Tensor, *, joined: bool = False, segments: Tensor | None = None
) -> Plan:
    """Each token sees the last picture that stands at it or before it (Flamingo, Idefics).

    marks     (B, L), True where a picture stands; the context of a row holds what its pictures have one behind the
              other, filled up to the C of the row that holds most
    features  how many each picture has: as many for all, or one number each in the order of the marks, row by row
    joined    what follows pictures that stand side by side sees all of them (Llama-3.2-V)
    segments  (B, L) the samples of a row that holds several, each one unbroken run: none sees another's pictures
    """
    if segments is None:
        segments = torch.zeros_like(marks, dtype=torch.long)
    begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    count = marks.long().cumsum(1)  # (B, L) pictures so far
    before = ((count - marks.long()) * begins).cummax(1).values  # those of the samples before
    first = marks & (begins | ~F.pad(marks, (1, 0))[:, :-1]) if joined else marks
    group = first.long().cumsum(1) * (count > before)  # (B, L), 0 before any picture of the sample
    each = torch.zeros_like(count)
    each[marks] = features
    ends = each.cumsum(1)  # (B, L) features so far
    slots = torch.arange(int(ends.max()), device=marks.device).repeat(len(marks), 1)  # (B, C)
    at = torch.searchsorted(ends, slots, right=True)  # (B, C) the token where each stands, L where there is none
    keys = F.pad(group, (0, 1), value=-1).gather(1, at)
    # Of pictures side by side, the first stands where the others are still to come.
    return Plan(causal=joined, segments=group, key_segments=keys, index=ends - 1 if joined else None)


class Cross(FusionPoint):
    def __init__(self, config: CrossConfig, text: BlockConfig):
        super().__init__()
        self.config, self.points = config, config.points()
        self.blocks = nn.ModuleList([Block(config.block(text)) for _ in self.points])

    def start(self, x: Tensor, pictures: Looked | None, cache: KVCache | None) -> Sight:
        B, L = x.shape[:2]
        contexts: Sequence[Tensor | Kept]
        if pictures is not None:
            features, plan = _checked(pictures, B)
            C, contexts = features.shape[1], [features] * len(self.blocks)
            if cache is not None:
                blocks: Any = self.blocks
                kept = [block.branches["cross"].op.keys(features) for block in blocks]
                cache.context = Context([Kept(k.detach(), v.detach()) for k, v in kept], _onwards(plan, cache))
                contexts = kept
        elif cache is not None and cache.context is not None:
            contexts, plan = cache.context.kept, _repeated(cache.context.plan, L)
            C = cache.context.kept[0].k.shape[1]
        else:
            return Sight()
        sees = None
        if self.config.blind == "skip" and not plan.simple:
            sees = plan.fitted(B, L, C).mask(L, C, x.device)[:, 0].any(-1, keepdim=True)
        return _Crossed(list(zip(self.points, self.blocks, contexts, strict=True)), plan, sees)


@dataclass
class _Crossed(Sight):
    blocks: list[tuple[int, nn.Module, Tensor | Kept]]  # at which point, and what it looks at
    plan: Plan
    sees: Tensor | None  # (B, L, 1) the tokens that do not skip the blocks; all if there is none

    def at(self, point: int, x: Tensor) -> Tensor:
        for place, block, context in self.blocks:
            if place == point:
                y = block(x, context=context, context_plan=self.plan)
                x = y if self.sees is None else torch.where(self.sees, y, x)
        return x


def _checked(pictures: Looked, rows: int) -> tuple[Tensor, Plan]:
    refuse_other(pictures, Looked)
    features, plan = pictures.features, Plan() if pictures.plan is None else pictures.plan
    if features.ndim != 3 or len(features) != rows or not features.shape[1]:
        raise StreamError(
            f"features {tuple(features.shape)} are not those of {rows} rows",
            "give (rows, at least one, width), or no pictures at all",
        )
    if plan.spans is not None or ((plan.causal or plan.window is not None) and plan.index is None):
        raise ConfigError(
            "a plan counts on an order of words and pictures, which they do not have",
            "make it with `picture_plan`, or say by `index` how many features each token may see",
        )
    return features, plan


def _onwards(plan: Plan, cache: KVCache) -> Plan:
    """What one more token a row sees: what the last of the row saw."""
    last = (cache.lengths - cache.slots[:, 0] - 1).clamp(min=0)[:, None]  # (B, 1)

    def of_last(ids: Tensor | None) -> Tensor | None:
        return None if ids is None else ids.expand(len(last), -1).gather(1, last)

    keys = None if plan.key_segments is None else plan.key_segments.expand(len(last), -1)
    segments, index = of_last(plan.segments), of_last(plan.index)
    return replace(plan, segments=segments, key_segments=keys, index=index, lengths=None, key_lengths=None)


def _repeated(plan: Plan, tokens: int) -> Plan:
    """A plan of one token a row as one of several that see the same."""
    if tokens == 1:
        return plan
    segments, index = (None if ids is None else ids.expand(-1, tokens) for ids in (plan.segments, plan.index))
    return replace(plan, segments=segments, index=index)


# ---- what it costs ----------------------------------------------------------------------------------------------
# Work without `context_pairs` is a pass without pictures. One step more of a text about pictures looks at them without
# projecting them again: Work.decode(length).across(features).with_(context=0).


@cost.flops.register
def _(module: Cross, work: Work) -> int:
    return cost.flops(module.blocks, work) if work.context_pairs else 0


@cost.bytes.register
def _(module: Cross, work: Work) -> cost.Bytes:
    if not work.context_pairs:
        return cost.Bytes(weights=size(module))
    kept = (work.context or work.context_pairs * work.rows // work.tokens) if work.held else 0
    blocks: Any = module.blocks
    unread = 0 if work.context else sum(size(block.branches["cross"].op.kv) for block in blocks)
    return cost.bytes(module.blocks, work.with_(context=kept)) + cost.Bytes(read=-unread)
