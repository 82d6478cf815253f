"""Keys and values kept between steps of generation.

B batch, N new tokens, K slots, C context tokens, G key/value heads, D head width
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.nn.plan import Plan


class KVCache:
    """One cache for all layers. Fixed when a capacity is given, otherwise it grows by doubling.

    Every row has a length of its own, so prompts of unequal length sit side by side, each starting at slot 0:

        plan = cache.extend(N, counts)        # reserve slots; counts (B,) where rows bring fewer than N tokens
        for i, block in enumerate(blocks):
            x = block(x, plan, cache=cache.layer(i))

    Slots a short row wrote past its count are overwritten by its next tokens, and are never seen before that: they lie
    in the future of every query. The cache is for generation: what it holds carries no gradient.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        *,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        if capacity is not None and capacity < 1:
            raise ConfigError(
                f"a cache of {capacity} tokens holds nothing", "give at least 1, or none so that it grows"
            )
        self.fixed = capacity is not None
        shape = (layers, batch, 64 if capacity is None else capacity, kv_heads, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)  # (layers, B, K, G, D)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # (B,) tokens each row holds
        self.filled = 0  # tokens of the longest row, without asking the device
        self.even = True  # all rows are of one length
        self.context: Context | None = None  # what cross-attention looks at
        self._slots = torch.zeros(batch, 0, dtype=torch.long, device=device)  # (B, N) being written
        self._first = False  # the tokens being written are the first of every row

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    @property
    def slots(self) -> Tensor:
        """(B, N) where the tokens of the last `extend` lie: their positions in a text."""
        return self._slots

    def extend(
        self, new: int, counts: Tensor | None = None, spans: Tensor | None = None, window: tuple[int, int] | None = None
    ) -> Plan:
        """Reserve slots for `new` tokens a row and give the plan of those queries against the cache.

        `counts` (B,): how many of each row's tokens are real. `spans` (B, N) read both ways as in `attention_plan`; a
        span lies within one call.
        """
        reached = self.filled + new
        if reached > self.capacity:
            self._make_room(reached)
        self._first = self.filled == 0
        self._slots = self.lengths[:, None] + torch.arange(new, device=self.lengths.device)  # (B, N)
        if counts is None:
            self.lengths, self.filled = self.lengths + new, reached
        else:
            if int(counts.min()) < 0 or int(counts.max()) > new:
                raise ConfigError(f"rows of {new} tokens cannot hold {counts.tolist()} real ones")
            self.lengths = self.lengths + counts.to(self.lengths)
            self.filled, self.even = int(self.lengths.max()), False
        if spans is None and window is None:
            if self._first:
                return Plan(causal=True)  # every token at its own place: the kernels need no mask
            if new == 1 and self.even:
                return Plan()  # one token that sees all there is
        key_spans = None
        if spans is not None:
            spans = spans.to(self.lengths)
            key_spans = torch.zeros(len(spans), reached, dtype=spans.dtype, device=spans.device)
            key_spans = key_spans.scatter(1, self._slots, spans)[:, : self._seen]
        return Plan(causal=True, window=window, spans=spans, key_spans=key_spans, index=self._slots)

    @property
    def _seen(self) -> int:
        """Slots that a pass looks at: all that hold a token, and on the first pass the padding beside them."""
        return self._slots.shape[1] if self._first else self.filled

    def rewind(self, lengths: Tensor) -> None:
        """Forget all but the first so many tokens (B,) of each row; what lay behind them is in the future again."""
        self.lengths = torch.minimum(lengths.to(self.lengths), self.lengths)
        self.filled, self.even = int(self.lengths.max()), bool((self.lengths == self.lengths[0]).all())

    def keep(self, kept: Tensor) -> None:
        """Of all rows (B, K) from the first slot on, forget the tokens that are not `kept`; those behind move up. They
        were turned to their positions when they were read, and the next token's is no longer its slot's."""
        K = kept.shape[1]
        there = kept.to(self.lengths.device) & (torch.arange(K, device=self.lengths.device) < self.lengths[:, None])
        order = (~there).long().argsort(dim=1, stable=True)[:, : int(there.sum(1).max())]  # (B, n)
        rows = torch.arange(len(order), device=order.device)[:, None]
        for store in (self.k, self.v):
            store[:, :, : order.shape[1]] = store[:, rows, order]
        if not self.fixed:
            self.k, self.v = (x[:, :, : max(64, order.shape[1])].clone() for x in (self.k, self.v))
        self.lengths = there.sum(1)
        self.filled, self.even = order.shape[1], bool((self.lengths == self.lengths[0]).all())

    def clear(self) -> None:
        """Forget every token; the room stays. Old keys and values lie in the future of what comes next."""
        self.lengths = torch.zeros_like(self.lengths)
        self.filled, self.even = 0, True
        self.context = None

    def layer(self, i: int) -> "LayerCache":
        return LayerCache(self, i)

    def _make_room(self, needed: int) -> None:
        if self.fixed:
            raise ConfigError(
                f"the cache holds {self.capacity} tokens and {needed} are needed",
                "make it with a larger capacity, or without one so that it grows",
            )
        grown = max(needed, 2 * self.capacity)
        self.k, self.v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, grown - self.capacity)) for x in (self.k, self.v))


class Kept(NamedTuple):
    """Keys and values (B, C, G, D) of a context of C tokens, made once and looked at many times."""

    k: Tensor
    v: Tensor


class Context(NamedTuple):
    """What the cross-attentions of a decoder look at, one `Kept` each, and what the next tokens see of it."""

    kept: list[Kept]
    plan: Plan


class LayerCache(NamedTuple):
    """One layer's share of a cache."""

    cache: KVCache
    layer: int

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values (B, N, G, D) and give all there are (B, filled, G, D)."""
        cache, slots = self.cache, self.cache._slots
        if cache._first:  # every row's tokens lie at the same slots, and are all there is
            for store, new in ((cache.k, k), (cache.v, v)):
                store[self.layer, :, : slots.shape[1]] = new.detach()
            return k, v
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        with torch.no_grad():
            for store, new in ((cache.k, k), (cache.v, v)):
                store[self.layer].index_put_((rows, slots), new.to(store.dtype))
        return cache.k[self.layer, :, : cache._seen], cache.v[self.layer, :, : cache._seen]
