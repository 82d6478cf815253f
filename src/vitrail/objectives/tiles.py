"""A tile of logits in plain torch: the twin of `nn.kernels.contrastive`, for any device and type.

n rows, m columns, D width; x logits (n, m); signs (n, m) are 1 for positive, −1 for negative, 0 for left out
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.objectives.pairs import Pairs

ROWS = 16384
"""Rows that are held in float32 at a time."""


class Side(NamedTuple):
    """What CLIP's slopes need of the rows or the columns, each of which weighs `weight` in the loss.

    exponent: exp(x − exponent) is weight · p; ∞ for what does not count. Of the positives: log Σ exp; the share of each
    in the target, times weight; and the part of p that the negatives take from them, times weight.
    """

    weight: Tensor
    exponent: Tensor
    positive: Tensor
    share: Tensor
    miss: Tensor


def sides(u: Tensor) -> tuple[int, int]:
    """Rows and columns of a tile that suit the device."""
    return (8192, 8192) if u.is_cuda else (2048, 2048)


def aligned(u: Tensor) -> Tensor:
    return u


def room(n: int, m: int, like: Tensor) -> None:
    """Nothing is prepared for the slopes."""


def siglip(
    u: Tensor, v: Tensor, scale: Tensor, bias: Tensor, pairs: Pairs, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """→ slopes (n, m); sums (3,) of the loss, of the slopes, and of the slopes times u·v"""
    z, signs = logits(u, v, torch.ones_like(scale)), _signs(pairs, u, v)
    x = scale * z + bias
    if signs is not None:
        x = torch.where(signs > 0, -x, x).masked_fill_(signs == 0, -torch.inf)
    G = x.sigmoid()
    if signs is not None:
        G = torch.where(signs > 0, -G, G)
    return G, torch.stack([part.sum(dtype=torch.float64) for part in (softplus(x), G, G * z)])


def stats(u: Tensor, v: Tensor, scale: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """(1, n) and (1, m): log Σ exp over the negatives of each row and column. With labels (4, n) and (4, m): also that
    of the positives, the sum of their logits, and their number."""
    x, signs = logits(u, v, scale), _signs(pairs, u, v)
    negatives = x if signs is None else x.masked_fill(signs >= 0, -torch.inf)
    if signs is None or not pairs.labelled:
        return negatives.logsumexp(1)[None], negatives.logsumexp(0)[None]
    positive = signs > 0
    positives, plain = x.masked_fill(~positive, -torch.inf), x.masked_fill(~positive, 0)
    rows, columns = (
        torch.stack([negatives.logsumexp(d), positives.logsumexp(d), plain.sum(d), positive.sum(d).to(x.dtype)])
        for d in (1, 0)
    )
    return rows, columns


def prepared(rows: Side, columns: Side) -> tuple[Side, Side]:
    """The sides as `slopes` reads them."""
    return rows, columns


def slopes(
    u: Tensor, v: Tensor, scale: Tensor, sides: tuple[Side, Side], at: tuple[slice, slice], pairs: Pairs, out: None
) -> Tensor:
    """CLIP's dloss/dlogit (n, m), of the tile that lies `at` these rows and columns."""
    x, signs = logits(u, v, scale), _signs(pairs, u, v)
    (rows, columns), (i, j) = sides, at
    G = (x - rows.exponent[i, None]).exp_() + (x - columns.exponent[j]).exp_()
    if signs is not None:
        G.masked_fill_(signs >= 0, 0)
    if signs is not None and pairs.labelled:
        of_row = _own(x, rows.weight, *(f[i, None] for f in rows[2:]))
        of_column = _own(x, columns.weight, *(f[j] for f in columns[2:]))
        G = torch.where(signs > 0, of_row + of_column, G)
    return G


def dots(u: Tensor, v: Tensor) -> Tensor:
    """u_i · v_i (n,)"""
    return torch.cat(
        [(a.to(wide(a)) * b.to(wide(b))).sum(1) for a, b in zip(u.split(ROWS), v.split(ROWS), strict=True)]
    )


def finished(d: Tensor, x: Tensor, other: Tensor, own: Tensor | None, factor: Tensor) -> tuple[Tensor, Tensor]:
    """(d + own · other) · factor in x's type, and x_i · (d + own · other)_i (n,). d is used up."""
    if own is not None:
        for part, y, slope in zip(d.split(ROWS), other.split(ROWS), own.split(ROWS), strict=True):
            part.addcmul_(slope[:, None], y.to(d.dtype))
    products = dots(x, d)
    return d.mul_(factor).to(x.dtype), products


def logits(u: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return (u.to(wide(u)) @ v.to(wide(v)).T) * scale


def softplus(x: Tensor) -> Tensor:
    """max(x, 0) + log1p(exp(−|x|)) at any x; torch's own drops the second term above a threshold."""
    return -F.logsigmoid(-x)


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _own(x: Tensor, weight: Tensor, positive: Tensor, share: Tensor, miss: Tensor) -> Tensor:
    """weight · p − share of a positive. p is q · (1 − negatives' part), so that of a single one, whose q is 1, only
    what the negatives take is left, to all digits."""
    q = (x - positive).exp_()
    return (weight * q - share) - q * miss


def _signs(pairs: Pairs, u: Tensor, v: Tensor) -> Tensor | None:
    """None where all are negative; the positives of a diagonal are left out."""
    n, m = len(u), len(v)
    if pairs.labelled:
        return pairs.signs(n, m, u.device)
    if pairs.shift >= m or pairs.shift <= -n:
        return None
    return pairs.signs(n, m, u.device).clamp_max_(0)
