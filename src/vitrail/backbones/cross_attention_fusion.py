"""Gated cross-attention fusion: blocks between decoder layers that attend to image features (Flamingo, Idefics,
Llama-3.2-V).

Shapes: B batch, L tokens, C features of a row, P images of a row, W width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.backbones.fusion_point import (
    FusionPass,
    FusionPoint,
    check_fusion_layers,
    check_inputs_type,
)
from vitrail.config import Config
from vitrail.errors import ConfigError, StreamError
from vitrail.nn import AttentionConfig, AttentionPlan, Block, BlockConfig, KVCache, MLPConfig, Workload, cost
from vitrail.nn.kv_cache import CrossAttentionContext, KeyValues
from vitrail.nn.parameters import count_parameter_bytes


class CrossAttentionFusionConfig(Config, tag="cross", tag_field="kind"):
    """Config of `CrossAttentionFusion`.

    layer_indices  layers with a cross-attention block, counted from 0
    placement      "before" these decoder layers (Flamingo, Idefics), or "inserted": indices among all layers, blocks
                   included, such as Llama-3.2-V's 3, 8, …, 38
    context_width  width of the features; by default the decoder's
    attention      by default the decoder's, without biases
    mlp            by default the decoder's
    gated          gate by tanh of a scalar or of one value for each channel, starting at zero; ungated blocks have an
                   effect from the start
    without_image  tokens without an image pass through the "mlp" (Flamingo, Idefics) or "skip" the block (Llama-3.2-V)
    encoder        the features are those of an encoder, which every token attends to: the blocks have the biases and
                   the norm position of the decoder (BART)
    """

    layer_indices: tuple[int, ...]
    placement: Literal["before", "inserted"] = "before"
    context_width: int | None = None
    attention: AttentionConfig | None = None
    mlp: MLPConfig | None = None
    gated: bool | Literal["channels"] = True
    without_image: Literal["mlp", "skip"] = "mlp"
    encoder: bool = False

    def check_decoder(self, num_layers: int, text_block: BlockConfig) -> None:
        check_fusion_layers(
            "cross", self.layer_indices, num_layers + (len(self.layer_indices) if self.placement == "inserted" else 0)
        )
        attention = self.block_config(text_block).attention
        if not self.encoder and (attention.bias not in ("none", "qkv") or attention.inner_norm is not None):
            raise ConfigError(
                "cross-attention with an output bias or norm would change tokens that have no image",
                "set bias to 'none' or 'qkv', and remove inner_norm",
            )

    def insertion_points(self) -> list[int]:
        """Return the decoder layer that each block precedes; the number of layers for a block after the last layer."""
        inserted = self.placement == "inserted"
        return [layer - offset * inserted for offset, layer in enumerate(sorted(self.layer_indices))]

    def block_config(self, text_block: BlockConfig) -> BlockConfig:
        usual = text_block.attention.replace(output_gate=False, share_kv=False, v_norm=False)
        return text_block.replace(
            branches=("cross", "mlp"),
            attention=self.attention or (usual if self.encoder else usual.replace(bias="none", inner_norm=None)),
            mlp=text_block.mlp if self.mlp is None else self.mlp,
            # A norm after a closed gate would change the text.
            norm_position=text_block.norm_position if self.encoder else "before",
            gated=self.gated,
            layer_scale=None,
            output_scale=False,
            context_width=self.context_width,
        )


class CrossAttentionInputs(NamedTuple):
    """Features (B, C, W′), all images of a row in sequence, and the plan of which token attends to which feature.

    Without a plan, all tokens attend to all features (see `make_image_plan`). Later passes with the same cache attend
    to the features of the last token of each row, until new features are given.
    """

    features: Tensor
    plan: AttentionPlan | None = None


def make_image_plan(
    image_token_mask: Tensor, num_features: int | Tensor, *, join_adjacent: bool = False, segments: Tensor | None = None
) -> AttentionPlan:
    """Make the plan in which each token attends to the last image at or before it (Flamingo, Idefics).

    image_token_mask  (B, L), True at image tokens; the context of a row has the features of its images in sequence,
                      padded
                      to the longest row
    num_features      features of each image: one number for all, or one for each in the order of the mask, row by row
    join_adjacent     text after adjacent images attends to all of them (Llama-3.2-V)
    segments          (B, L) sample of each token in packed rows, contiguous; samples do not attend to each other's
                      images
    """
    if segments is None:
        segments = torch.zeros_like(image_token_mask, dtype=torch.long)
    sample_starts = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    count = image_token_mask.long().cumsum(1)  # (B, L) images so far
    earlier_images = ((count - image_token_mask.long()) * sample_starts).cummax(1).values  # images of earlier samples
    first = (
        image_token_mask & (sample_starts | ~F.pad(image_token_mask, (1, 0))[:, :-1])
        if join_adjacent
        else image_token_mask
    )
    group = first.long().cumsum(1) * (count > earlier_images)  # (B, L), 0 before the first image of the sample
    each = torch.zeros_like(count)
    each[image_token_mask] = num_features
    ends = each.cumsum(1)  # (B, L) features so far
    slots = torch.arange(int(ends.max()), device=image_token_mask.device).repeat(len(image_token_mask), 1)  # (B, C)
    at = torch.searchsorted(ends, slots, right=True)  # (B, C) image token of each feature, L if there is none
    keys = F.pad(group, (0, 1), value=-1).gather(1, at)
    # Among adjacent images, the causal index hides those that come later.
    return AttentionPlan(
        causal=join_adjacent, segments=group, key_segments=keys, query_slots=ends - 1 if join_adjacent else None
    )


class CrossAttentionFusion(FusionPoint):
    """Fusion point with cross-attention blocks."""

    def __init__(self, config: CrossAttentionFusionConfig, text_block: BlockConfig):
        super().__init__()
        self.config, self.insertion_points = config, config.insertion_points()
        self.blocks = nn.ModuleList([Block(config.block_config(text_block)) for _ in self.insertion_points])

    def start_pass(self, x: Tensor, inputs: CrossAttentionInputs | None, cache: KVCache | None) -> FusionPass:
        B, L = x.shape[:2]
        contexts: Sequence[Tensor | KeyValues]
        if inputs is not None:
            features, plan = _check_inputs(inputs, B)
            C, contexts = features.shape[1], [features] * len(self.blocks)
            if cache is not None:
                blocks: Any = self.blocks
                key_values = [block.branches["cross"].op.project_context(features) for block in blocks]
                cache.context = CrossAttentionContext(
                    [KeyValues(k.detach(), v.detach()) for k, v in key_values], _plan_for_next_token(plan, cache)
                )
                contexts = key_values
        elif cache is not None and cache.context is not None:
            contexts, plan = cache.context.key_values, _repeat_plan(cache.context.plan, L)
            C = cache.context.key_values[0].k.shape[1]
        else:
            return FusionPass()
        has_image = None
        if self.config.without_image == "skip" and not plan.is_maskless:
            has_image = plan.expand_rows(B, L, C).mask(L, C, x.device)[:, 0].any(-1, keepdim=True)
        return _CrossAttentionPass(
            list(zip(self.insertion_points, self.blocks, contexts, strict=True)), plan, has_image
        )


@dataclass
class _CrossAttentionPass(FusionPass):
    blocks: list[tuple[int, nn.Module, Tensor | KeyValues]]  # insertion point, block, context
    plan: AttentionPlan
    sees: Tensor | None  # (B, L, 1) tokens that do not skip the blocks; None: all

    def apply_at(self, point: int, x: Tensor) -> Tensor:
        for place, block, context in self.blocks:
            if place == point:
                y = block(x, context=context, context_plan=self.plan)
                x = y if self.sees is None else torch.where(self.sees, y, x)
        return x


def _check_inputs(inputs: CrossAttentionInputs, rows: int) -> tuple[Tensor, AttentionPlan]:
    check_inputs_type(inputs, CrossAttentionInputs)
    features, plan = inputs.features, AttentionPlan() if inputs.plan is None else inputs.plan
    if features.ndim != 3 or len(features) != rows or not features.shape[1]:
        raise StreamError(
            f"features have shape {tuple(features.shape)}, but there are {rows} rows",
            "give (rows, at least 1, width), or no images",
        )
    if plan.spans is not None or ((plan.causal or plan.window is not None) and plan.query_slots is None):
        raise ConfigError(
            "the plan is causal or has spans, but tokens and image features have no common order",
            "make it with `make_image_plan`, or give `query_slots`",
        )
    return features, plan


def _plan_for_next_token(plan: AttentionPlan, cache: KVCache) -> AttentionPlan:
    """Make the plan of one more token for each row, which attends to the features of the last token."""
    last = (cache.lengths - cache.slots[:, 0] - 1).clamp(min=0)[:, None]  # (B, 1)

    def of_last(ids: Tensor | None) -> Tensor | None:
        return None if ids is None else ids.expand(len(last), -1).gather(1, last)

    keys = None if plan.key_segments is None else plan.key_segments.expand(len(last), -1)
    segments, index = of_last(plan.segments), of_last(plan.query_slots)
    return replace(
        plan, segments=segments, key_segments=keys, query_slots=index, segment_lengths=None, key_segment_lengths=None
    )


def _repeat_plan(plan: AttentionPlan, tokens: int) -> AttentionPlan:
    """Repeat a plan of one token a row for several tokens."""
    if tokens == 1:
        return plan
    segments, index = (None if ids is None else ids.expand(-1, tokens) for ids in (plan.segments, plan.query_slots))
    return replace(plan, segments=segments, query_slots=index)


# ---- cost -------------------------------------------------------------------------------------------------------
# A workload without `context_pairs` is a pass without images. A decoding step attends to cached image features:
# Workload.decode(length).with_context(features).replace(context_tokens=0).


@cost.count_flops.register
def _(module: CrossAttentionFusion, work: Workload) -> int:
    return cost.count_flops(module.blocks, work) if work.context_pairs else 0


@cost.count_bytes.register
def _(module: CrossAttentionFusion, work: Workload) -> cost.MemoryBytes:
    if not work.context_pairs:
        return cost.MemoryBytes(weights=count_parameter_bytes(module))
    cached_features = (
        (work.context_tokens or work.context_pairs * work.sequences // work.tokens) if work.cached_tokens else 0
    )
    blocks: Any = module.blocks
    unread_bytes = (
        0 if work.context_tokens else sum(count_parameter_bytes(block.branches["cross"].op.kv) for block in blocks)
    )
    return cost.count_bytes(module.blocks, work.replace(context_tokens=cached_features)) + cost.MemoryBytes(
        read=-unread_bytes
    )
