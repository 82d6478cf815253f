# pyrefly: ignore-errors
# (the checker takes a kernel's parameters for those of a Python function)
"""Triton kernels for tiles of contrastive logits: a bf16 matrix product with float32 accumulation and fused epilogues.

Three epilogues: SigLIP's loss and logit gradients; log-sum-exp of every row and column; CLIP's logit gradients. Logit
gradients have the dtype of the inputs, for the two matrix products that follow. Without labels, the positives are on
the diagonal, which the kernels skip: the caller adds them in float32, because 1 − p would cancel in bf16.

Exponents are base 2 inside and natural outside. One shift per tile halves the number of exponentials. If the sums of a
tile show that this underflows, the tile is computed again with a shift per row and column.

N rows, M columns, D width; m × n a tile, k of the width at a time
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = triton.knobs.runtime.interpret

Pairs, Side = Any, Any  # types of vitrail.objectives, which this package must not import


class TileShape(NamedTuple):
    """Launch config of a kernel: tile size, warps, pipeline stages, rows of tiles processed together.

    A persistent program processes many tiles and loads the next tile while it finishes the current one.
    """

    m: int = 128
    n: int = 256
    k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    group_rows: int = 8
    is_persistent: bool = True
    programs_per_sm: int = 1  # persistent programs per multiprocessor


SIGLIP, SLOPES = TileShape(group_rows=16), TileShape(group_rows=16)
STATS = TileShape(n=128, num_warps=4, group_rows=16, programs_per_sm=2)
# labels need registers and memory
NAMED = TileShape(n=128, is_persistent=False)
TABLE = TileShape(64, 64, num_warps=4, is_persistent=False)
INTERPRETER_SHAPE = TileShape(16, 64, 16, group_rows=2)  # for the slow interpreter


def _choose_shape(pairs: Pairs, default: TileShape) -> TileShape:
    if INTERPRETED:
        return INTERPRETER_SHAPE
    if pairs.table is not None:
        return TABLE
    return NAMED if pairs.has_labels else default


LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
MIN_SUM = tl.constexpr(2.0**-90)  # a smaller sum may have lost terms; the tile is then computed again
MAX_SHARED_EXPONENT_RANGE = 100  # exponents in a smaller range have a common shift without over- or underflow
USE_FAST_RECIPROCAL = tl.constexpr(not INTERPRETED)
DIAGONAL, IDS, SIGNS, BOOLS = (tl.constexpr(i) for i in range(4))


@triton.jit
def _tile_origin(tile, N, M, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile. Tiles are ordered in groups of rows, so that their inputs stay in the cache."""
    down, across = tl.cdiv(N, BM), tl.cdiv(M, BN)
    first = tile // (GROUP * across) * GROUP
    height = min(down - first, GROUP)
    within = tile % (GROUP * across)
    return (first + within % height) * BM, within // height * BN


@triton.jit
def _matmul_tile(u, v, i, j, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, D, BK):
        total = tl.dot(u.load([i, k]), v.load([j, k]).T, total, input_precision="ieee")
    return total


@triton.jit
def _is_off_diagonal(i, j, N, M, shift, BM: tl.constexpr, BN: tl.constexpr):
    """Whether a tile is complete and does not touch the diagonal."""
    whole = (i + BM <= N) & (j + BN <= M)
    return whole & ((i + shift >= j + BN) | (j >= i + shift + BM))


