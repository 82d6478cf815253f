"""Evaluate a unified model with fewer image tokens than it was trained with, without further training.

The remaining tokens keep their position embedding and rotary position. A merged token gets the mean of its patches'
positions. Text positions do not change. The token that marks the start of an image stays and is not counted.

Shapes: B images, N patches (h × w), D feature width, W decoder width, n remaining tokens, L text tokens, Q questions.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.token_scaling.exact_match import QuestionBatch, is_exact_match
from experiments.token_scaling.patch_reduction import REDUCTIONS, ReducedPatches, compute_received_attention
from vitrail.connectors.feature_reduction import AttentionScores
from vitrail.errors import ConfigError
from vitrail.models.unified_model import UnifiedModel
from vitrail.processing.grid import Grid
from vitrail.processing.tokenizer import Tokenizer
from vitrail.stream import RowLayout, RowPart


class PatchFeatures(NamedTuple):
    """Patch features of images, and the attention that each patch receives."""

    features: Tensor  # (B, N, D)
    attention_scores: AttentionScores  # attention received by each patch in the last block of the codec


@torch.no_grad()
def encode_patches(model: UnifiedModel, pixels: Tensor) -> PatchFeatures:
    """Encode uint8 images (B, 3, H, W) into patch features and attention scores."""
    tower = model.codec.tower
    if tower is None or tower.rotary is not None or tower.config.num_prefix_tokens:
        raise ConfigError(
            "attention scores are not available for the encoder of this codec",
            "use a ViT encoder without rotary positions, CLS token or registers, with inputs in −1…1",
        )
    x = model.codec.to_pixels(pixels)
    block, states = tower.blocks[-1], tower.forward_tokens(x, layer=len(tower.blocks) - 1)
    attention_scores = compute_received_attention(block, states)  # pyrefly: ignore
    return PatchFeatures(model.encode_images(x)[0].flatten(1, 2), attention_scores)


def reduce_patches(
    model: UnifiedModel, patch_features: PatchFeatures, reduction: str, num_tokens: int
) -> ReducedPatches:
    """Apply a token reduction to patch features."""
    grid = Grid(h=model.grid[0], w=model.grid[1])
    if reduction not in REDUCTIONS:
        raise ConfigError(f"no reduction is named {reduction!r}", f"known: {', '.join(REDUCTIONS)}")
    if not 1 <= num_tokens <= grid.num_patches:
        raise ConfigError(f"cannot keep {num_tokens} of {grid.num_patches} patches", "keep between 1 and all of them")
    return REDUCTIONS[reduction](patch_features.features, patch_features.attention_scores, grid, num_tokens)


def build_reduced_layout(model: UnifiedModel, reduced: ReducedPatches, text: RowPart) -> RowLayout:
    """Build the sequence layout of reduced images followed by text, in the format of `UnifiedModel`."""
    h, w = model.grid
    B, n, N = reduced.patch_weights.shape
    full_layout = model.build_layout(
        model.make_input_image_piece(reduced.tokens.new_zeros(B, h, w, reduced.tokens.shape[-1])), text
    )
    image_positions = full_layout.positions[:, 1 : 1 + N].float()
    reduced_positions = reduced.patch_weights.float() @ (
        image_positions if image_positions.ndim == 3 else image_positions[..., None]
    )  # (B, n, 1 or 3)
    tokens = model.image_proj(reduced.tokens) + reduced.patch_weights @ model.position_embedding(h, w)  # (B, n, W)

    def replace_image_tokens(row: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([row[:, :1], tokens, row[:, 1 + N :]], 1)

    def repeat_image_value(row: Tensor | None) -> Tensor | None:  # all tokens of an image share one value
        return None if row is None else replace_image_tokens(row, row[:, 1 : 1 + n])

    spans, segments = repeat_image_value(full_layout.plan.spans), repeat_image_value(full_layout.plan.segments)
    plan = replace(
        full_layout.plan, spans=spans, key_spans=spans, segments=segments, key_segments=segments, prefix_length=1 + n
    )
    positions = replace_image_tokens(
        full_layout.positions.float(), reduced_positions.view(B, n, *image_positions.shape[2:])
    )
    return RowLayout(
        replace_image_tokens(full_layout.embeds, tokens), positions, plan, (1 + n, 1 + n + text.embeds.shape[1])
    )


@torch.no_grad()
def score_reductions(
    model: UnifiedModel, batch: QuestionBatch, tokenizer: Tokenizer, settings: Sequence[tuple[str, int]]
) -> list[Tensor]:
    """Return which questions (Q,) are answered correctly, for each setting (reduction, number of tokens)."""
    patch_features, L, found = encode_patches(model, batch.pixels), batch.token_ids.shape[1], []
    for method, keep in settings:
        layout = build_reduced_layout(
            model, reduce_patches(model, patch_features, method, keep), model.make_text_piece(batch.token_ids)
        )
        found.append(
            is_exact_match(model.decoder, model.forward_hidden(layout)[:, -L:], batch.labels, tokenizer.vocab_size)
        )
    return found
