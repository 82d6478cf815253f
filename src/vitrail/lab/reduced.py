"""Fewer tokens of a trained model's tower, without training it again: pruned, zipped or pooled before its connector.

B pictures, N patches, X prefix tokens, D width of the tower, H heads, C channels of a head, n tokens that are left
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vitrail.connectors.reduce import Looks, visionzip, vispruner
from vitrail.encoders.depth import depth_of
from vitrail.encoders.vit import ViT
from vitrail.errors import ConfigError
from vitrail.lab.exact import Look
from vitrail.models.rows import policy_of
from vitrail.models.vlm import VLM
from vitrail.nn import Block
from vitrail.processing.fit import only_view
from vitrail.processing.grid import Grid

Reduce = Callable[[Tensor, Looks, Grid, int], Tensor]
CONTEXTUAL = 10  # of VisionZip's tokens, as published; half of them where they are fewer than twice as many


def received(block: Block, tokens: Tensor, prefix: int = 0) -> Looks:
    """How much all tokens (B, X + N, D) that enter a tower's block look at each patch: what stands for the looks of CLS
    where a tower has none (VisionZip's way)."""
    config, residual = block.config.attention, block.branches["self"]
    op: Any = residual.op  # pyrefly: ignore
    if config.bias == "all_but_k" or config.qk_norm_over != "head":
        raise ConfigError("looks are read where queries and keys are one linear layer", "use another tower")
    H, G, C = config.heads, config.groups, config.channels(block.config.width)
    x: Any = residual.norm(tokens) if residual.norm_at == "before" else tokens  # pyrefly: ignore
    q, k, _ = op.qkv(x).unflatten(-1, (-1, C)).split([H, G, G], dim=-2)
    q, k = op.q_norm(q), op.k_norm(k)
    every = k.repeat_interleave(H // G, dim=2)
    seen = (q.transpose(1, 2).float() @ every.permute(0, 2, 3, 1).float() * C**-0.5).softmax(-1)  # (B, H, ·, X + N)
    return Looks(seen.mean((1, 2))[:, prefix:], k[:, prefix:].mean(2))


def pooled(features: Tensor, grid: Grid, keep: int) -> Tensor:
    """(B, N, D) → (B, n, D): means over equal cells, as square as n allows."""
    rows = max(side for side in range(1, keep + 1) if keep % side == 0 and side * side <= keep)
    columns = keep // rows
    if rows > grid.h or columns > grid.w:
        raise ConfigError(f"{rows} × {columns} cells of {grid.h} × {grid.w} patches", "ask for fewer tokens")
    lattice = features.mT.unflatten(2, (grid.h, grid.w))
    return F.adaptive_avg_pool2d(lattice, (rows, columns)).flatten(2).mT


REDUCTIONS: dict[str, Reduce] = {
    "VisPruner": lambda x, looks, grid, keep: vispruner(x, looks.scores, keep).tokens,
    "VisionZip": lambda x, looks, grid, keep: (
        visionzip(x, looks.scores, keep, min(CONTEXTUAL, keep // 2), looks.keys).tokens
    ),
    "pooling": lambda x, looks, grid, keep: pooled(x, grid, keep),
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
        return model.connector(reduce(model.features(pixels), looks, grid, keep), keep)

    return look
