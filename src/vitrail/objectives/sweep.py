"""All pairs of a batch, a tile of logits at a time: what a contrastive loss sums over them.

A tile comes from Triton where the device has it and from plain torch elsewhere. Its slopes, G = dloss/dlogit, are used
at once for d_u += G·v and d_v += Gᵀ·u, and forgotten. Those are the gradients of u·vᵀ: whoever calls multiplies by the
scale. In a batch without labels the positives are the caller's too, and G is 0 there.

N rows, M columns, D width
"""

from collections.abc import Iterator
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.objectives import tiles
from vitrail.objectives.cross_entropy import add_product
from vitrail.objectives.pairs import Pairs
from vitrail.objectives.tiles import Side

Stats = list[Tensor]
"""(N,) each: log Σ exp of the negatives; with labels also that of the positives, the sum of those, and their number"""

Sums = tuple[Tensor | None, Tensor | None]
"""d_u (N, D) and d_v (M, D), of which None is not wanted"""


def maker(u: Tensor) -> ModuleType:
    """Who makes the tiles: Triton for bf16 on Hopper (and in its interpreter), else plain torch."""
    kernels = _kernels()
    if kernels is None:
        return tiles
    hopper = u.is_cuda and u.dtype == torch.bfloat16 and torch.cuda.get_device_capability(u.device)[0] == 9
    return kernels if hopper or kernels.INTERPRETED else tiles


@cache
def _kernels() -> ModuleType | None:
    try:
        from vitrail.nn.kernels import contrastive
    except ImportError:
        return None
    return contrastive


def siglip(
    u: Tensor, v: Tensor, scale: Tensor, bias: Tensor, pairs: Pairs, sums: Sums, tile: int | None = None
) -> Tensor:
    """→ the sums (3,) that `tiles.siglip` gives, in float64; adds to `sums`."""
    by, total = maker(u), torch.zeros(3, dtype=torch.float64, device=u.device)
    room = _room(u, v, sums, tile)
    for i, j in _cut(u, v, tile):
        a, b = u[i], v[j]
        G, part = by.siglip(a, b, scale, bias, pairs.cut(i, j), _corner(room, a, b))
        total += part
        _add(G, a, b, sums, (i, j))
    return total


def clip_stats(
    u: Tensor, v: Tensor, scale: Tensor, pairs: Pairs, rows: Stats, columns: Stats, tile: int | None = None
) -> None:
    """Take all pairs into the statistics of the rows and of the columns."""
    for i, j in _cut(u, v, tile):
        parts = maker(u).stats(u[i], v[j], scale, pairs.cut(i, j))
        for wholes, at, new in zip((rows, columns), (i, j), parts, strict=True):
            for k, (whole, part) in enumerate(zip(wholes, new, strict=True)):
                whole[at] = torch.logaddexp(whole[at], part) if k < 2 else whole[at] + part


def clip_slopes(
    u: Tensor, v: Tensor, scale: Tensor, pairs: Pairs, rows: Side, columns: Side, sums: Sums, tile: int | None = None
) -> None:
    """Add to `sums`."""
    by = maker(u)
    sides, room = by.prepared(rows, columns), _room(u, v, sums, tile)
    for i, j in _cut(u, v, tile):
        a, b = u[i], v[j]
        G = by.slopes(a, b, scale, sides, (i, j), pairs.cut(i, j), _corner(room, a, b))
        _add(G, a, b, sums, (i, j))


def _add(G: Tensor | None, u: Tensor, v: Tensor, sums: Sums, at: tuple[slice, slice]) -> None:
    if sums[0] is not None and G is not None:
        add_product(sums[0][at[0]], G, v)
    if sums[1] is not None and G is not None:
        add_product(sums[1][at[1]], G.T, u)


def _room(u: Tensor, v: Tensor, sums: Sums, tile: int | None) -> Tensor | None:
    """Where a maker that wants it writes its slopes, one tile after the other."""
    if sums[0] is None and sums[1] is None:
        return None
    rows, columns = _sides(u, tile)
    return maker(u).room(min(rows, len(u)), min(columns, len(v)), u)


def _corner(room: Tensor | None, u: Tensor, v: Tensor) -> Tensor | None:
    return None if room is None else room[: len(u), : len(v)]


def _cut(u: Tensor, v: Tensor, tile: int | None) -> Iterator[tuple[slice, slice]]:
    rows, columns = _sides(u, tile)
    for i in range(0, len(u), rows):
        for j in range(0, len(v), columns):
            yield slice(i, min(i + rows, len(u))), slice(j, min(j + columns, len(v)))


def _sides(u: Tensor, tile: int | None) -> tuple[int, int]:
    if tile is None:
        return maker(u).sides(u)
    if tile < 1:
        raise ConfigError(f"a tile of {tile} rows holds nothing", "use at least 1")
    return tile, tile
