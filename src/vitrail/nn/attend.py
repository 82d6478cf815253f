"""softmax(q·kᵀ)·v under a plan, by several routes that agree.

    plain   the textbook formula with a dense mask, in float32: what the others are tested against
    sdpa    torch's fused attention, with a dense mask where the plan needs one
    packed  every segment on its own: no mask and no work between samples (CPU: a loop; CUDA: torch's varlen kernel)
    flex    block-sparse, compiled, for streams with spans on CUDA

B batch, Q queries, K keys, H heads, G key/value heads, D head width
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from vitrail.errors import ConfigError
from vitrail.nn.plan import Plan

SHORT = 512  # keys of a row that a dense mask serves as well
LAUNCH = 65_535  # rows of one: CUDA's grids have no more
KEYS = 32  # rows of one query each, on no more keys than these, are no work for a kernel with tiles


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, route: str | None = None) -> Tensor:
    """q (B, Q, H, D), k and v (B, K, G, D), G divides H → (B, Q, H, D). A query that sees nothing gets zeros."""
    plan = plan.fitted(q.shape[0], q.shape[1], k.shape[1])
    return ROUTES[route or choose_route(q, k, plan)](q, k, v, plan)


@contextmanager
def sound_gradients() -> Iterator[None]:
    """Without cuDNN's kernels, whatever else torch may choose from: of queries whose scores are all far below 0 some of
    them make gradients of NaN (pytorch/pytorch#196678, NVIDIA/cudnn-frontend#628 and #1072)."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    compiler: Any = torch.compiler.config
    torch.backends.cuda.enable_cudnn_sdp(False)
    # What was compiled with them lies in a cache on disk, whose keys do not know of this choice.
    tag = getattr(compiler, "cache_key_tag", None)  # which not every torch has
    try:
        with nullcontext() if tag is None else compiler.patch(cache_key_tag=f"{tag} without cuDNN's attention"):
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def choose_route(q: Tensor, k: Tensor, plan: Plan) -> str:
    if plan.simple:
        return "sdpa"
    if plan.lengths is not None and (q.device.type != "cuda" or (plan.spans is None and _varlen_runs(q))):
        return "packed"
    # A few queries against a cache read the keys once however they are masked, and of a short row the blocks are few:
    # block-sparsity has nothing to skip.
    if q.device.type == "cuda" and q.shape[1] >= 16 and k.shape[1] > SHORT:
        return "flex"
    return "sdpa"


def _repeat(k: Tensor, heads: int) -> Tensor:
    """(B, K, G, D) → (B, K, H, D)"""
    return k if k.shape[2] == heads else k.repeat_interleave(heads // k.shape[2], dim=2)


def _plain(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    H, D = q.shape[2:]
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), _repeat(k, H).float()) * D**-0.5
    seen = plan.mask(q.shape[1], k.shape[1], q.device)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0.0)  # 0/0 where nothing is seen
    return torch.einsum("bhqk,bkhd->bqhd", weights, _repeat(v, H).float()).to(q.dtype)


def _single(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query a row (B, 1, H, D) that sees all of a few keys, as products and sums: fused kernels work on tiles of 64
    queries and more, of which all but one would be empty, and refuse the strides that a compiler gives a lone query."""
    k, v = _repeat(k, q.shape[2]), _repeat(v, q.shape[2])
    weights = ((q * k).sum(-1, dtype=torch.float32) * q.shape[-1] ** -0.5).softmax(1)  # (B, K, H)
    return (weights.to(v.dtype)[..., None] * v).sum(1, keepdim=True)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    if len(q) > LAUNCH and plan.segments is plan.spans is plan.index is None:
        parts = zip(q.split(LAUNCH), k.split(LAUNCH), v.split(LAUNCH), strict=True)
        return torch.cat([_sdpa(a, b, c, plan) for a, b, c in parts])
    H = q.shape[2]
    if plan.simple and q.is_cuda and q.shape[1] == 1 and k.shape[1] <= KEYS:
        return _single(q, k, v)
    # Grouped heads are read as they are on the CPU, and by the flash kernel, which knows no mask; the other CUDA
    # kernels would fall back to a slow route for them.
    as_they_are = not q.is_cuda or (plan.simple and q.dtype in (torch.bfloat16, torch.float16))
    grouped = as_they_are and k.shape[2] != H
    if not grouped:
        k, v = _repeat(k, H), _repeat(v, H)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, ·, D)
    if plan.simple:
        return F.scaled_dot_product_attention(q, k, v, is_causal=plan.causal, enable_gqa=grouped).transpose(1, 2)
    sizes = q.shape[2], k.shape[2]
    seen, blind = plan.mask(*sizes, q.device), plan.blind(*sizes, q.device)
    if (n := plan.lead) and sizes[0] == sizes[1] and blind is None:  # kernels without a mask are the faster
        first = F.scaled_dot_product_attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], enable_gqa=grouped)
        rest = F.scaled_dot_product_attention(q[:, :, n:], k, v, attn_mask=seen[:, :, n:], enable_gqa=grouped)
        return torch.cat([first.transpose(1, 2), rest.transpose(1, 2)], 1)
    if blind is not None:
        seen = seen | blind  # of a query that sees nothing CUDA's kernels make gradients of NaN, for every key
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)
    return (out if blind is None else out.masked_fill(blind, 0.0)).transpose(1, 2)


def _packed(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    if plan.lengths is None or plan.key_lengths is None:
        raise ConfigError("the segments of this plan are broken up", "leave the route to `attend`")
    shape = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B·Q, H, D)
    if q.device.type == "cuda":
        starts, key_starts = plan.offsets(q.device)
        back, ahead = plan.window or (-1, -1)
        # The kernel's window is the plan's, and causal is a window that reaches nowhere ahead.
        window = (back, 0 if plan.causal else ahead)
        sizes = max(plan.lengths), max(plan.key_lengths)
        H = shape[2]
        out = _varlen()(
            q, _repeat(k[None], H)[0], _repeat(v[None], H)[0], starts, key_starts, *sizes, window_size=window
        )
    else:
        pieces = q.split(plan.lengths), k.split(plan.key_lengths), v.split(plan.key_lengths)
        alone = zip(*pieces, plan.pieces(), strict=True)
        out = torch.cat([_sdpa(a[None], b[None], c[None], piece)[0] for a, b, c, piece in alone])
    return out.view(shape)


@cache
def _varlen() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch < 2.10
        return None
    return varlen_attn


def _varlen_runs(q: Tensor) -> bool:
    """Half precision and the head widths of the flash kernels."""
    return (
        _varlen() is not None
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
    )


@cache
def _flex_compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _flex(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    blocks = plan.block_mask(q.shape[1], k.shape[1], q.device)
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    kernel = flex_attention if torch.compiler.is_compiling() else _flex_compiled()
    # For few queries the compiler would turn to a decoding kernel that lacks some shapes of grouped heads.
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True}
    return kernel(q, k, v, block_mask=blocks, enable_gqa=grouped, kernel_options=options).transpose(1, 2)


ROUTES: dict[str, Callable[[Tensor, Tensor, Tensor, Plan], Tensor]] = {
    "plain": _plain,
    "sdpa": _sdpa,
    "packed": _packed,
    "flex": _flex,
}
