"""Sums of a contrastive loss over all pairs of a batch, one tile of logits at a time.

Triton kernels compute the tiles if the device supports them, else torch. The logit gradients of a tile,
G = dloss/dlogit, are used immediately for d_u += G·v and d_v += Gᵀ·u and then dropped. These are gradients of u·vᵀ; the
caller multiplies them by the scale. Without labels, G is 0 for the positives on the diagonal, and the caller adds them.

N rows, M columns, D width
"""

from collections.abc import Iterator
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.objectives import contrastive_tiles
from vitrail.objectives.contrastive_labels import PairLabels
from vitrail.objectives.contrastive_tiles import ClipTerms
from vitrail.objectives.fused_cross_entropy import add_matmul

SoftmaxStats = list[Tensor]
"""(N,) each: log Σ exp of the negatives; with labels also log Σ exp, sum and number of the positive logits."""

GradientSums = tuple[Tensor | None, Tensor | None]
"""d_u (N, D) and d_v (M, D); None if not needed."""


def choose_tile_backend(u: Tensor) -> ModuleType:
    """Return the module that computes tiles: Triton for bf16 on Hopper (or its interpreter), else torch."""
    kernels = _kernels()
    if kernels is None:
        return contrastive_tiles
    hopper = u.is_cuda and u.dtype == torch.bfloat16 and torch.cuda.get_device_capability(u.device)[0] == 9
    return kernels if hopper or kernels.INTERPRETED else contrastive_tiles


@cache
def _kernels() -> ModuleType | None:
    try:
        from vitrail.nn.kernels import contrastive_tiles_triton
    except ImportError:
        return None
    return contrastive_tiles_triton


def sum_siglip_tiles(
    u: Tensor,
    v: Tensor,
    scale: Tensor,
    bias: Tensor,
    pairs: PairLabels,
    sums: GradientSums,
    tile_size: int | None = None,
) -> Tensor:
    """Add the gradients of all pairs to `sums` and return the loss sums (3,) of all tiles in float64."""
    backend, total = choose_tile_backend(u), torch.zeros(3, dtype=torch.float64, device=u.device)
    buffer = _allocate_buffer(u, v, sums, tile_size)
    for i, j in _iterate_tiles(u, v, tile_size):
        a, b = u[i], v[j]
        G, part = backend.compute_siglip_tile(a, b, scale, bias, pairs.select_tile(i, j), _crop_buffer(buffer, a, b))
        total += part
        _add_gradients(G, a, b, sums, (i, j))
    return total


def update_clip_stats(
    u: Tensor,
    v: Tensor,
    scale: Tensor,
    pairs: PairLabels,
    rows: SoftmaxStats,
    columns: SoftmaxStats,
    tile_size: int | None = None,
) -> None:
    """Update the softmax statistics of rows and columns with all pairs."""
    for i, j in _iterate_tiles(u, v, tile_size):
        parts = choose_tile_backend(u).compute_clip_stats(u[i], v[j], scale, pairs.select_tile(i, j))
        for totals, at, new in zip((rows, columns), (i, j), parts, strict=True):
            for k, (total, part) in enumerate(zip(totals, new, strict=True)):
                total[at] = torch.logaddexp(total[at], part) if k < 2 else total[at] + part


def add_clip_gradients(
    u: Tensor,
    v: Tensor,
    scale: Tensor,
    pairs: PairLabels,
    rows: ClipTerms,
    columns: ClipTerms,
    sums: GradientSums,
    tile_size: int | None = None,
) -> None:
    """Add CLIP's gradients of all pairs to `sums`."""
    backend = choose_tile_backend(u)
    terms, buffer = backend.prepare_clip_terms(rows, columns), _allocate_buffer(u, v, sums, tile_size)
    for i, j in _iterate_tiles(u, v, tile_size):
        a, b = u[i], v[j]
        labels, out = pairs.select_tile(i, j), _crop_buffer(buffer, a, b)
        G = backend.compute_clip_gradients(a, b, scale, terms, (i, j), labels, out)
        _add_gradients(G, a, b, sums, (i, j))


def _add_gradients(G: Tensor | None, u: Tensor, v: Tensor, sums: GradientSums, at: tuple[slice, slice]) -> None:
    if sums[0] is not None and G is not None:
        add_matmul(sums[0][at[0]], G, v)
    if sums[1] is not None and G is not None:
        add_matmul(sums[1][at[1]], G.T, u)


def _allocate_buffer(u: Tensor, v: Tensor, sums: GradientSums, tile: int | None) -> Tensor | None:
    """Allocate the buffer for the logit gradients of a tile, if the backend needs one."""
    if sums[0] is None and sums[1] is None:
        return None
    rows, columns = _tile_shape(u, tile)
    return choose_tile_backend(u).allocate_logit_gradients(min(rows, len(u)), min(columns, len(v)), u)


def _crop_buffer(buffer: Tensor | None, u: Tensor, v: Tensor) -> Tensor | None:
    return None if buffer is None else buffer[: len(u), : len(v)]


def _iterate_tiles(u: Tensor, v: Tensor, tile: int | None) -> Iterator[tuple[slice, slice]]:
    rows, columns = _tile_shape(u, tile)
    for i in range(0, len(u), rows):
        for j in range(0, len(v), columns):
            yield slice(i, min(i + rows, len(u))), slice(j, min(j + columns, len(v)))


def _tile_shape(u: Tensor, tile: int | None) -> tuple[int, int]:
    if tile is None:
        return choose_tile_backend(u).choose_tile_size(u)
    if tile < 1:
        raise ConfigError(f"tile_size is {tile}", "use at least 1")
    return tile, tile
