"""Training-free reduction of visual tokens by the attention scores of the tower.

    VisPruner   half of the kept tokens have the highest CLS attention, the others are the least redundant
    VisionZip   the tokens with the highest CLS attention, and a few means of the others
    pool        means over equal cells of the grid

Towers without CLS use the mean attention of all patches, as VisPruner does for SigLIP.

Shapes: B batch, N features, X prefix tokens (CLS, registers), D width, n kept features, H heads, C channels of a head.
"""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config, PositiveInt
from vitrail.connectors.feature_layout import FeatureLayout
from vitrail.encoders.layer_selection import resolve_depth
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError, suggest_name
from vitrail.nn import Block, BlockConfig
from vitrail.processing.grid import Grid

PRUNE_BATCH = 8  # redundant features that VisPruner removes at a time
DEFAULT_CONTEXTUAL_TOKENS = 10  # VisionZip's published number of contextual tokens


class AttentionScores(NamedTuple):
    """Attention scores and keys of a tower's block."""

    scores: Tensor
    """attention (B, N) from CLS to each patch, mean over heads"""
    keys: Tensor
    """keys (B, N, C) of the patches, mean over heads, which VisionZip compares"""


class ReducedFeatures(NamedTuple):
    """Reduced features and their positions."""

    tokens: Tensor
    """features (B, n, D)"""
    index: Tensor
    """positions (B, n) of the features, without duplicates"""


