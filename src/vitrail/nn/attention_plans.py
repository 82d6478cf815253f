"""Attention plan: which query can attend to which key. Built once per batch and used by every layer.

A query can attend to a key in the same segment, if the key is not in its future (when causal) and not outside its
window. Tokens of one span attend to each other in both directions, as far as the window reaches (Gemma 3):

    same segment  ∧  in window  ∧  (past ∨ same span)

Without `window_limits_spans`, the window limits only the past (PaliGemma 2): (in window ∧ past) ∨ same span.

Segments are packed samples, padding, or local windows of an image. Spans are images with bidirectional attention in a
causal text. Text-only rows of a cross-attention have a segment without keys, and get zeros. With
`shares_segment_zero`, every segment can also attend to segment 0: several questions about one image, independent of
each other.

B batch, Q queries, K keys
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.nn.kernels.materialize import materialize


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Attention plan; build it with `attention_plan`.

    `AttentionPlan()` is full attention and `AttentionPlan(causal=True)` is causal attention.
    """

    causal: bool = False
    window: tuple[int, int] | None = None  # largest distance back and ahead, −1 for no limit
    segments: Tensor | None = None  # (B, Q)
    key_segments: Tensor | None = None  # (B, K)
    spans: Tensor | None = None  # (B, Q), 0 outside every span
    key_spans: Tensor | None = None  # (B, K)
    window_limits_spans: bool = True  # whether the window limits attention inside of spans too
    shares_segment_zero: bool = False  # whether every segment can attend to segment 0
    prefix_length: int = 0  # leading tokens of every row that attend only to each other; given by the caller
    causal_prefix: bool = False  # whether the prefix is causal; otherwise it is one bidirectional span
    query_slots: Tensor | None = None  # (B, Q): slot of each query among the keys, if not its own index
    segment_lengths: tuple[int, ...] | None = None  # of the segments, if they are contiguous
    key_segment_lengths: tuple[int, ...] | None = None
    _cached: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # cached masks

    @property
    def is_maskless(self) -> bool:
        """Whether the plan is plain full or causal attention, which needs no mask."""
        return self.window is None and self.segments is None and self.spans is None and self.query_slots is None

    def with_window(self, back: int, limits_spans: bool = True) -> "AttentionPlan":
        """Return the plan with keys at most `back` slots before the query, in spans only if `limits_spans`."""
        if self.shares_segment_zero:
            raise ConfigError(
                "a sliding window counts slots, and several questions that share an image have larger distances",
                "give one question per row",
            )
        return self._cache(
            ("window", back, limits_spans),
            lambda: replace(self, window=(back, -1), window_limits_spans=limits_spans, prefix_length=0),
        )

    def without_spans(self) -> "AttentionPlan":
        """Return the plan without bidirectional spans."""
        if self.spans is None:
            return self
        return self._cache("no spans", lambda: replace(self, spans=None, key_spans=None, prefix_length=0))

    def expand_rows(self, rows: int, queries: int, keys: int) -> "AttentionPlan":
        """Return the plan for `rows` rows, repeated if it has one row. Raise if its shape does not fit."""
        if self.is_maskless or self.segments is self.spans is self.query_slots is None:
            return self
        shapes = {
            "segments": (self.segments, queries),
            "spans": (self.spans, queries),
            "query_slots": (self.query_slots, queries),
            "key_segments": (self.key_segments, keys),
        }
        for name, (ids, length) in shapes.items():
            if ids is not None and (len(ids) not in (1, rows) or ids.shape[1] != length):
                raise ConfigError(
                    f"an attention plan with {name} {tuple(ids.shape)} does not fit {rows} × {queries} queries and "
                    f"{keys} keys",
                    "build the plan from the batch it is used with",
                )
        plan_rows = next(len(ids) for ids in (self.segments, self.spans, self.query_slots) if ids is not None)
        if plan_rows == rows:
            return self
        return self._cache(("rows", rows), lambda: self._repeat_rows(rows))

    def _repeat_rows(self, rows: int) -> "AttentionPlan":
        def repeat(ids: Tensor | None) -> Tensor | None:
            return None if ids is None else ids.expand(rows, -1).contiguous()

        segments = repeat(self.segments)
        return replace(
            self,
            segments=segments,
            key_segments=segments if self.key_segments is self.segments else repeat(self.key_segments),
            spans=repeat(self.spans),
            key_spans=repeat(self.key_spans),
            query_slots=repeat(self.query_slots),
            segment_lengths=None if self.segment_lengths is None else self.segment_lengths * rows,
            key_segment_lengths=None if self.key_segment_lengths is None else self.key_segment_lengths * rows,
        )

    def _cache(self, name: Any, make: Callable[[], Any]) -> Any:
        """Compute a value once and cache it. The cache is limited, since a plan may be used with many lengths."""
        if name not in self._cached:
            if len(self._cached) >= 8:
                self._cached.clear()
            self._cached[name] = make()
        return self._cached[name]

    def to(self, device: torch.device | str) -> "AttentionPlan":
        """Return the plan with its tensors on `device`. Call it once, outside the compiled model."""

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, non_blocking=True)

        segments, spans = move(self.segments), move(self.spans)
        return AttentionPlan(
            causal=self.causal,
            window=self.window,
            segments=segments,
            key_segments=segments if self.key_segments is self.segments else move(self.key_segments),
            spans=spans,
            key_spans=spans if self.key_spans is self.spans else move(self.key_spans),
            window_limits_spans=self.window_limits_spans,
            shares_segment_zero=self.shares_segment_zero,
            prefix_length=self.prefix_length,
            causal_prefix=self.causal_prefix,
            query_slots=move(self.query_slots),
            segment_lengths=self.segment_lengths,
            key_segment_lengths=self.key_segment_lengths,
        )

    def allows(self, q: Tensor, k: Tensor, qs: Any, ks: Any, qp: Any, kp: Any) -> Tensor:
        """Apply the rule elementwise to slots (q, k), segments (qs, ks) and spans (qp, kp) of queries and keys."""
        ok = (k <= q) if self.causal else (k == k)
        if self.spans is not None and self.window_limits_spans:
            ok = ok | ((qp == kp) & (qp > 0))
        if self.window is not None:
            back, ahead = self.window
            if back >= 0:
                ok = ok & (q - k <= back)
            if ahead >= 0:
                ok = ok & (k - q <= ahead)
        if self.spans is not None and not self.window_limits_spans:
            ok = ok | ((qp == kp) & (qp > 0))
        if self.segments is not None:
            ok = ok & ((qs == ks) | (ks == 0) if self.shares_segment_zero else qs == ks)
        return ok

    def mask(self, queries: int, keys: int, device: torch.device, start: int = 0) -> Tensor:
        """Return a boolean mask (B or 1, 1, Q − start, K), True where the query can attend to the key.

        It has the queries from `start` on.
        """
        key = ("mask", queries, keys, device, start)
        return self._cache(key, lambda: self._build_mask(queries, keys, device, start))

    def _build_mask(self, queries: int, keys: int, device: torch.device, start: int) -> Tensor:
        tensors = (self.segments, self.key_segments, self.spans, self.key_spans)
        qs, ks, qp, kp = (None if x is None else x.to(device) for x in tensors)
        q = torch.arange(queries, device=device)[None] if self.query_slots is None else self.query_slots.to(device)
        k = torch.arange(keys, device=device)
        rows = [None if x is None else x[:, start:, None] for x in (qs, qp)]
        columns = [None if x is None else x[:, None, :] for x in (ks, kp)]
        mask = self.allows(q[:, start:, None], k[None, None], rows[0], columns[0], rows[1], columns[1])
        return mask.expand(-1, queries - start, keys)[:, None]

    def empty_query_mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Return a mask (B or 1, 1, Q, 1), True for queries without a visible key; None if every query sees itself."""
        if self.key_segments is self.segments:
            return None
        mask = self.mask(queries, keys, device)
        return self._cache(("empty", queries, keys, device), lambda: ~mask.any(-1, keepdim=True))

    def block_mask(self, queries: int, keys: int, device: torch.device) -> Any:
        """Return the mask as a BlockMask of flex attention, which skips empty blocks."""
        return self._cache(("blocks", queries, keys, device), lambda: self._build_block_mask(queries, keys, device))

    def _build_block_mask(self, queries: int, keys: int, device: torch.device) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        tensors = (self.query_slots, self.segments, self.key_segments, self.spans, self.key_spans)
        # Materialize them: the compiler cannot inline the computation of some of them into its kernel.
        index, segments, key_segments, spans, key_spans = (
            None if x is None else materialize(x.to(device)) for x in tensors
        )

        def mask_mod(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self.allows(
                q if index is None else index[b, q],
                k,
                None if segments is None else segments[b, q],
                None if key_segments is None else key_segments[b, k],
                None if spans is None else spans[b, q],
                None if key_spans is None else key_spans[b, k],
            )

        batch = next((len(x) for x in (segments, spans, index) if x is not None), None)
        return create_block_mask(mask_mod, batch, None, queries, keys, device=device)

    def segment_plans(self) -> list["AttentionPlan"]:
        """Return the plan of each packed segment."""
        return self._cache("pieces", self._build_segment_plans)

    def _build_segment_plans(self) -> list["AttentionPlan"]:
        assert self.segment_lengths is not None
        bare = AttentionPlan(causal=self.causal, window=self.window, window_limits_spans=self.window_limits_spans)
        if self.spans is None:
            return [bare] * len(self.segment_lengths)
        # Spans exist only in self-attention, where the keys belong to the queries.
        spans = self.spans.flatten().split(self.segment_lengths)
        return [replace(bare, spans=s[None], key_spans=s[None]) for s in spans]

    def cu_seqlens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cumulative segment lengths, (segments + 1,) int32, for queries and for keys."""
        return self._cache(("offsets", device), lambda: self._build_cu_seqlens(device))

    def _build_cu_seqlens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        assert self.segment_lengths is not None and self.key_segment_lengths is not None
        starts = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (self.segment_lengths, self.key_segment_lengths))
        queries, keys = (x.to(device, torch.int32) for x in starts)
        return queries, keys


