"""Attention backends. All compute softmax(q·kᵀ)·v under an attention plan and agree with each other.

    plain   the formula with a dense mask, in float32: the reference of the tests
    sdpa    torch's fused attention, with a dense mask where the plan needs one
    packed  each segment separately: no mask, and no compute between samples (CPU: a loop; CUDA: torch's varlen kernel)
    flex    compiled block-sparse attention, for streams with spans on CUDA

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
from vitrail.nn.attention_plans import AttentionPlan

MAX_DENSE_MASK_KEYS = 512  # up to this many keys, a dense mask is as fast as flex
MAX_LAUNCH_ROWS = 65_535  # limit of a CUDA grid dimension
MAX_SINGLE_QUERY_KEYS = 32  # up to this many keys, a single query runs without a tiled kernel


def compute_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    backend: str | None = None,
    *,
    logit_softcap: float | None = None,
) -> Tensor:
    """Compute attention of q (B, Q, H, D) over k and v (B, K, G, D), where G divides H. Returns (B, Q, H, D).

    Values may have another width than keys, which is that of the result.
    A query with no visible key gets zeros. Scores s become logit_softcap · tanh(s / logit_softcap) if it is given; only
    the backends plain and flex support it.
    """
    plan = plan.expand_rows(q.shape[0], q.shape[1], k.shape[1])
    if logit_softcap is None:
        return BACKENDS[backend or choose_backend(q, k, plan)](q, k, v, plan)
    backend = backend or ("flex" if _is_long_on_cuda(q, k) else "plain")
    if backend not in SOFTCAP_BACKENDS:
        raise ConfigError(f"backend {backend!r} has no logit_softcap", f"use {' or '.join(SOFTCAP_BACKENDS)}")
    return SOFTCAP_BACKENDS[backend](q, k, v, plan, logit_softcap)


@contextmanager
def disable_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN's attention kernels inside the context.

    Some of them return NaN gradients for queries whose scores are all far below 0 (pytorch/pytorch#196678,
    NVIDIA/cudnn-frontend#628 and #1072).
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    compiler: Any = torch.compiler.config
    torch.backends.cuda.enable_cudnn_sdp(False)
    # The compiler's cache key does not include this setting, so add it.
    tag = getattr(compiler, "cache_key_tag", None)  # not in every torch version
    try:
        with nullcontext() if tag is None else compiler.patch(cache_key_tag=f"{tag} without cuDNN's attention"):
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def choose_backend(q: Tensor, k: Tensor, plan: AttentionPlan) -> str:
    """Return the name of the fastest backend for these tensors and this plan."""
    if plan.is_maskless or (plan.prefix_length and plan.causal_prefix):  # the mask of the rest is small
        return "sdpa"
    if plan.segment_lengths is not None and (q.device.type != "cuda" or (plan.spans is None and _varlen_runs(q))):
        return "packed"
    return "flex" if _is_long_on_cuda(q, k) else "sdpa"


def _is_long_on_cuda(q: Tensor, k: Tensor) -> bool:
    """Return whether block-sparse attention is worthwhile.

    With few queries, every key is read once under any mask, and a short row has few blocks: nothing to skip.
    """
    return q.device.type == "cuda" and q.shape[1] >= 16 and k.shape[1] > MAX_DENSE_MASK_KEYS


def _repeat(k: Tensor, heads: int) -> Tensor:
    """Repeat key/value heads: (B, K, G, D) → (B, K, H, D)."""
    return k if k.shape[2] == heads else k.repeat_interleave(heads // k.shape[2], dim=2)


def _plain(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, logit_softcap: float | None = None) -> Tensor:
    H, D = q.shape[2:]
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), _repeat(k, H).float()) * D**-0.5
    if logit_softcap is not None:
        scores = logit_softcap * torch.tanh(scores / logit_softcap)
    mask = plan.mask(q.shape[1], k.shape[1], q.device)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)  # 0/0 without a visible key
    return torch.einsum("bhqk,bkhd->bqhd", weights, _repeat(v, H).float()).to(q.dtype)


def _single(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one query per row (B, 1, H, D) over a few keys, as elementwise products and sums.

    Fused kernels use tiles of 64 or more queries, which would be almost empty here. They also reject the strides that
    the compiler gives a single query.
    """
    k, v = _repeat(k, q.shape[2]), _repeat(v, q.shape[2])
    weights = ((q * k).sum(-1, dtype=torch.float32) * q.shape[-1] ** -0.5).softmax(1)  # (B, K, H)
    return (weights.to(v.dtype)[..., None] * v).sum(1, keepdim=True)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    if len(q) > MAX_LAUNCH_ROWS and plan.segments is plan.spans is plan.query_slots is None:
        parts = zip(q.split(MAX_LAUNCH_ROWS), k.split(MAX_LAUNCH_ROWS), v.split(MAX_LAUNCH_ROWS), strict=True)
        return torch.cat([_sdpa(a, b, c, plan) for a, b, c in parts])
    H = q.shape[2]
    if plan.is_maskless and q.is_cuda and q.shape[1] == 1 and k.shape[1] <= MAX_SINGLE_QUERY_KEYS:
        return _single(q, k, v)
    # The CPU kernel and the flash kernel (without a mask) support grouped heads. Other CUDA kernels fall back to a
    # slow path for them.
    supports_groups = not q.is_cuda or (plan.is_maskless and q.dtype in (torch.bfloat16, torch.float16))
    grouped = supports_groups and k.shape[2] != H
    if not grouped:
        k, v = _repeat(k, H), _repeat(v, H)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, ·, D)
    if plan.is_maskless:
        return F.scaled_dot_product_attention(q, k, v, is_causal=plan.causal, enable_gqa=grouped).transpose(1, 2)
    sizes = q.shape[2], k.shape[2]
    empty = plan.empty_query_mask(*sizes, q.device)
    if (n := plan.prefix_length) and sizes[0] == sizes[1] and empty is None:  # kernels without a mask are faster
        first = F.scaled_dot_product_attention(
            q[:, :, :n], k[:, :, :n], v[:, :, :n], is_causal=plan.causal_prefix, enable_gqa=grouped
        )
        mask = plan.mask(*sizes, q.device, n)
        rest = F.scaled_dot_product_attention(q[:, :, n:], k, v, attn_mask=mask, enable_gqa=grouped)
        return torch.cat([first.transpose(1, 2), rest.transpose(1, 2)], 1)
    mask = plan.mask(*sizes, q.device)
    if empty is not None:
        mask = mask | empty  # CUDA kernels give NaN gradients for every key of a query without a visible key
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return (out if empty is None else out.masked_fill(empty, 0.0)).transpose(1, 2)


