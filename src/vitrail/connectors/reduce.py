"""Fewer tokens without training, by what the tower itself looked at.

    VisPruner   half of what is kept is what CLS looks at most, the rest what repeats the others least
    VisionZip   what CLS looks at most, and a few means of all the rest
    pool        means over equal cells of the grid

Towers without CLS go by how much all patches look at each, as VisPruner does for SigLIP.

B batch, N features, X prefix tokens (CLS, registers), D width, n features that are kept, H heads, C channels of a head
"""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config
from vitrail.connectors.grids import Laid
from vitrail.encoders.depth import depth_of
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError, nearest
from vitrail.nn import Block, BlockConfig
from vitrail.processing.grid import Grid

BATCH = 8  # repeated features that VisPruner leaves out at a time
CONTEXTUAL = 10  # of VisionZip's tokens, as published


class Looks(NamedTuple):
    scores: Tensor
    """(B, N) how much CLS looks at each patch, mean over heads"""
    keys: Tensor
    """(B, N, C) of the patches, mean over heads: what VisionZip compares"""


class Reduced(NamedTuple):
    tokens: Tensor
    """(B, n, D)"""
    index: Tensor
    """(B, n) the places they stand at, each once"""


def looks(block: Block, tokens: Tensor, prefix: int = 1, cls: bool = True) -> Looks:
    """What the first of the tokens (B, X + N, D) that enter a tower's block looks at there; without a CLS among them,
    what all of them look at, in the mean.

    LLaVA takes features from the last block but one: `x = vit.tokens(pixels, layer=-3)` enters it,
    `vit.blocks[-2](x)` leaves it. CLIP's attention will do, and others without rotary positions.
    """
    readable(block.config)
    config, residual = block.config.attention, block.branches["self"]
    op: Any = residual.op  # pyrefly: ignore
    H, G, C = config.heads, config.groups, config.channels(block.config.width)
    x: Any = residual.norm(tokens) if residual.norm_at == "before" else tokens  # pyrefly: ignore
    q, k, _ = op.qkv(x).unflatten(-1, (-1, C)).split([H, G, G], dim=-2)
    q, k = op.q_norm(q[:, :1] if cls else q), op.k_norm(k)
    every = k.repeat_interleave(H // G, dim=2)
    seen = torch.einsum("bqhc,bkhc->bhqk", q.float(), every.float()) * C**-0.5  # (B, H, 1 or X + N, X + N)
    return Looks(seen.softmax(-1).mean((1, 2))[:, prefix:], k[:, prefix:].mean(2))


def readable(block: BlockConfig) -> None:
    """Refuse a block in which nobody can be seen to look at anything."""
    if "self" not in block.chain:
        raise ConfigError(f"a block of {', '.join(block.chain)} has no self-attention")
    config = block.attention
    if config.bias == "all_but_k" or (config.qk_norm is not None and config.qk_norm_over == "heads"):
        raise ConfigError("scores are read where queries and keys are one linear layer", "use a CLIP or DINOv2 tower")


def watched(tower: ViT, pixels: Tensor, layer: int | None) -> tuple[Tensor, Looks]:
    """What `tower.tokens(pixels, layer=layer)` gives (B, X + N, D), and how it was looked at in the block before."""
    config, depth = tower.config, depth_of(layer, tower.config.layers)
    entering, block = tower.tokens(pixels, layer=depth - 1), tower.blocks[depth - 1]
    with torch.no_grad():  # features are chosen by these, and nothing is made of them
        seen = looks(block, entering, config.prefix, config.cls)  # pyrefly: ignore
    tokens = block(entering)
    return tower.norm_last(tokens) if layer is None and config.norm_last == "tokens" else tokens, seen


def vispruner(features: Tensor, scores: Tensor, keep: int, important: float = 0.5) -> Reduced:
    """Keep `keep` of the features (B, N, D), the share `important` of them by their scores (B, N).

    Of the rest, every second one is compared with the others, and those that most resemble one are left out, a few at a
    time, until as many as wanted are left. What is kept stays in its order.
    """
    _check(features, scores, keep)
    _check_share(important)
    N = features.shape[1]
    if keep >= N:
        return _all(features)
    order = scores.argsort(dim=1, descending=True, stable=True)
    first = int(keep * important)
    best, rest = order[:, :first], order[:, first:]
    if first == keep:
        return _taken(features, best.sort(dim=1).values)
    unit = F.normalize(features.float(), dim=-1)
    while rest.shape[1] > keep - first:
        even, odd = rest[:, ::2], rest[:, 1::2]
        alike = (_take(unit, even) @ _take(unit, odd).mT).amax(-1)  # (B, half of the rest)
        out = min(BATCH, rest.shape[1] - (keep - first), even.shape[1])
        distinct = alike.argsort(dim=1, descending=True, stable=True)[:, out:]
        rest = torch.cat([even.gather(1, distinct), odd], dim=1)
    return _taken(features, torch.cat([best, rest], dim=1).sort(dim=1).values)


def visionzip(
    features: Tensor, scores: Tensor, keep: int, contextual: int = CONTEXTUAL, keys: Tensor | None = None
) -> Reduced:
    """`keep` tokens of the features (B, N, D): the `keep − contextual` of highest score (B, N), then `contextual` more.

    Those are taken evenly from the rest, and each has the mean of the features added that are most like it, by their
    `keys` (B, N, C) or else by the features themselves. They come last; either group is in the order of its places.
    """
    _check(features, scores, keep)
    N = features.shape[1]
    if keep >= N:
        return _all(features)
    _check_contextual(contextual, keep)
    order = scores.argsort(dim=1, descending=True, stable=True)
    dominant = order[:, : keep - contextual].sort(dim=1).values
    if not contextual:
        return _taken(features, dominant)
    rest = order[:, keep - contextual :].sort(dim=1).values  # (B, R)
    R = rest.shape[1]
    step = R // contextual
    centre = torch.zeros(R, dtype=torch.bool, device=rest.device)
    centre[: step * contextual : step] = True
    centres, others = rest[:, centre], rest[:, ~centre]
    unit = F.normalize((features if keys is None else keys).float(), dim=-1)
    nearest = (_take(unit, others) @ _take(unit, centres).mT).argmax(-1)  # (B, R − contextual)
    member = F.one_hot(nearest, contextual).float()  # halves could not count them
    mean = member.mT @ _take(features, others).float() / member.sum(1).clamp_min(1)[..., None]
    merged = (_take(features, centres) + mean).to(features.dtype)
    tokens = torch.cat([_take(features, dominant), merged], dim=1)
    return Reduced(tokens, torch.cat([dominant, centres], dim=1))


def pooled(features: Tensor, grid: Grid, keep: int) -> Tensor:
    """(B, N, D) → (B, n, D): means over equal cells, as square as n allows."""
    lattice = features.mT.unflatten(2, (grid.h, grid.w))
    return F.adaptive_avg_pool2d(lattice, cells_of(grid, keep)).flatten(2).mT


def cells_of(grid: Grid, keep: int) -> tuple[int, int]:
    """Rows and columns of so many cells."""
    rows = max(side for side in range(1, keep + 1) if keep % side == 0 and side * side <= keep)
    columns = keep // rows
    if rows > grid.h or columns > grid.w:
        raise ConfigError(
            f"{keep} tokens are {rows} × {columns} cells, and a view has {grid.h} × {grid.w} patches",
            "keep fewer, or a number with a divisor nearer to its root",
        )
    return rows, columns


# ---- as a part of a model ----------------------------------------------------------------------------------------


class Reduction(Config):
    """How a view's features become `keep`; where there are no more, they stay as they are.

    looking  whether it goes by what the tower looked at
    """

    keep: int
    looking: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigError(f"keeping {self.keep} features leaves nothing", "keep at least 1")

    def laid(self, grid: Grid) -> Laid:
        """How those lie that are left of a grid."""
        return self.keep

    def reduce(self, features: Tensor, seen: Looks | None, grid: Grid) -> Tensor:
        """(B, N, D) → (B, n, D)"""
        raise NotImplementedError

    def flops(self, tower: ViTConfig, patches: int) -> int:
        """Operations by which features of one view are chosen and merged."""
        if not self.looking:
            return 0
        D, attention, X = tower.block.width, tower.block.attention, tower.prefix + patches
        C = attention.channels(D)
        seen = 2 * X * D * (attention.heads + 2 * attention.groups) * C
        return seen + 2 * (1 if tower.cls else X) * X * attention.heads * C + self._flops(patches, D, C)

    def _flops(self, patches: int, width: int, channels: int) -> int:
        """Those behind the looks; of so many channels are the keys."""
        return 0


class VisPrunerConfig(Reduction, tag="vispruner", tag_field="kind"):
    """`important` is the share that is kept for its scores."""

    important: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share(self.important)

    def reduce(self, features: Tensor, seen: Looks | None, grid: Grid) -> Tensor:
        assert seen is not None
        return vispruner(features, seen.scores, self.keep, self.important).tokens

    def _flops(self, patches: int, width: int, channels: int) -> int:
        least = self.keep - int(self.keep * self.important)
        rest, found = patches - int(self.keep * self.important), 0
        while least and rest > least:
            even = (rest + 1) // 2
            found += 2 * even * (rest - even) * width
            rest -= min(BATCH, rest - least, even)
        return found


class VisionZipConfig(Reduction, tag="visionzip", tag_field="kind"):
    """`contextual` are the tokens that are means: 10, or half of all where that is less, unless given."""

    contextual: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_contextual(self.means, self.keep)

    @property
    def means(self) -> int:
        return min(CONTEXTUAL, self.keep // 2) if self.contextual is None else self.contextual

    def reduce(self, features: Tensor, seen: Looks | None, grid: Grid) -> Tensor:
        assert seen is not None
        return visionzip(features, seen.scores, self.keep, self.means, seen.keys).tokens

    def _flops(self, patches: int, width: int, channels: int) -> int:
        others = patches - self.keep
        return 2 * others * self.means * (channels + width)


class CellsConfig(Reduction, tag="pool", tag_field="kind"):
    """Means over equal cells, as many along either side as `keep` allows."""

    looking: ClassVar[bool] = False

    def laid(self, grid: Grid) -> Laid:
        rows, columns = cells_of(grid, self.keep)
        return Grid(h=rows, w=columns)

    def reduce(self, features: Tensor, seen: Looks | None, grid: Grid) -> Tensor:
        return pooled(features, grid, self.keep)


AnyReduction = VisPrunerConfig | VisionZipConfig | CellsConfig
REDUCTIONS: dict[str, type[Reduction]] = {
    "vispruner": VisPrunerConfig,
    "visionzip": VisionZipConfig,
    "pool": CellsConfig,
}


def reduction(kind: str, keep: int) -> Any:
    """The reduction of this name to so many features, all else as published."""
    if kind not in REDUCTIONS:
        raise ConfigError(f"no reduction is called {kind!r}", nearest(kind, REDUCTIONS))
    return REDUCTIONS[kind](keep=keep)


def _check_share(important: float) -> None:
    if not 0 <= important <= 1:
        raise ConfigError(f"a share of {important} cannot be important", "give a number from 0 to 1")


def _check_contextual(contextual: int, keep: int) -> None:
    if not 0 <= contextual <= keep:
        raise ConfigError(
            f"{contextual} contextual tokens among {keep}", f"keep at least {max(contextual, 1)}, or ask for fewer"
        )


def _check(features: Tensor, scores: Tensor, keep: int) -> None:
    if features.ndim != 3 or scores.shape != features.shape[:2]:
        raise ConfigError(
            f"features {tuple(features.shape)} and scores {tuple(scores.shape)} do not fit",
            "give features (B, N, D) without CLS, and a score for each (B, N)",
        )
    if keep < 1:
        raise ConfigError(f"keeping {keep} of {features.shape[1]} features leaves nothing", "keep at least 1")


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x (B, N, D), index (B, n) → (B, n, D)"""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def _taken(features: Tensor, index: Tensor) -> Reduced:
    return Reduced(_take(features, index), index)


def _all(features: Tensor) -> Reduced:
    index = torch.arange(features.shape[1], device=features.device).expand(len(features), -1)
    return Reduced(features, index)
