"""Reduce the patch features of a trained model before its connector, without training: VisPruner, VisionZip, pooling
or random selection.

Shapes: B images, N patches, X prefix tokens, D tower width, n remaining tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.token_scaling.exact_match import SoftTokenFn
from vitrail.connectors.feature_reduction import (
    DEFAULT_CONTEXTUAL_TOKENS,
    AttentionScores,
    ReducedFeatures,
    apply_visionzip,
    apply_vispruner,
    compute_attention_scores,
    pool_to_cells,
)
from vitrail.encoders.layer_selection import resolve_depth
from vitrail.encoders.vit import ViT
from vitrail.errors import ConfigError
from vitrail.models.vlm import VLM
from vitrail.nn import Block
from vitrail.processing.batch_resize import get_fixed_view
from vitrail.processing.grid import Grid


class ReducedPatches(NamedTuple):
    """Tokens that remain after a reduction."""

    tokens: Tensor  # (B, n, D)
    patch_weights: Tensor  # (B, n, N) weights of the patches in each token; they sum to 1


ReductionFn = Callable[[Tensor, AttentionScores, Grid, int], ReducedPatches]
"""(features (B, N, D), attention scores, grid, n) → reduced patches"""


def compute_received_attention(block: Block, tokens: Tensor, num_prefix_tokens: int = 0) -> AttentionScores:
    """Compute the attention that each patch receives from all tokens (B, X + N, D) entering a tower's block.

    It replaces CLS attention in towers without a CLS token, as VisPruner does with SigLIP.
    """
    return compute_attention_scores(block, tokens, num_prefix_tokens, cls=False)


def _sample_indices(scores: AttentionScores, num_tokens: int) -> Tensor:
    """Return random sorted indices (B, n), the same in every call."""
    lot = torch.rand(scores.scores.shape, generator=torch.Generator().manual_seed(0))
    return lot.argsort(1)[:, :num_tokens].sort(1).values.to(scores.scores.device)


def _from_reduced(reduced: ReducedFeatures, features: Tensor) -> ReducedPatches:
    return ReducedPatches(reduced.tokens, F.one_hot(reduced.index, features.shape[1]).to(features.dtype))


def _gather_patches(features: Tensor, index: Tensor) -> ReducedPatches:
    return _from_reduced(
        ReducedFeatures(features.gather(1, index[..., None].expand(-1, -1, features.shape[-1])), index), features
    )


def _pool_patches(features: Tensor, grid: Grid, num_tokens: int) -> ReducedPatches:
    every = torch.eye(grid.num_patches, dtype=features.dtype, device=features.device)[None]
    return ReducedPatches(
        pool_to_cells(features, grid, num_tokens), pool_to_cells(every, grid, num_tokens).expand(len(features), -1, -1)
    )


REDUCTIONS: dict[str, ReductionFn] = {
    "VisPruner": lambda x, looks, _grid, keep: _from_reduced(apply_vispruner(x, looks.scores, keep), x),
    "VisionZip": lambda x, looks, _grid, keep: _from_reduced(
        apply_visionzip(x, looks.scores, keep, min(DEFAULT_CONTEXTUAL_TOKENS, keep // 2), looks.keys), x
    ),
    "pooling": lambda x, _looks, grid, keep: _pool_patches(x, grid, keep),
    "random": lambda x, looks, _grid, keep: _gather_patches(x, _sample_indices(looks, keep)),
}


def make_reduced_soft_token_fn(model: VLM, reduction: str, num_tokens: int) -> SoftTokenFn:
    """Return the soft-token function of a model that keeps only `num_tokens` patches before its connector."""
    tower, config = model.tower, model.config
    if reduction not in REDUCTIONS:
        raise ConfigError(f"no reduction is named {reduction!r}", f"known: {', '.join(REDUCTIONS)}")
    grid = get_fixed_view(model.config.policy).grid
    if not isinstance(tower, ViT) or tower.rotary is not None or config.keep_prefix_tokens or model.queries is not None:
        raise ConfigError(
            "token reduction needs a plain ViT tower", "use a model without rotary positions, prefix tokens or queries"
        )
    if num_tokens > grid.num_patches or config.connector.count_tokens(num_tokens) != num_tokens:
        raise ConfigError(
            f"cannot keep {num_tokens} of {grid.num_patches} patches with a {type(config.connector).__name__}",
            "keep at most all patches, and use a projector that maps tokens one by one",
        )
    depth, prefix = resolve_depth(config.vision_feature_layer, tower.config.layers), tower.config.num_prefix_tokens
    if depth < 1:
        raise ConfigError("there are no attention scores before the first tower block", "use a later vision layer")
    reduce = REDUCTIONS[reduction]

    def compute_soft_tokens(pixels: Tensor, question_ids: Tensor) -> Tensor:
        block = tower.blocks[depth - 1]
        assert isinstance(block, Block)
        scores = compute_received_attention(block, tower.forward_tokens(pixels, layer=depth - 1), prefix)
        return model.connector(reduce(model.forward_features(pixels), scores, grid, num_tokens).tokens, num_tokens)

    return compute_soft_tokens
