"""Keys and values kept between steps of generation.

B batch, N new tokens, K slots, G key/value heads, D head width
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
    in the future of every query. The cache is for generation; no gradient flows through it.
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
        self.fixed = capacity is not None
        shape = (layers, batch, capacity or 64, kv_heads, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)  # (layers, B, K, G, D)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # (B,) tokens each row holds
        self.filled = 0  # slots in use by the longest row, without asking the device
        self._slots = torch.zeros(batch, 0, dtype=torch.long, device=device)  # (B, N) being written

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    def extend(
        self,
        new: int,
        counts: Tensor | None = None,
        spans: Tensor | None = None,
        window: tuple[int, int] | None = None,
    ) -> Plan:
        """Reserve slots for `new` tokens a row and give the plan of those queries against the cache.

        `spans` (B, N) read both ways as in `attention_plan`; a span lies within one call.
        """
        if self.filled + new > self.capacity:
            self._make_room(self.filled + new)
        empty = self.filled == 0
        self._slots = self.lengths[:, None] + torch.arange(new, device=self.lengths.device)  # (B, N)
        self.lengths = self.lengths + (new if counts is None else counts.to(self.lengths))
        self.filled += new
        if empty and spans is None and window is None:
            return Plan(causal=True)  # every token at its own place: the kernels need no mask
        key_spans = None
        if spans is not None:
            spans = spans.to(self.lengths)
            key_spans = torch.zeros(len(spans), self.filled, dtype=spans.dtype, device=spans.device)
            key_spans = key_spans.scatter(1, self._slots, spans)
        return Plan(causal=True, window=window, spans=spans, key_spans=key_spans, index=self._slots)

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


class LayerCache(NamedTuple):
    """One layer's share of a cache."""

    cache: KVCache
    layer: int

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values (B, N, G, D) and give all there are (B, filled, G, D)."""
        cache, slots = self.cache, self.cache._slots
        if cache.filled == slots.shape[1]:  # the first tokens of every row lie at the same slots, and are all there is
            for store, new in ((cache.k, k), (cache.v, v)):
                store[self.layer, :, : cache.filled] = new.detach()
            return k, v
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        with torch.no_grad():
            for store, new in ((cache.k, k), (cache.v, v)):
                store[self.layer].index_put_((rows, slots), new.to(store.dtype))
        return cache.k[self.layer, :, : cache.filled], cache.v[self.layer, :, : cache.filled]
