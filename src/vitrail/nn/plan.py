"""The attention plan: which query sees which key, decided once a batch and used by every layer.

One rule covers the whole family. A query sees a key when both lie in the same segment, and the key is not in its
future (if causal) nor outside its window, except that tokens of one span always see each other:

    same segment  ∧  ((past ∧ in window)  ∨  same span)

Packed samples, padding and local windows over a picture are segments; pictures read both ways inside a causal text
are spans; text-only rows of a cross-attention have a segment no key carries, and get zeros. Of a `common` plan every
segment sees segment 0 as its own: a picture of which several things are asked, none of them knowing of the others.

B batch, Q queries, K keys
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.nn.kernels.settled import settled


@dataclass(frozen=True, eq=False)
class Plan:
    """Made by `attention_plan`. The bare `Plan()` lets everything see everything, `Plan(causal=True)` the past."""

    causal: bool = False
    window: tuple[int, int] | None = None  # how far back and ahead, −1 for any distance
    segments: Tensor | None = None  # (B, Q)
    key_segments: Tensor | None = None  # (B, K)
    spans: Tensor | None = None  # (B, Q), 0 outside every span
    key_spans: Tensor | None = None  # (B, K)
    common: bool = False  # keys of segment 0 are of every segment
    lead: int = 0  # so many tokens come first in every row, see each other, and nothing else; said, not found out
    index: Tensor | None = None  # (B, Q): the slot of each query among the keys, where that is not its own place
    lengths: tuple[int, ...] | None = None  # of the segments, where they lie one behind the other
    key_lengths: tuple[int, ...] | None = None
    _made: dict[Any, Any] = field(
        default_factory=dict, init=False, repr=False
    )  # masks, while the tensors stay as they are

    @property
    def simple(self) -> bool:
        """Nothing but a direction: the kernels need no mask."""
        return self.window is None and self.segments is None and self.spans is None and self.index is None

    def fitted(self, rows: int, queries: int, keys: int) -> "Plan":
        """The plan for so many rows: itself, or repeated if it describes one row; refused where it does not fit."""
        if self.simple or self.segments is self.spans is self.index is None:
            return self
        for name, wanted in (("segments", queries), ("spans", queries), ("index", queries), ("key_segments", keys)):
            ids = getattr(self, name)
            if ids is not None and (len(ids) not in (1, rows) or ids.shape[1] != wanted):
                raise ConfigError(
                    f"a plan with {name} {tuple(ids.shape)} does not fit {rows} × {queries} queries on {keys} keys",
                    "make the plan from the batch it is used with",
                )
        held = next(len(ids) for ids in (self.segments, self.spans, self.index) if ids is not None)
        if held == rows:
            return self
        return self._remember(("rows", rows), lambda: self._repeated(rows))

    def _repeated(self, rows: int) -> "Plan":
        def repeat(ids: Tensor | None) -> Tensor | None:
            return None if ids is None else ids.expand(rows, -1).contiguous()

        segments = repeat(self.segments)
        return replace(
            self,
            segments=segments,
            key_segments=segments if self.key_segments is self.segments else repeat(self.key_segments),
            spans=repeat(self.spans),
            key_spans=repeat(self.key_spans),
            index=repeat(self.index),
            lengths=None if self.lengths is None else self.lengths * rows,
            key_lengths=None if self.key_lengths is None else self.key_lengths * rows,
        )

    def _remember(self, name: Any, make: Callable[[], Any]) -> Any:
        """Made once and kept, but not for every length a plan was ever used with."""
        if name not in self._made:
            if len(self._made) >= 8:
                self._made.clear()
            self._made[name] = make()
        return self._made[name]

    def to(self, device: torch.device | str) -> "Plan":
        """The same plan with its tensors on `device`; do this once, outside the compiled model."""

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, non_blocking=True)

        segments, spans = move(self.segments), move(self.spans)
        return Plan(
            causal=self.causal,
            window=self.window,
            segments=segments,
            key_segments=segments if self.key_segments is self.segments else move(self.key_segments),
            spans=spans,
            key_spans=spans if self.key_spans is self.spans else move(self.key_spans),
            common=self.common,
            lead=self.lead,
            index=move(self.index),
            lengths=self.lengths,
            key_lengths=self.key_lengths,
        )

    def sees(self, q: Tensor, k: Tensor, qs: Any, ks: Any, qp: Any, kp: Any) -> Tensor:
        """The rule, elementwise, over slots (q, k), segments (qs, ks) and spans (qp, kp)."""
        ok = (k <= q) if self.causal else (k == k)
        if self.window is not None:
            back, ahead = self.window
            if back >= 0:
                ok = ok & (q - k <= back)
            if ahead >= 0:
                ok = ok & (k - q <= ahead)
        if self.spans is not None:
            ok = ok | ((qp == kp) & (qp > 0))
        if self.segments is not None:
            ok = ok & ((qs == ks) | (ks == 0) if self.common else qs == ks)
        return ok

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """(B or 1, 1, Q, K) booleans, True where the query sees the key."""
        return self._remember(("mask", queries, keys, device), lambda: self._mask(queries, keys, device))

    def _mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        tensors = (self.segments, self.key_segments, self.spans, self.key_spans)
        qs, ks, qp, kp = (None if x is None else x.to(device) for x in tensors)
        q = torch.arange(queries, device=device)[None] if self.index is None else self.index.to(device)
        k = torch.arange(keys, device=device)
        rows = [None if x is None else x[:, :, None] for x in (qs, qp)]
        columns = [None if x is None else x[:, None, :] for x in (ks, kp)]
        seen = self.sees(q[:, :, None], k[None, None], rows[0], columns[0], rows[1], columns[1])
        return seen.expand(-1, queries, keys)[:, None]

    def blind(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """(B or 1, 1, Q, 1) booleans, True where the query sees no key; None where each sees its own."""
        if self.key_segments is self.segments:
            return None
        seen = self.mask(queries, keys, device)
        return self._remember(("blind", queries, keys, device), lambda: ~seen.any(-1, keepdim=True))

    def block_mask(self, queries: int, keys: int, device: torch.device) -> Any:
        """The same rule as a flex-attention BlockMask: blocks nothing sees are skipped."""
        return self._remember(("blocks", queries, keys, device), lambda: self._block_mask(queries, keys, device))

    def _block_mask(self, queries: int, keys: int, device: torch.device) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        tensors = (self.index, self.segments, self.key_segments, self.spans, self.key_spans)
        # Made, not to be made: a compiler that writes the rule into its kernel trips over how some of them come to be.
        index, segments, key_segments, spans, key_spans = (
            None if x is None else settled(x.to(device)) for x in tensors
        )

        def seen(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self.sees(
                q if index is None else index[b, q],
                k,
                None if segments is None else segments[b, q],
                None if key_segments is None else key_segments[b, k],
                None if spans is None else spans[b, q],
                None if key_spans is None else key_spans[b, k],
            )

        batch = next((len(x) for x in (segments, spans, index) if x is not None), None)
        return create_block_mask(seen, batch, None, queries, keys, device=device)

    def pieces(self) -> list["Plan"]:
        """What the plan says within each packed segment, one by one."""
        return self._remember("pieces", self._pieces)

    def _pieces(self) -> list["Plan"]:
        assert self.lengths is not None
        bare = Plan(causal=self.causal, window=self.window)
        if self.spans is None:
            return [bare] * len(self.lengths)
        # Spans come with self-attention alone, where keys are the queries.
        cut = self.spans.flatten().split(self.lengths)
        return [replace(bare, spans=s[None], key_spans=s[None]) for s in cut]

    def offsets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where each packed segment starts, (segments + 1,) int32, for queries and for keys."""
        return self._remember(("offsets", device), lambda: self._offsets(device))

    def _offsets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        assert self.lengths is not None and self.key_lengths is not None
        starts = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (self.lengths, self.key_lengths))
        queries, keys = (x.to(device, torch.int32) for x in starts)
        return queries, keys