def _packed(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    if plan.segment_lengths is None or plan.key_segment_lengths is None:
        raise ConfigError("backend 'packed' needs segments that are contiguous", "omit `backend` to select one")
    shape, D, width = q.shape, q.shape[-1], v.shape[-1]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (B·Q, H, D)
    if q.device.type == "cuda":
        starts, key_starts = plan.cu_seqlens(q.device)
        back, ahead = plan.window or (-1, -1)
        # The kernel has no causal flag: causal is a window of 0 keys ahead.
        window = (back, 0 if plan.causal else ahead)
        sizes = max(plan.segment_lengths), max(plan.key_segment_lengths)
        H = shape[2]
        v = F.pad(v, (0, D - width))  # the kernel has one head width
        out = _varlen()(
            q, _repeat(k[None], H)[0], _repeat(v[None], H)[0], starts, key_starts, *sizes, window_size=window
        )[..., :width]
    elif len({*plan.segment_lengths, *plan.key_segment_lengths}) == 1 and plan.spans is None:  # frames of one size
        q, k, v = (x.unflatten(0, (len(plan.segment_lengths), -1)) for x in (q, k, v))
        out = _sdpa(q, k, v, plan.segment_plans()[0])
    else:
        parts = q.split(plan.segment_lengths), k.split(plan.key_segment_lengths), v.split(plan.key_segment_lengths)
        segments = zip(*parts, plan.segment_plans(), strict=True)
        out = torch.cat([_sdpa(a[None], b[None], c[None], segment_plan)[0] for a, b, c, segment_plan in segments])
    return out.reshape(*shape[:3], width)


@cache
def _varlen() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch < 2.10
        return None
    return varlen_attn


def _varlen_runs(q: Tensor) -> bool:
    """Return whether torch's varlen kernel supports the dtype and head width of q."""
    return (
        _varlen() is not None
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
    )


@cache
def _flex_compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _flex(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, logit_softcap: float | None = None) -> Tensor:
    blocks = plan.block_mask(q.shape[1], k.shape[1], q.device)
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    kernel = flex_attention if torch.compiler.is_compiling() else _flex_compiled()
    # For few queries the compiler would select a decoding kernel that lacks some shapes of grouped heads.
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True}
    change: Any = None
    if logit_softcap is not None:

        def change(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
            return logit_softcap * torch.tanh(score / logit_softcap)

    return kernel(q, k, v, change, blocks, enable_gqa=grouped, kernel_options=options).transpose(1, 2)


BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, AttentionPlan], Tensor]] = {
    "plain": _plain,
    "sdpa": _sdpa,
    "packed": _packed,
    "flex": _flex,
}
SOFTCAP_BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, AttentionPlan, float], Tensor]] = {
    "plain": _plain,
    "flex": _flex,
}
"""Backends that can cap the scores."""
