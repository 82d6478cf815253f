"""Contrastive tiles in torch, for any device and dtype. `nn.kernels.contrastive_tiles_triton` has the same functions.

n rows, m columns, D width; x logits (n, m); signs (n, m) are 1 for positive, −1 for negative, 0 for ignored
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.objectives.contrastive_labels import PairLabels

MAX_FLOAT32_ROWS = 16384
"""Rows that are converted to float32 at a time."""


class ClipTerms(NamedTuple):
    """Terms of the rows or columns that CLIP's logit gradients need.

    weight           weight of a row or column in the loss
    exponent         exp(x − exponent) is weight · p; ∞ for ignored rows
    positive_lse     log Σ exp over the positives
    target_weight    weight × target probability of each positive
    negative_weight  weight × probability mass of the negatives
    """

    weight: Tensor
    exponent: Tensor
    positive_lse: Tensor
    target_weight: Tensor
    negative_weight: Tensor


def choose_tile_size(u: Tensor) -> tuple[int, int]:
    """Return the rows and columns of a tile for the device."""
    return (8192, 8192) if u.is_cuda else (2048, 2048)


def align_rows(u: Tensor) -> Tensor:
    """Return u; torch needs no alignment."""
    return u


def allocate_logit_gradients(n: int, m: int, like: Tensor) -> None:
    """Allocate nothing: torch returns new tensors."""


def compute_siglip_tile(
    u: Tensor, v: Tensor, scale: Tensor, bias: Tensor, pairs: PairLabels, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the logit gradients (n, m), and the sums (3,) of the loss, of the gradients, and of gradients · u·v."""
    z, signs = compute_logits(u, v, torch.ones_like(scale)), _signs(pairs, u, v)
    x = scale * z + bias
    if signs is not None:
        x = torch.where(signs > 0, -x, x).masked_fill_(signs == 0, -torch.inf)
    G = x.sigmoid()
    if signs is not None:
        G = torch.where(signs > 0, -G, G)
    return G, torch.stack([part.sum(dtype=torch.float64) for part in (softplus(x), G, G * z)])


def compute_clip_stats(u: Tensor, v: Tensor, scale: Tensor, pairs: PairLabels) -> tuple[Tensor, Tensor]:
    """Return statistics of rows (1, n) and columns (1, m): log Σ exp over the negatives.

    With labels (4, n) and (4, m): also log Σ exp over the positives, the sum of their logits, and their number.
    """
    x, signs = compute_logits(u, v, scale), _signs(pairs, u, v)
    negatives = x if signs is None else x.masked_fill(signs >= 0, -torch.inf)
    if signs is None or not pairs.has_labels:
        return negatives.logsumexp(1)[None], negatives.logsumexp(0)[None]
    positive = signs > 0
    positives, plain = x.masked_fill(~positive, -torch.inf), x.masked_fill(~positive, 0)
    rows, columns = (
        torch.stack([negatives.logsumexp(d), positives.logsumexp(d), plain.sum(d), positive.sum(d).to(x.dtype)])
        for d in (1, 0)
    )
    return rows, columns


def prepare_clip_terms(rows: ClipTerms, columns: ClipTerms) -> tuple[ClipTerms, ClipTerms]:
    """Return the terms in the form that `compute_clip_gradients` needs."""
    return rows, columns


def compute_clip_gradients(
    u: Tensor,
    v: Tensor,
    scale: Tensor,
    sides: tuple[ClipTerms, ClipTerms],
    at: tuple[slice, slice],
    pairs: PairLabels,
    out: None,
) -> Tensor:
    """Return CLIP's logit gradients (n, m) of the tile at rows and columns `at`."""
    x, signs = compute_logits(u, v, scale), _signs(pairs, u, v)
    (rows, columns), (i, j) = sides, at
    G = (x - rows.exponent[i, None]).exp_() + (x - columns.exponent[j]).exp_()
    if signs is not None:
        G.masked_fill_(signs >= 0, 0)
    if signs is not None and pairs.has_labels:
        of_row = _positive_gradient(x, rows.weight, *(f[i, None] for f in rows[2:]))
        of_column = _positive_gradient(x, columns.weight, *(f[j] for f in columns[2:]))
        G = torch.where(signs > 0, of_row + of_column, G)
    return G


def compute_row_dots(u: Tensor, v: Tensor) -> Tensor:
    """Return u_i · v_i for every row, (n,)."""
    return torch.cat(
        [
            (a.to(wide_dtype(a)) * b.to(wide_dtype(b))).sum(1)
            for a, b in zip(u.split(MAX_FLOAT32_ROWS), v.split(MAX_FLOAT32_ROWS), strict=True)
        ]
    )


def finish_gradient(
    d: Tensor, x: Tensor, other: Tensor, diagonal: Tensor | None, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (d + own · other) · factor in the dtype of x, and x_i · (d + own · other)_i (n,). It overwrites d."""
    if diagonal is not None:
        for part, y, gradient in zip(
            d.split(MAX_FLOAT32_ROWS), other.split(MAX_FLOAT32_ROWS), diagonal.split(MAX_FLOAT32_ROWS), strict=True
        ):
            part.addcmul_(gradient[:, None], y.to(d.dtype))
    products = compute_row_dots(x, d)
    return d.mul_(factor).to(x.dtype), products


def compute_logits(u: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Return scale · u·vᵀ in float32 at least."""
    return (u.to(wide_dtype(u)) @ v.to(wide_dtype(v)).T) * scale


def softplus(x: Tensor) -> Tensor:
    """Exact softplus: max(x, 0) + log1p(exp(−|x|)). torch's softplus drops the second term above a threshold."""
    return -F.logsigmoid(-x)


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of x, but float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def _positive_gradient(x: Tensor, weight: Tensor, positive: Tensor, share: Tensor, miss: Tensor) -> Tensor:
    """Return weight · p − target_weight of positives, in a form without cancellation.

    p is q · (1 − probability of the negatives). For a single positive q is 1, so only the negatives' term remains.
    """
    q = (x - positive).exp_()
    return (weight * q - share) - q * miss


def _signs(pairs: PairLabels, u: Tensor, v: Tensor) -> Tensor | None:
    """Return the signs of a tile; None if all pairs are negative. Positives on the diagonal are ignored."""
    n, m = len(u), len(v)
    if pairs.has_labels:
        return pairs.sign_matrix(n, m, u.device)
    if pairs.diagonal_offset >= m or pairs.diagonal_offset <= -n:
        return None
    return pairs.sign_matrix(n, m, u.device).clamp_max_(0)