def attention_plan(
    segments: Tensor | None = None,
    spans: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    key_segments: Tensor | None = None,
) -> AttentionPlan:
    """Build a plan for self-attention, or for cross-attention if `key_segments` is given.

    segments      (B, Q) integers: tokens attend only within their segment. Padding is a segment too, usually −1.
    spans         (B, Q) integers, 0 outside: tokens of one span attend to each other in both directions.
    window        (back, ahead): largest distance of a key in slots, −1 for no limit.
    key_segments  (B, K) integers: segments of the context.
    """
    if key_segments is not None and (segments is None or spans is not None or causal or window is not None):
        raise ConfigError(
            "a plan with key_segments is for cross-attention: it needs segments, and cannot be causal",
            "pass only segments and key_segments",
        )
    for name, ids in (("segments", segments), ("spans", spans), ("key_segments", key_segments)):
        if ids is not None and (ids.ndim != 2 or ids.is_floating_point()):
            raise ConfigError(f"{name} must be integers (B, tokens), not {ids.dtype} {tuple(ids.shape)}")
    if segments is not None and spans is not None and segments.shape != spans.shape:
        raise ConfigError(f"segments {tuple(segments.shape)} and spans {tuple(spans.shape)} differ in shape")
    if segments is not None and key_segments is not None and len(segments) != len(key_segments):
        raise ConfigError(f"segments have {len(segments)} rows and key_segments {len(key_segments)}")
    if window is not None and min(window) < -1:
        raise ConfigError(f"window {window} has a negative distance", "use −1 for no limit")
    key_segments = segments if key_segments is None else key_segments
    lengths, key_lengths = _runs(segments, key_segments)
    return AttentionPlan(
        causal=causal,
        window=window,
        segments=segments,
        key_segments=key_segments,
        spans=spans,
        key_spans=spans,
        segment_lengths=lengths,
        key_segment_lengths=key_lengths,
    )


def _runs(
    segments: Tensor | None, key_segments: Tensor | None
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the segment lengths of queries and keys, or (None, None).

    They exist if each segment is contiguous and the keys are in the order of the queries.
    """
    if segments is None or key_segments is None:
        return None, None
    ids, lengths = _row_runs(segments)
    key_ids, key_lengths = (ids, lengths) if key_segments is segments else _row_runs(key_segments)
    contiguous = len(ids.unique(dim=0)) == len(ids) and len(key_ids.unique(dim=0)) == len(key_ids)
    if not contiguous or not torch.equal(ids, key_ids):
        return None, None
    return tuple(lengths.tolist()), tuple(key_lengths.tolist())


def _row_runs(segments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (row, segment) of each run of the flattened batch, (runs, 2), and its length, (runs,)."""
    lowest = int(segments.min()) if segments.numel() else 0
    span = int(segments.max()) - lowest + 1 if segments.numel() else 1
    rows = torch.arange(len(segments), device=segments.device)[:, None]
    keys, counts = (rows * span + (segments.long() - lowest)).flatten().unique_consecutive(return_counts=True)
    return torch.stack([keys // span, keys % span + lowest], dim=1), counts