def attention_plan(
    segments: Tensor | None = None,
    spans: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    key_segments: Tensor | None = None,
) -> Plan:
    """A plan for self-attention, or for cross-attention when `key_segments` are given.

    segments      (B, Q) integers: tokens see only their own. Padding is a segment like any other (−1 by custom).
    spans         (B, Q) integers, 0 outside: tokens of one span see each other, whatever the direction.
    window        (back, ahead): how many slots away a key may lie, −1 for any distance.
    key_segments  (B, K) integers: the segments of the context that the queries look at.
    """
    if key_segments is not None and (segments is None or spans is not None or causal or window is not None):
        raise ConfigError(
            "a plan with key_segments is a cross-attention: it needs segments, and has no order to be causal in",
            "give segments and key_segments alone",
        )
    for name, ids in (("segments", segments), ("spans", spans), ("key_segments", key_segments)):
        if ids is not None and (ids.ndim != 2 or ids.is_floating_point()):
            raise ConfigError(f"{name} must be integers (B, tokens), not {ids.dtype} {tuple(ids.shape)}")
    if segments is not None and spans is not None and segments.shape != spans.shape:
        raise ConfigError(f"segments {tuple(segments.shape)} and spans {tuple(spans.shape)} differ in shape")
    if segments is not None and key_segments is not None and len(segments) != len(key_segments):
        raise ConfigError(f"{len(segments)} rows of queries cannot look at {len(key_segments)} rows of keys")
    if window is not None and min(window) < -1:
        raise ConfigError(f"window {window} reaches a negative distance", "use −1 for any distance")
    key_segments = segments if key_segments is None else key_segments
    lengths, key_lengths = _runs(segments, key_segments)
    return Plan(
        causal=causal,
        window=window,
        segments=segments,
        key_segments=key_segments,
        spans=spans,
        key_spans=spans,
        lengths=lengths,
        key_lengths=key_lengths,
    )


def _runs(
    segments: Tensor | None, key_segments: Tensor | None
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Lengths of the segments if each is one unbroken run and keys come in the queries' order, else (None, None)."""
    if segments is None or key_segments is None:
        return None, None
    ids, lengths = _row_runs(segments)
    key_ids, key_lengths = (ids, lengths) if key_segments is segments else _row_runs(key_segments)
    unbroken = len(ids.unique(dim=0)) == len(ids) and len(key_ids.unique(dim=0)) == len(key_ids)
    if not unbroken or not torch.equal(ids, key_ids):
        return None, None
    return tuple(lengths.tolist()), tuple(key_lengths.tolist())


def _row_runs(segments: Tensor) -> tuple[Tensor, Tensor]:
    """(runs, 2) the (row, segment) of each run over the flattened batch, and (runs,) its length."""
    least = int(segments.min()) if segments.numel() else 0
    span = int(segments.max()) - least + 1 if segments.numel() else 1
    rows = torch.arange(len(segments), device=segments.device)[:, None]
    keys, counts = (rows * span + (segments.long() - least)).flatten().unique_consecutive(return_counts=True)
    return torch.stack([keys // span, keys % span + least], dim=1), counts
