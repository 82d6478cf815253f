"""The nearest code of every vector: the id that float64 gives, on every device, without an N × K matrix.

A fast pass finds where the nearest code must lie, with a bound on its error; only there are distances computed in
float64. So a picture has the same ids on a laptop and on a GPU, alone and in a batch. Of equally near codes the first
is taken.

N vectors, K codes, D width; n × k a tile, L codes in a line
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

LINE = 32  # codes of which only the best is kept by the fast pass
TILE = 1024, 1024  # codes and vectors of a tile, which stays in the cache
CHUNK = 1024  # vectors that are done together


def nearest(x: Tensor, table: Tensor, product: bool = False) -> Tensor:
    """x (N, D), table (K, D) → ids (N,) of the nearest rows, or of those with the highest `product` with x.

    A vector with nan or infinity gets some id. No gradient.
    """
    return torch.ops.vitrail.nearest(x.detach(), table.detach(), product)


@torch.library.custom_op("vitrail::nearest", mutates_args=())
def _nearest(x: Tensor, table: Tensor, product: bool) -> Tensor:
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        kernels = _kernels()
        if kernels is not None and kernels.fits(x, table):
            return kernels.nearest(x, table, product)
        return tiled(x, table, product)


@_nearest.register_fake
def _(x: Tensor, table: Tensor, product: bool) -> Tensor:
    return x.new_empty(len(x), dtype=torch.int64)


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        from vitrail.nn.kernels import nearest as kernels
    except ImportError:
        return None
    return kernels


def exhaustive(x: Tensor, table: Tensor, product: bool = False) -> Tensor:
    """All distances at once, in float64: what the others must equal."""
    scores = _dots(x.double().T[:, :, None], table.double().T[:, None, :])
    return (scores if product else scores - _half(table)).argmax(1)


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """Σ over the first axis of x · y, one term after the other: equal codes have equal scores wherever they stand, and
    whoever is beside them, which a matrix product does not promise."""
    total = x[0] * y[0]
    for a, b in zip(x[1:], y[1:], strict=True):
        total = total + a * b
    return total


def tiled(x: Tensor, table: Tensor, product: bool = False) -> Tensor:
    """In plain torch. Scores are x·c − |c|²/2, of which the nearest code has the highest."""
    N, K = len(x), len(table)
    ids = torch.zeros(N, dtype=torch.int64, device=x.device)
    if N == 0 or K == 1:
        return ids
    half = torch.zeros(K, dtype=torch.float64, device=x.device) if product else _half(table)
    # On a CPU the fast pass is in float32; other devices may round products to less, unless they are in float64.
    kind = torch.float32 if x.device.type == "cpu" else torch.float64
    fast, bias, exact = table.to(kind), -half.to(kind), table.double().T.contiguous()
    longest, tallest = fast.norm(dim=1).max(), half.max()
    spare = -K % LINE  # a last line that is short is filled with its last code
    lines = torch.arange(K + spare, device=x.device).clamp_max(K - 1).view(-1, LINE)
    for i in range(0, N, CHUNK):
        rows = x[i : i + CHUNK]
        best = _lines(rows.to(kind), fast, bias)  # (lines, n)
        # Rounding of D products and sums, and of the bias: some way above what they can come to.
        rounding = torch.finfo(kind).eps * (rows.to(kind).norm(dim=1) * longest + tallest) + torch.finfo(kind).tiny
        reach = (x.shape[1] + 4) * rounding
        top, line = best.max(0)
        among = lines[line]  # (n, L)
        scores = _dots(rows.double().T[:, :, None], exact[:, among]) - half[among]
        ids[i : i + CHUNK] = among.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)
        several = (best >= top - 2 * reach.to(kind)).sum(0) > 1  # lines may hold it
        unsure = (several | ~top.isfinite() | ~reach.isfinite()).nonzero().squeeze(1)
        for some in unsure.split(256):
            ids[i + some] = exhaustive(rows[some], table, product)
    return ids


def _half(table: Tensor) -> Tensor:
    columns = table.double().T
    return _dots(columns, columns) / 2


def _lines(x: Tensor, table: Tensor, bias: Tensor) -> Tensor:
    """The best score of every line of codes (lines, N)"""
    K, (k, n) = len(table), TILE
    out = x.new_empty(-(-K // LINE), len(x))
    room = x.new_empty(k * n)
    for i in range(0, len(x), n):
        columns = x[i : i + n].T
        for j in range(0, K, k):
            codes = table[j : j + k]
            size = len(codes), columns.shape[1]
            scores = torch.addmm(bias[j : j + k, None], codes, columns, out=room[: size[0] * size[1]].view(size))
            whole = size[0] // LINE
            first = j // LINE
            if whole:
                torch.amax(scores[: whole * LINE].view(whole, LINE, -1), 1, out=out[first : first + whole, i : i + n])
            if size[0] % LINE:
                out[first + whole, i : i + n] = scores[whole * LINE :].amax(0)
    return out