def compute_attention_scores(
    block: Block, tokens: Tensor, num_prefix_tokens: int = 1, cls: bool = True
) -> AttentionScores:
    """Compute the attention scores of the first token over the tokens (B, X + N, D) that enter a tower's block.

    Without CLS, the scores are means over all tokens. LLaVA uses features of the last block but one: `x =
    vit.forward_tokens(pixels, layer=-3)` are the inputs of this block and `vit.blocks[-2](x)` its outputs. Attention
    with rotary positions is not supported.
    """
    check_scores_readable(block.config)
    config, residual = block.config.attention, block.branches["self"]
    op: Any = residual.op  # pyrefly: ignore
    H, G, C = config.heads, config.num_kv_heads, config.resolve_head_dim(block.config.width)
    x: Any = residual.norm(tokens) if residual.norm_position == "before" else tokens  # pyrefly: ignore
    q, k, _ = op.qkv(x).unflatten(-1, (-1, C)).split([H, G, G], dim=-2)
    q, k = op.q_norm(q[:, :1] if cls else q), op.k_norm(k)
    all_keys = k.repeat_interleave(H // G, dim=2)
    scores = torch.einsum("bqhc,bkhc->bhqk", q.float(), all_keys.float()) * C**-0.5  # (B, H, 1 or X + N, X + N)
    return AttentionScores(scores.softmax(-1).mean((1, 2))[:, num_prefix_tokens:], k[:, num_prefix_tokens:].mean(2))


def check_scores_readable(block: BlockConfig) -> None:
    """Raise if the attention scores of a block cannot be computed."""
    if "self" not in block.branches:
        raise ConfigError(
            f"a block of {', '.join(block.branches)} has no self-attention", "use a block with a self branch"
        )
    config = block.attention
    if (
        config.latent is not None
        or config.bias == "all_but_k"
        or (config.qk_norm is not None and config.qk_norm_over == "heads")
    ):
        raise ConfigError("attention scores need one linear layer for queries and keys", "use a CLIP or DINOv2 tower")


def encode_with_scores(tower: ViT, pixels: Tensor, layer: int | None) -> tuple[Tensor, AttentionScores]:
    """Return `tower.forward_tokens(pixels, layer=layer)` (B, X + N, D), and the attention scores of its last block."""
    config, depth = tower.config, resolve_depth(layer, tower.config.layers)
    entering, block = tower.forward_tokens(pixels, layer=depth - 1), tower.blocks[depth - 1]
    with torch.no_grad():  # scores only select features
        scores = compute_attention_scores(block, entering, config.num_prefix_tokens, config.cls_token)  # pyrefly: ignore
    tokens = block(entering)
    return tower.norm_last(tokens) if layer is None and config.norm_last == "tokens" else tokens, scores


def apply_vispruner(features: Tensor, scores: Tensor, keep: int, important_fraction: float = 0.5) -> ReducedFeatures:
    """Reduce features (B, N, D) to `keep`: a fraction with the highest scores (B, N), and the least redundant of the
    rest.

    Every second feature of the rest is compared with the others, and the most similar ones are removed in small
    batches. The kept features stay in order.
    """
    _check_inputs(features, scores, keep)
    _check_important_fraction(important_fraction)
    N = features.shape[1]
    if keep >= N:
        return _keep_all_tokens(features)
    order = scores.argsort(dim=1, descending=True, stable=True)
    first = int(keep * important_fraction)
    best, rest = order[:, :first], order[:, first:]
    if first == keep:
        return _keep_tokens(features, best.sort(dim=1).values)
    unit = F.normalize(features.float(), dim=-1)
    while rest.shape[1] > keep - first:
        even, odd = rest[:, ::2], rest[:, 1::2]
        alike = (_gather_tokens(unit, even) @ _gather_tokens(unit, odd).mT).amax(-1)  # (B, half of the rest)
        out = min(PRUNE_BATCH, rest.shape[1] - (keep - first), even.shape[1])
        distinct = alike.argsort(dim=1, descending=True, stable=True)[:, out:]
        rest = torch.cat([even.gather(1, distinct), odd], dim=1)
    return _keep_tokens(features, torch.cat([best, rest], dim=1).sort(dim=1).values)


def apply_visionzip(
    features: Tensor,
    scores: Tensor,
    keep: int,
    contextual_tokens: int = DEFAULT_CONTEXTUAL_TOKENS,
    keys: Tensor | None = None,
) -> ReducedFeatures:
    """Reduce features (B, N, D) to `keep` tokens: the `keep − contextual_tokens` with the highest scores (B, N), then
    means.

    Contextual tokens are taken evenly from the rest; each adds the mean of the features most similar to it, by `keys`
    (B, N, C) or else by the features. They come last; both groups keep the order of positions.
    """
    _check_inputs(features, scores, keep)
    N = features.shape[1]
    if keep >= N:
        return _keep_all_tokens(features)
    _check_contextual(contextual_tokens, keep)
    order = scores.argsort(dim=1, descending=True, stable=True)
    dominant = order[:, : keep - contextual_tokens].sort(dim=1).values
    if not contextual_tokens:
        return _keep_tokens(features, dominant)
    rest = order[:, keep - contextual_tokens :].sort(dim=1).values  # (B, R)
    R = rest.shape[1]
    step = R // contextual_tokens
    centre = torch.zeros(R, dtype=torch.bool, device=rest.device)
    centre[: step * contextual_tokens : step] = True
    centres, others = rest[:, centre], rest[:, ~centre]
    unit = F.normalize((features if keys is None else keys).float(), dim=-1)
    nearest = (_gather_tokens(unit, others) @ _gather_tokens(unit, centres).mT).argmax(-1)  # (B, R − contextual)
    member = F.one_hot(nearest, contextual_tokens).float()  # float32 counts exactly
    mean = member.mT @ _gather_tokens(features, others).float() / member.sum(1).clamp_min(1)[..., None]
    merged = (_gather_tokens(features, centres) + mean).to(features.dtype)
    tokens = torch.cat([_gather_tokens(features, dominant), merged], dim=1)
    return ReducedFeatures(tokens, torch.cat([dominant, centres], dim=1))


def pool_to_cells(features: Tensor, grid: Grid, keep: int) -> Tensor:
    """Pool features (B, N, D) to (B, n, D): means over equal cells, as square as n allows."""
    lattice = features.mT.unflatten(2, (grid.h, grid.w))
    return F.adaptive_avg_pool2d(lattice, choose_cell_grid(grid, keep)).flatten(2).mT


def choose_cell_grid(grid: Grid, keep: int) -> tuple[int, int]:
    """Return the rows and columns of `keep` cells."""
    rows = max(side for side in range(1, keep + 1) if keep % side == 0 and side * side <= keep)
    columns = keep // rows
    if rows > grid.h or columns > grid.w:
        raise ConfigError(
            f"{keep} tokens are {rows} × {columns} cells, but a view has {grid.h} × {grid.w} patches",
            "keep fewer tokens, or a number with a divisor nearer to its square root",
        )
    return rows, columns


# ---- configs -----------------------------------------------------------------------------------------------------


class FeatureReductionConfig(Config):
    """Base class of reduction configs: a view's features become `keep`, or stay as they are if there are no more.

    uses_attention  whether the reduction needs the tower's attention scores
    """

    keep: PositiveInt
    uses_attention: ClassVar[bool] = True

    def reduce_layout(self, grid: Grid) -> FeatureLayout:
        """Return the layout of the features that remain of a grid."""
        return self.keep

    def reduce(self, features: Tensor, scores: AttentionScores | None, grid: Grid) -> Tensor:
        """Reduce features (B, N, D) to (B, n, D)."""
        raise NotImplementedError

    def count_flops(self, tower: ViTConfig, num_patches: int) -> int:
        """Count the FLOPs of selecting and merging the features of one view."""
        if not self.uses_attention:
            return 0
        D, attention, X = tower.block.width, tower.block.attention, tower.num_prefix_tokens + num_patches
        C = attention.resolve_head_dim(D)
        qkv_flops = 2 * X * D * (attention.heads + 2 * attention.num_kv_heads) * C
        return (
            qkv_flops
            + 2 * (1 if tower.cls_token else X) * X * attention.heads * C
            + self._count_selection_flops(num_patches, D, C)
        )

    def _count_selection_flops(self, patches: int, width: int, channels: int) -> int:
        """Count the FLOPs after the attention scores; `channels` is the width of the keys."""
        return 0


class VisPrunerConfig(FeatureReductionConfig, tag="vispruner", tag_field="kind"):
    """Config of VisPruner. `important_fraction` of the kept features is selected by attention score."""

    important_fraction: float = 0.5

    def __post_init__(self) -> None:
        _check_important_fraction(self.important_fraction)

    def reduce(self, features: Tensor, scores: AttentionScores | None, grid: Grid) -> Tensor:
        assert scores is not None
        return apply_vispruner(features, scores.scores, self.keep, self.important_fraction).tokens

    def _count_selection_flops(self, patches: int, width: int, channels: int) -> int:
        least = self.keep - int(self.keep * self.important_fraction)
        rest, total = patches - int(self.keep * self.important_fraction), 0
        while least and rest > least:
            even = (rest + 1) // 2
            total += 2 * even * (rest - even) * width
            rest -= min(PRUNE_BATCH, rest - least, even)
        return total


class VisionZipConfig(FeatureReductionConfig, tag="visionzip", tag_field="kind"):
    """Config of VisionZip. `contextual_tokens` are means: by default 10, or half of `keep` if that is less."""

    contextual_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_contextual(self.resolved_contextual_tokens, self.keep)

    @property
    def resolved_contextual_tokens(self) -> int:
        return (
            min(DEFAULT_CONTEXTUAL_TOKENS, self.keep // 2) if self.contextual_tokens is None else self.contextual_tokens
        )

    def reduce(self, features: Tensor, scores: AttentionScores | None, grid: Grid) -> Tensor:
        assert scores is not None
        return apply_visionzip(features, scores.scores, self.keep, self.resolved_contextual_tokens, scores.keys).tokens

    def _count_selection_flops(self, patches: int, width: int, channels: int) -> int:
        others = patches - self.keep
        return 2 * others * self.resolved_contextual_tokens * (channels + width)


class CellPoolingConfig(FeatureReductionConfig, tag="pool", tag_field="kind"):
    """Config of mean pooling over equal cells, as square as `keep` allows."""

    uses_attention: ClassVar[bool] = False

    def reduce_layout(self, grid: Grid) -> FeatureLayout:
        rows, columns = choose_cell_grid(grid, self.keep)
        return Grid(h=rows, w=columns)

    def reduce(self, features: Tensor, scores: AttentionScores | None, grid: Grid) -> Tensor:
        return pool_to_cells(features, grid, self.keep)


AnyReductionConfig = VisPrunerConfig | VisionZipConfig | CellPoolingConfig
REDUCTIONS: dict[str, type[FeatureReductionConfig]] = {
    "vispruner": VisPrunerConfig,
    "visionzip": VisionZipConfig,
    "pool": CellPoolingConfig,
}


def make_reduction_config(kind: str | None, keep: int | None) -> Any:
    """Make the config of a named reduction to `keep` features, otherwise with published values; without both, None."""
    if kind is None and keep is None:
        return None
    if kind is None or keep is None:
        raise ConfigError("--reduce and --keep go together", "give both: --reduce vispruner --keep 64")
    if kind not in REDUCTIONS:
        raise ConfigError(f"there is no reduction {kind!r}", suggest_name(kind, REDUCTIONS))
    return REDUCTIONS[kind](keep=keep)


def _check_important_fraction(important: float) -> None:
    if not 0 <= important <= 1:
        raise ConfigError(f"important_fraction is {important}", "give a number from 0 to 1")


def _check_contextual(contextual: int, keep: int) -> None:
    if not 0 <= contextual <= keep:
        raise ConfigError(
            f"contextual_tokens is {contextual}, but keep is {keep}",
            f"keep at least {max(contextual, 1)}, or use fewer contextual tokens",
        )


def _check_inputs(features: Tensor, scores: Tensor, keep: int) -> None:
    if features.ndim != 3 or scores.shape != features.shape[:2]:
        raise ConfigError(
            f"features {tuple(features.shape)} and scores {tuple(scores.shape)} do not match",
            "give features (B, N, D) without CLS, and scores (B, N)",
        )
    if keep < 1:
        raise ConfigError(f"keep is {keep}, of {features.shape[1]} features", "keep at least 1")


def _gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Gather x (B, N, D) at index (B, n) to (B, n, D)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def _keep_tokens(features: Tensor, index: Tensor) -> ReducedFeatures:
    return ReducedFeatures(_gather_tokens(features, index), index)


def _keep_all_tokens(features: Tensor) -> ReducedFeatures:
    index = torch.arange(features.shape[1], device=features.device).expand(len(features), -1)
    return ReducedFeatures(features, index)
