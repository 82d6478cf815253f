"""Nearest-code search: the same ids as float64 on every device, without an N × K matrix.

A fast pass with an error bound finds candidates; only their distances are computed in float64. So an image has the same
ids on a CPU and on a GPU, alone and in a batch. Among equally near codes the first is taken.

Shapes: N vectors, K codes, D width; tiles of n × k; L codes in a line.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

CODES_PER_LINE = 32  # codes in a line; the fast pass keeps only the best score of a line
TILE_SHAPE = 1024, 1024  # codes and vectors of a tile, which fits into the CPU cache
CHUNK_VECTORS = 1024  # vectors processed together


def find_nearest_codes(x: Tensor, table: Tensor, by_dot_product: bool = False) -> Tensor:
    """Return ids (N,) of the rows of `table` (K, D) nearest to x (N, D), or with the highest dot product.

    A vector with NaN or infinity gets an arbitrary id. There is no gradient.
    """
    return torch.ops.vitrail.nearest(x.detach(), table.detach(), by_dot_product)


@torch.library.custom_op("vitrail::nearest", mutates_args=())
def _nearest(x: Tensor, table: Tensor, product: bool) -> Tensor:
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        kernels = _kernels()
        if kernels is not None and kernels.is_supported(x, table):
            return kernels.find_nearest(x, table, product)
        return find_nearest_tiled(x, table, product)


@_nearest.register_fake
def _(x: Tensor, table: Tensor, product: bool) -> Tensor:
    return x.new_empty(len(x), dtype=torch.int64)


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        from vitrail.nn.kernels import nearest_code as kernels
    except ImportError:
        return None
    return kernels


def find_nearest_exhaustive(x: Tensor, table: Tensor, by_dot_product: bool = False) -> Tensor:
    """Compute all scores at once in float64: the reference for the other implementations."""
    scores = _dots(x.double().T[:, :, None], table.double().T[:, None, :])
    return (scores if by_dot_product else scores - _half(table)).argmax(1)


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """Sum x · y over the first axis in a fixed order.

    Equal codes then have equal scores at any position and in any batch, which a matrix product does not guarantee.
    """
    total = x[0] * y[0]
    for a, b in zip(x[1:], y[1:], strict=True):
        total = total + a * b
    return total


def find_nearest_tiled(x: Tensor, table: Tensor, by_dot_product: bool = False) -> Tensor:
    """Search in plain torch. Scores are x·c − |c|²/2; the nearest code has the highest score."""
    N, K = len(x), len(table)
    ids = torch.zeros(N, dtype=torch.int64, device=x.device)
    if N == 0 or K == 1:
        return ids
    half = torch.zeros(K, dtype=torch.float64, device=x.device) if by_dot_product else _half(table)
    # On a CPU the fast pass is in float32; other devices may have less precision than that, unless in float64.
    kind = torch.float32 if x.device.type == "cpu" else torch.float64
    fast, bias, exact = table.to(kind), -half.to(kind), table.double().T.contiguous()
    longest, tallest = fast.norm(dim=1).max(), half.max()
    spare = -K % CODES_PER_LINE  # a short last line repeats its last code
    lines = torch.arange(K + spare, device=x.device).clamp_max(K - 1).view(-1, CODES_PER_LINE)
    for i in range(0, N, CHUNK_VECTORS):
        rows = x[i : i + CHUNK_VECTORS]
        best = _lines(rows.to(kind), fast, bias)  # (lines, n)
        # Upper bound of the rounding errors of D products and sums, and of the bias.
        rounding = torch.finfo(kind).eps * (rows.to(kind).norm(dim=1) * longest + tallest) + torch.finfo(kind).tiny
        reach = (x.shape[1] + 4) * rounding
        top, line = best.max(0)
        candidates = lines[line]  # (n, L)
        scores = _dots(rows.double().T[:, :, None], exact[:, candidates]) - half[candidates]
        ids[i : i + CHUNK_VECTORS] = candidates.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)
        several = (best >= top - 2 * reach.to(kind)).sum(0) > 1  # more than one line is a candidate
        unsure = (several | ~top.isfinite() | ~reach.isfinite()).nonzero().squeeze(1)
        for some in unsure.split(256):
            ids[i + some] = find_nearest_exhaustive(rows[some], table, by_dot_product)
    return ids


def _half(table: Tensor) -> Tensor:
    columns = table.double().T
    return _dots(columns, columns) / 2


def _lines(x: Tensor, table: Tensor, bias: Tensor) -> Tensor:
    """Best score of every line of codes (lines, N)."""
    K, (k, n) = len(table), TILE_SHAPE
    out = x.new_empty(-(-K // CODES_PER_LINE), len(x))
    buffer = x.new_empty(k * n)
    for i in range(0, len(x), n):
        columns = x[i : i + n].T
        for j in range(0, K, k):
            codes = table[j : j + k]
            size = len(codes), columns.shape[1]
            scores = torch.addmm(bias[j : j + k, None], codes, columns, out=buffer[: size[0] * size[1]].view(size))
            full_lines = size[0] // CODES_PER_LINE
            first = j // CODES_PER_LINE
            if full_lines:
                torch.amax(
                    scores[: full_lines * CODES_PER_LINE].view(full_lines, CODES_PER_LINE, -1),
                    1,
                    out=out[first : first + full_lines, i : i + n],
                )
            if size[0] % CODES_PER_LINE:
                out[first + full_lines, i : i + n] = scores[full_lines * CODES_PER_LINE :].amax(0)
    return out
