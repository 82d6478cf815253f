"""Fewer tokens without training, by what the tower itself looked at; and the mask of a token that stands for a picture.

    VisPruner   half of what is kept is what CLS looks at most, the rest what repeats the others least
    VisionZip   what CLS looks at most, and a few means of all the rest
    VoCo        text sees a few learned tokens instead of the picture, which alone see it

B batch, N features, X prefix tokens (CLS, registers), D width, n features that are kept, H heads, C channels of a head
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.nn import Block, Plan

BATCH = 8  # repeated features that VisPruner leaves out at a time


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


def looks(block: Block, tokens: Tensor, prefix: int = 1) -> Looks:
    """What the first of the tokens (B, X + N, D) that enter a tower's block looks at there.

    LLaVA takes features from the last block but one: `x = vit.tokens(pixels, layer=-3)` enters it,
    `vit.blocks[-2](x)` leaves it. CLIP's attention will do, and others without norms or rotary positions.
    """
    if "self" not in block.branches:
        raise ConfigError(f"a block of {', '.join(block.branches)} has no self-attention")
    config, width = block.config.attention, block.config.width
    if config.qk_norm is not None or config.bias == "all_but_k":
        raise ConfigError("scores are read where queries and keys are one linear layer", "use a CLIP or DINOv2 tower")
    residual: Any = block.branches["self"]
    x = residual.norm(tokens) if residual.norm_at == "before" else tokens
    H, G, C = config.heads, config.groups, config.channels(width)
    q, k, _ = residual.op.qkv(x).unflatten(-1, (-1, C)).split([H, G, G], dim=-2)
    every = k.repeat_interleave(H // G, dim=2)
    seen = torch.einsum("bhc,bkhc->bhk", q[:, 0].float(), every.float()) * C**-0.5
    return Looks(seen.softmax(-1).mean(1)[:, prefix:], k[:, prefix:].mean(2))


def vispruner(features: Tensor, scores: Tensor, keep: int, important: float = 0.5) -> Reduced:
    """Keep `keep` of the features (B, N, D), the share `important` of them by their scores (B, N).

    Of the rest, every second one is compared with the others, and those that most resemble one are left out, a few at a
    time, until as many as wanted are left. What is kept stays in its order.
    """
    _check(features, scores, keep)
    if not 0 <= important <= 1:
        raise ConfigError(f"a share of {important} cannot be important", "give a number from 0 to 1")
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


def visionzip(features: Tensor, scores: Tensor, keep: int, contextual: int = 10, keys: Tensor | None = None) -> Reduced:
    """`keep` tokens of the features (B, N, D): the `keep − contextual` of highest score (B, N), then `contextual` more.

    Those are taken evenly from the rest, and each has the mean of the features added that are most like it, by their
    `keys` (B, N, C) or else by the features themselves. They come last; either group is in the order of its places.
    """
    _check(features, scores, keep)
    N = features.shape[1]
    if keep >= N:
        return _all(features)
    if not 0 <= contextual <= keep:
        raise ConfigError(
            f"{contextual} contextual tokens among {keep}", f"keep at least {max(contextual, 1)}, or ask for fewer"
        )
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


# ---- a token that stands for a picture ---------------------------------------------------------------------------

TEXT, PICTURE, VOCO = range(3)


class VoCoPlan(Plan):
    """Causal, but text sees no picture: only the tokens that stand for it."""

    def sees(self, q: Tensor, k: Tensor, qs: Tensor, ks: Tensor, qp: None, kp: None) -> Tensor:
        return (k <= q) & ~((qs == TEXT) & (ks == PICTURE))

    def to(self, device: torch.device | str) -> "VoCoPlan":
        assert self.segments is not None
        return voco_plan(self.segments.to(device, non_blocking=True))


def voco_plan(kinds: Tensor) -> VoCoPlan:
    """The plan of a decoder's rows (B, L), where `kinds` says what each token is: TEXT, PICTURE or VOCO.

    No text reaches a picture on any way but through the VoCo tokens, so once they are read the picture's keys and
    values can be dropped.
    """
    if kinds.ndim != 2 or kinds.is_floating_point():
        raise ConfigError(f"kinds must be integers (B, L), not {kinds.dtype} {tuple(kinds.shape)}")
    return VoCoPlan(causal=True, segments=kinds, key_segments=kinds)


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