@triton.jit
def _label_masks(
    i, j, rows_ptr, columns_ptr, table_ptr, stride, N, M, shift,
    LABELS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Masks of the positive and negative pairs of a tile. Pairs on the diagonal are in neither."""
    r, c = i + tl.arange(0, BM), j + tl.arange(0, BN)
    inside = (r < N)[:, None] & (c < M)[None, :]
    if LABELS == DIAGONAL:
        negative = inside & ((r + shift)[:, None] != c[None, :])
        positive = inside & (not inside)
    elif LABELS == IDS:
        a = tl.load(rows_ptr + r, mask=r < N, other=-1)[:, None]
        b = tl.load(columns_ptr + c, mask=c < M, other=-1)[None, :]
        counted = (a >= 0) & (b >= 0)
        positive, negative = counted & (a == b), counted & (a != b)
    else:
        at = r[:, None].to(tl.int64) * stride + c[None, :]
        label = tl.load(table_ptr + at, mask=inside, other=0)
        positive = inside & (label > 0)
        negative = inside & (label == 0 if LABELS == BOOLS else label < 0)
    return positive, negative


@triton.jit
def _exp_sums(x):
    """Σ 2^(x − shift) of every row and column, and the shifts."""
    top = tl.max(tl.max(x, 1), 0)
    some = top > float("-inf")
    top = tl.where(some, top, 0.0)
    e = tl.exp2(x - top)
    rows, columns = tl.sum(e, 1), tl.sum(e, 0)
    row_shifts, column_shifts = tl.zeros_like(rows) + top, tl.zeros_like(columns) + top
    if some & (min(tl.min(rows, 0), tl.min(columns, 0)) < MIN_SUM):
        row_shifts, column_shifts = tl.max(x, 1), tl.max(x, 0)
        row_shifts = tl.where(row_shifts == float("-inf"), 0.0, row_shifts)
        column_shifts = tl.where(column_shifts == float("-inf"), 0.0, column_shifts)
        rows = tl.sum(tl.exp2(x - row_shifts[:, None]), 1)
        columns = tl.sum(tl.exp2(x - column_shifts[None, :]), 0)
    return rows, row_shifts, columns, column_shifts


@triton.jit
def _store_stats(which, i, j, rows, columns, rows_out, columns_out, N, M, BM: tl.constexpr, BN: tl.constexpr):
    """Store statistic `which` of a tile: rows_out (…, tiles across, N), columns_out (…, tiles down, M)."""
    r, c = i + tl.arange(0, BM), j + tl.arange(0, BN)
    across, down = tl.cdiv(M, BN), tl.cdiv(N, BM)
    tl.store(rows_out + (which * across + j // BN).to(tl.int64) * N + r, rows, mask=r < N)
    tl.store(columns_out + (which * down + i // BM).to(tl.int64) * M + c, columns, mask=c < M)


@triton.jit(do_not_specialize=["N", "M", "shift"])
def _stats_kernel(
    u, v, scale_ptr, rows_ptr, columns_ptr, table_ptr, stride, rows_out, columns_out, N, M, shift,
    D: tl.constexpr, LABELS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    STAY: tl.constexpr,
):  # fmt: skip
    factor = tl.load(scale_ptr) * LOG2E
    tiles = tl.cdiv(N, BM) * tl.cdiv(M, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=STAY):
        i, j = _tile_origin(tile, N, M, BM, BN, GROUP)
        x = _matmul_tile(u, v, i, j, D, BM, BN, BK) * factor
        if LABELS == DIAGONAL:
            if not _is_off_diagonal(i, j, N, M, shift, BM, BN):
                _, negative = _label_masks(i, j, rows_ptr, columns_ptr, table_ptr, stride, N, M, shift, LABELS, BM, BN)
                x = tl.where(negative, x, float("-inf"))
            rows, row_shifts, columns, column_shifts = _exp_sums(x)
            _store_stats(0, i, j, rows, columns, rows_out, columns_out, N, M, BM, BN)
            _store_stats(1, i, j, row_shifts, column_shifts, rows_out, columns_out, N, M, BM, BN)
        else:
            positive, negative = _label_masks(
                i, j, rows_ptr, columns_ptr, table_ptr, stride, N, M, shift, LABELS, BM, BN
            )
            rows, row_shifts, columns, column_shifts = _exp_sums(tl.where(negative, x, float("-inf")))
            _store_stats(0, i, j, rows, columns, rows_out, columns_out, N, M, BM, BN)
            _store_stats(1, i, j, row_shifts, column_shifts, rows_out, columns_out, N, M, BM, BN)
            rows, row_shifts, columns, column_shifts = _exp_sums(tl.where(positive, x, float("-inf")))
            _store_stats(2, i, j, rows, columns, rows_out, columns_out, N, M, BM, BN)
            _store_stats(3, i, j, row_shifts, column_shifts, rows_out, columns_out, N, M, BM, BN)
            x = tl.where(positive, x * LN2, 0.0)
            _store_stats(4, i, j, tl.sum(x, 1), tl.sum(x, 0), rows_out, columns_out, N, M, BM, BN)
            x = tl.where(positive, 1.0, 0.0)
            _store_stats(5, i, j, tl.sum(x, 1), tl.sum(x, 0), rows_out, columns_out, N, M, BM, BN)


@triton.jit(do_not_specialize=["N", "M", "shift"])
def _gradient_kernel(
    u, v, out, scale_ptr, plan_ptr, rows_ptr, columns_ptr, table_ptr, stride, rows_in, columns_in, N, M, shift,
    D: tl.constexpr, LABELS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    STAY: tl.constexpr,
):  # fmt: skip
    factor = tl.load(scale_ptr) * LOG2E
    middle, near = tl.load(plan_ptr), tl.load(plan_ptr + 1)
    tiles = tl.cdiv(N, BM) * tl.cdiv(M, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=STAY):
        i, j = _tile_origin(tile, N, M, BM, BN, GROUP)
        z = _matmul_tile(u, v, i, j, D, BM, BN, BK)
        r, c = i + tl.arange(0, BM), j + tl.arange(0, BN)
        # 2^(x − row) + 2^(x − column): one exponential with a common shift, unless the exponents differ too much.
        if near > 0:
            row = tl.load(rows_in + N + r, mask=r < N, other=0.0)
            column = tl.load(columns_in + M + c, mask=c < M, other=0.0)
            g = tl.exp2(tl.fma(z, factor, -middle)) * (row[:, None] + column[None, :])
        else:
            row = tl.load(rows_in + r, mask=r < N, other=0.0)
            column = tl.load(columns_in + c, mask=c < M, other=0.0)
            g = tl.exp2(tl.fma(z, factor, -row[:, None])) + tl.exp2(tl.fma(z, factor, -column[None, :]))
        if LABELS == DIAGONAL:
            if not _is_off_diagonal(i, j, N, M, shift, BM, BN):
                g = tl.where((r + shift)[:, None] != c[None, :], g, 0.0)
        else:
            positive, negative = _label_masks(
                i, j, rows_ptr, columns_ptr, table_ptr, stride, N, M, shift, LABELS, BM, BN
            )
            x = z * factor
            q = tl.exp2(x - tl.load(rows_in + 2 * N + r, mask=r < N, other=0.0)[:, None])
            own = tl.load(plan_ptr + 2) * q - tl.load(rows_in + 3 * N + r, mask=r < N, other=0.0)[:, None]
            own -= q * tl.load(rows_in + 4 * N + r, mask=r < N, other=0.0)[:, None]
            q = tl.exp2(x - tl.load(columns_in + 2 * M + c, mask=c < M, other=0.0)[None, :])
            own += tl.load(plan_ptr + 3) * q - tl.load(columns_in + 3 * M + c, mask=c < M, other=0.0)[None, :]
            own -= q * tl.load(columns_in + 4 * M + c, mask=c < M, other=0.0)[None, :]
            g = tl.where(positive, own, tl.where(negative, g, 0.0))
        out.store([i, j], g.to(out.dtype))


@triton.jit
def _combine_log1p(a, b):
    """(1 + a)(1 + b) − 1, exact for small a and b."""
    return a * b + (a + b)


@triton.jit
def _log1p_sum(e, BM: tl.constexpr, BN: tl.constexpr):
    """Σ log(1 + e) for e ≤ 1, with one logarithm for 64 factors, whose product is below 2^65."""
    joint = tl.reduce(tl.reshape(e, (BM, BN // 64, 64)), 2, _combine_log1p)
    series = 1.0 - joint * (0.5 - joint * (1.0 / 3 - joint * (0.25 - joint * (0.2 - joint / 6))))
    return tl.sum(tl.sum(tl.where(joint < 0.0625, joint * series, tl.log2(1.0 + joint) * LN2), 1), 0)


@triton.jit
def _reciprocal(x):
    if USE_FAST_RECIPROCAL:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 / x
    return y


@triton.jit(do_not_specialize=["N", "M", "shift"])
def _siglip_kernel(
    u, v, out, scale_ptr, bias_ptr, rows_ptr, columns_ptr, table_ptr, stride, sums_out, N, M, shift,
    D: tl.constexpr, LABELS: tl.constexpr, WRITE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, STAY: tl.constexpr,
):  # fmt: skip
    factor, bias = tl.load(scale_ptr) * LOG2E, tl.load(bias_ptr) * LOG2E
    tiles = tl.cdiv(N, BM) * tl.cdiv(M, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=STAY):
        i, j = _tile_origin(tile, N, M, BM, BN, GROUP)
        z = _matmul_tile(u, v, i, j, D, BM, BN, BK)
        x = z * factor + bias
        if LABELS == DIAGONAL:
            if not _is_off_diagonal(i, j, N, M, shift, BM, BN):
                _, negative = _label_masks(i, j, rows_ptr, columns_ptr, table_ptr, stride, N, M, shift, LABELS, BM, BN)
                x = tl.where(negative, x, float("-inf"))
        else:
            positive, negative = _label_masks(
                i, j, rows_ptr, columns_ptr, table_ptr, stride, N, M, shift, LABELS, BM, BN
            )
            x = tl.where(positive, -x, tl.where(negative, x, float("-inf")))
        # softplus(x) = max(x, 0) + log(1 + e), with e = exp(−|x|) and a slope of e / (1 + e), or 1 / (1 + e) above 0.
        if tl.max(tl.max(x, 1), 0) < -6.0:  # most tiles contain only easy negatives: no division needed
            e = tl.exp2(x)
            loss = _log1p_sum(e, BM, BN)
            g = e - e * (e - e * e)
        else:
            e = tl.exp2(-tl.abs(x))
            loss = _log1p_sum(e, BM, BN) + tl.sum(tl.sum(tl.maximum(x, 0.0), 1), 0) * LN2
            g = tl.where(x > 0, 1.0, e) * _reciprocal(1.0 + e)
        if LABELS != DIAGONAL:
            g = tl.where(positive, -g, g)
            tl.store(sums_out + 2 * tiles + tile, tl.sum(tl.sum(g * z, 1), 0))
        tl.store(sums_out + tile, loss)
        tl.store(sums_out + tiles + tile, tl.sum(tl.sum(g, 1), 0))
        if WRITE:
            out.store([i, j], g.to(out.dtype))


@triton.jit
def _dots_kernel(u_ptr, v_ptr, out_ptr, N, D, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at, here = r[:, None].to(tl.int64) * D + c[None, :], (r < N)[:, None] & (c < D)[None, :]
    u = tl.load(u_ptr + at, mask=here, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + r, tl.sum(u * v, 1), mask=r < N)


@triton.jit
def _finish_kernel(
    d_ptr, x_ptr, other_ptr, own_ptr, factor_ptr, out_ptr, products_ptr, N, D,
    OWN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at, here = r[:, None].to(tl.int64) * D + c[None, :], (r < N)[:, None] & (c < D)[None, :]
    d = tl.load(d_ptr + at, mask=here, other=0.0)
    if OWN:
        own = tl.load(own_ptr + r, mask=r < N, other=0.0)
        d += own[:, None] * tl.load(other_ptr + at, mask=here, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
    tl.store(products_ptr + r, tl.sum(x * d, 1), mask=r < N)
    tl.store(out_ptr + at, (d * tl.load(factor_ptr)).to(out_ptr.dtype.element_ty), mask=here)


# ---- the functions of `objectives.contrastive_tiles` ----------------------------------------------------------------


def choose_tile_size(u: Tensor) -> tuple[int, int]:
    """Return the rows and columns of a block between two matrix products; their logit gradients take half a GiB.

    Smaller blocks waste compute in the last wave of tiles and in the small operations between blocks.
    """
    return (64, 64) if INTERPRETED else (16384, 16384)


def align_rows(x: Tensor) -> Tensor:
    """Pad rows to multiples of 16 bytes and make them contiguous, as the loads need."""
    missing = -x.shape[1] % (16 // x.element_size())
    x = F.pad(x, (0, missing)) if missing else x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def allocate_logit_gradients(n: int, m: int, like: Tensor) -> Tensor:
    """Allocate a buffer for the logit gradients of up to n × m pairs."""
    return like.new_empty(n, m + -m % (16 // like.element_size()))


def compute_siglip_tile(
    u: Tensor, v: Tensor, scale: Tensor, bias: Tensor, pairs: Pairs, out: Tensor | None, shape: TileShape | None = None
) -> tuple[Tensor | None, Tensor]:
    """Write logit gradients to `out` (N, M) if given. Returns it and the sums (3,) of `contrastive_tiles`.

    The third sum is computed only with labels.
    """
    shape = shape or _choose_shape(pairs, SIGLIP)
    tiles = triton.cdiv(len(u), shape.m) * triton.cdiv(len(v), shape.n)
    sums = torch.zeros(3, tiles, device=u.device)
    target = u if out is None else TensorDescriptor.from_tensor(out, [shape.m, shape.n])
    _launch(_siglip_kernel, shape, u, v, pairs, (target, scale, bias), (sums,), WRITE=out is not None)
    return out, sums.sum(1, dtype=torch.float64)


def compute_clip_stats(
    u: Tensor, v: Tensor, scale: Tensor, pairs: Pairs, shape: TileShape | None = None
) -> tuple[Tensor, Tensor]:
    """Return statistics of rows (1, N) and columns (1, M): log Σ exp over the negatives.

    With labels (4, N) and (4, M): also log Σ exp over the positives, the sum of their logits, and their number.
    """
    shape = shape or _choose_shape(pairs, STATS)
    N, M, count = len(u), len(v), 6 if pairs.has_labels else 2
    rows = torch.empty(count, triton.cdiv(M, shape.n), N, device=u.device)
    columns = torch.empty(count, triton.cdiv(N, shape.m), M, device=u.device)
    _launch(_stats_kernel, shape, u, v, pairs, (scale,), (rows, columns))
    return _merge_tiles(rows), _merge_tiles(columns)


def _merge_tiles(parts: Tensor) -> Tensor:
    """Merge the statistics of tiles (2 or 6, tiles, n) into those of all (1 or 4, n).

    The first entries are sums and their base-2 shifts, the others are plain sums.
    """
    logs = [(parts[k].log() + parts[k + 1] * LN2.value).logsumexp(0) for k in range(0, min(len(parts), 4), 2)]
    return torch.stack([*logs, *parts[4:].sum(1)])


def prepare_clip_terms(rows: Side, columns: Side) -> tuple[Tensor, Tensor, Tensor]:
    """Pack the terms of rows and columns for `compute_clip_gradients`.

    plan (4,): common shift, whether it can be used, weight of a row, weight of a column. rows (5, N) and columns
    (5, M): base-2 exponent to subtract, 2^(shift − exponent), and the last three fields of `ClipTerms`.
    """
    both = torch.cat([rows.exponent, columns.exponent]) * LOG2E.value
    counts = both.isfinite()
    low, high = both.where(counts, torch.inf).min(), both.where(counts, -torch.inf).max()
    middle = ((low + high) / 2).where(counts.any(), 0)
    plan = torch.stack([middle, (high - low < MAX_SHARED_EXPONENT_RANGE).to(both.dtype), rows.weight, columns.weight])
    lines = []
    for one in (rows, columns):
        exponent, positive = one.exponent * LOG2E.value, one.positive_lse * LOG2E.value
        terms = [exponent, torch.exp2(middle - exponent), positive, one.target_weight, one.negative_weight]
        lines.append(torch.stack(terms))
    return plan, *lines


def compute_clip_gradients(
    u: Tensor, v: Tensor, scale: Tensor, sides: tuple[Tensor, Tensor, Tensor], at: tuple[slice, slice], pairs: Pairs,
    out: Tensor, shape: TileShape | None = None,
) -> Tensor:  # fmt: skip
    """Write CLIP's logit gradients of the tile at rows and columns `at` to `out` (N, M)."""
    shape = shape or _choose_shape(pairs, SLOPES)
    plan, rows, columns = sides[0], sides[1][:, at[0]].contiguous(), sides[2][:, at[1]].contiguous()
    target = TensorDescriptor.from_tensor(out, [shape.m, shape.n])
    _launch(_gradient_kernel, shape, u, v, pairs, (target, scale, plan), (rows, columns))
    return out


def compute_row_dots(u: Tensor, v: Tensor) -> Tensor:
    """Return u_i · v_i for every row, (N,)."""
    out = torch.empty(len(u), device=u.device)
    if len(u):
        _dots_kernel[(triton.cdiv(len(u), 4),)](u, v, out, *u.shape, ROWS=4, WIDTH=triton.next_power_of_2(u.shape[1]))
    return out


def finish_gradient(
    d: Tensor, x: Tensor, other: Tensor, diagonal: Tensor | None, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (d + own · other) · factor in the dtype of x, and x_i · (d + own · other)_i (N,)."""
    out, products = torch.empty_like(x), torch.empty(len(x), device=x.device)
    if len(x):
        _finish_kernel[(triton.cdiv(len(x), 4),)](
            d, x, other, d if diagonal is None else diagonal, factor, out, products, *x.shape,
            OWN=diagonal is not None, ROWS=4, WIDTH=triton.next_power_of_2(x.shape[1]),
        )  # fmt: skip
    return out, products


def _launch(
    kernel: Any, shape: TileShape, u: Tensor, v: Tensor, pairs: Pairs, before: tuple, after: tuple, **constants
) -> None:
    N, M, D = len(u), len(v), u.shape[1]
    shift, rows, columns, table = pairs
    kind, stride = DIAGONAL, 0
    if table is not None:
        kind, stride = BOOLS if table.dtype == torch.bool else SIGNS, table.stride(0)
        table = table.view(torch.int8)
    elif rows is not None:
        kind = IDS
    programs = triton.cdiv(N, shape.m) * triton.cdiv(M, shape.n)
    if shape.is_persistent and u.is_cuda:
        processors = torch.cuda.get_device_properties(u.device).multi_processor_count
        programs = min(programs, shape.programs_per_sm * processors)
    kernel[(programs,)](
        TensorDescriptor.from_tensor(u, [shape.m, shape.k]), TensorDescriptor.from_tensor(v, [shape.n, shape.k]),
        *before, *(u if x is None else x for x in (rows, columns, table)), stride, *after, N, M, shift,
        D=D, LABELS=kind.value, BM=shape.m, BN=shape.n, BK=shape.k, GROUP=shape.group_rows, STAY=shape.is_persistent,
        num_warps=shape.num_warps, num_stages=shape.num_stages, **constants,
    )  # fmt: skip
