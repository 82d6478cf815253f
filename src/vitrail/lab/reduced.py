"""Fewer tokens of a trained model's tower, without training it again: pruned, zipped, pooled, or by lot, before its
connector.

B pictures, N patches, X prefix tokens, D width of the tower, H heads, C channels of a head, n tokens that are left
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.connectors.reduce import CONTEXTUAL, Looks, Reduced, looks, pooled, visionzip, vispruner
from vitrail.encoders.depth import depth_of
from vitrail.encoders.vit import ViT
from vitrail.errors import ConfigError
from vitrail.lab.exact import Look
from vitrail.models.rows import policy_of
from vitrail.models.vlm import VLM
from vitrail.nn import Block
from vitrail.processing.fit import only_view
from vitrail.processing.grid import Grid


class Kept(NamedTuple):
    """What is left of a picture."""

    tokens: Tensor  # (B, n, D)
    places: Tensor  # (B, n, N) where each stands among the patches: shares that add up to 1


Reduce = Callable[[Tensor, Looks, Grid, int], Kept]
"""features (B, N, D), how they are looked at, their grid, n → what is left"""


def received(block: Block, tokens: Tensor, prefix: int = 0) -> Looks:
    """How much all tokens (B, X + N, D) that enter a tower's block look at each patch: what stands for the looks of CLS
    where a tower has none (VisPruner's way with SigLIP)."""
    return looks(block, tokens, prefix, cls=False)


def _by_lot(looks: Looks, keep: int) -> Tensor:
    """(B, n) places in their order, the same lot in every call."""
    lot = torch.rand(looks.scores.shape, generator=torch.Generator().manual_seed(0))
    return lot.argsort(1)[:, :keep].sort(1).values.to(looks.scores.device)


def _chosen(found: Reduced, features: Tensor) -> Kept:
    return Kept(found.tokens, F.one_hot(found.index, features.shape[1]).to(features.dtype))


def _taken(features: Tensor, index: Tensor) -> Kept:
    return _chosen(Reduced(features.gather(1, index[..., None].expand(-1, -1, features.shape[-1])), index), features)


def _cells(features: Tensor, grid: Grid, keep: int) -> Kept:
    every = torch.eye(grid.patches, dtype=features.dtype, device=features.device)[None]
    return Kept(pooled(features, grid, keep), pooled(every, grid, keep).expand(len(features), -1, -1))


REDUCTIONS: dict[str, Reduce] = {
    "VisPruner": lambda x, looks, grid, keep: _chosen(vispruner(x, looks.scores, keep), x),
    "VisionZip": lambda x, looks, grid, keep: _chosen(
        visionzip(x, looks.scores, keep, min(CONTEXTUAL, keep // 2), looks.keys), x
    ),
    "pooling": lambda x, looks, grid, keep: _cells(x, grid, keep),
    "random": lambda x, looks, grid, keep: _taken(x, _by_lot(looks, keep)),
}


def reduced_look(model: VLM, name: str, keep: int) -> Look:
    """How a model whose connector takes tokens one by one looks when only `keep` of its patches are left."""
    tower, config = model.tower, model.config
    if name not in REDUCTIONS:
        raise ConfigError(f"no reduction is called {name!r}", f"known: {', '.join(REDUCTIONS)}")
    grid = only_view(policy_of(model), 1, 1).grid
    if not isinstance(tower, ViT) or tower.rotary is not None or config.prefix or model.queries is not None:
        raise ConfigError(
            "tokens are left out of what a plain ViT gives", "use one without rotary positions, prefix read or queries"
        )
    if keep > grid.patches or config.connector.tokens(keep) != keep:
        raise ConfigError(
            f"{keep} of {grid.patches} patches for a {type(config.connector).__name__}",
            "keep no more than there are, with a projector",
        )
    depth, prefix = depth_of(config.layer, tower.config.layers), tower.config.prefix
    if depth < 1:
        raise ConfigError("nothing looks at anything before a tower's first block", "read a later layer")
    reduce = REDUCTIONS[name]

    def look(pixels: Tensor, asked: Tensor) -> Tensor:
        looks = received(tower.blocks[depth - 1], tower.tokens(pixels, layer=depth - 1), prefix)  # pyrefly: ignore
        return model.connector(reduce(model.features(pixels), looks, grid, keep).tokens, keep)

    return look
