"""KV cache of a decoder.

B batch, N new tokens, K slots, C context tokens, G key/value heads, D head width
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.nn.attention_plans import AttentionPlan


class RecurrentState(NamedTuple):
    """State of a layer with linear attention.

    inputs  (B, n, C) last inputs of the convolution
    memory  (B, H, K, V) state of each head
    """

    inputs: Tensor
    memory: Tensor


class KVCache:
    """Keys and values of all layers, and the states of layers with linear attention.

    `shapes` are the numbers of key/value heads and their width (G, D) of each layer, or (G, D, V) if values have
    another width. Latent attention keeps its latents as keys and the rotated channels of its keys as values. The size
    is fixed if a capacity is given; otherwise it doubles when full.

    Each row has its own length, so prompts of different lengths can share a batch, each starting at slot 0:

        plan = cache.extend(N, counts)        # reserve slots; counts (B,) if rows have fewer than N tokens
        for i, block in enumerate(blocks):
            x = block(x, plan, cache=cache.layer(i))

    A short row also writes padding past its count. Its next tokens overwrite the padding; until then causal attention
    hides it. The cache is for generation and has no gradients.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        batch_size: int,
        *,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        if capacity is not None and capacity < 1:
            raise ConfigError(f"KV cache capacity is {capacity}", "use at least 1, or None for a growing cache")
        self.is_fixed_size = capacity is not None
        self._capacity = 64 if capacity is None else capacity
        self.dtype, self.device = dtype, torch.device(device)
        rows = (batch_size, self._capacity)
        self.k, self.v = (  # (B, K, G, D) each
            [torch.zeros(*rows, shape[0], shape[at], dtype=dtype, device=device) for shape in shapes] for at in (1, -1)
        )
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)  # (B,) tokens of each row
        self.max_row_length = 0  # tokens of the longest row, known without a device synchronization
        self.has_equal_lengths = True  # whether all rows have the same length
        self.context: CrossAttentionContext | None = None  # context of cross-attention
        self.recurrent_states: dict[int, RecurrentState] = {}  # of layers with linear attention
        self.image_rows: Tensor | None = None  # (B,) rows with an image, for image LoRA
        self._counts: Tensor | None = None  # (B,) real tokens among those being written; None for all
        self._slots = torch.zeros(batch_size, 0, dtype=torch.long, device=device)  # (B, N) slots being written
        self._first = False  # whether the tokens being written are the first of every row

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def slots(self) -> Tensor:
        """Slots (B, N) of the tokens of the last `extend`, which are their positions in the sequence."""
        return self._slots

    def extend(
        self,
        num_tokens: int,
        counts: Tensor | None = None,
        spans: Tensor | None = None,
        window: tuple[int, int] | None = None,
    ) -> AttentionPlan:
        """Reserve slots for `num_tokens` tokens per row and return the attention plan of these queries.

        `counts` (B,) is the number of real tokens of each row. `spans` (B, N) are bidirectional as in
        `attention_plan`; a span must lie within one call.
        """
        reached = self.max_row_length + num_tokens
        if reached > self.capacity:
            self._make_room(reached)
        self._first, self._counts = self.max_row_length == 0, counts
        self._slots = self.lengths[:, None] + torch.arange(num_tokens, device=self.lengths.device)  # (B, N)
        if counts is None:
            self.lengths, self.max_row_length = self.lengths + num_tokens, reached
        else:
            if int(counts.min()) < 0 or int(counts.max()) > num_tokens:
                raise ConfigError(f"counts {counts.tolist()} are not between 0 and {num_tokens} tokens")
            self.lengths = self.lengths + counts.to(self.lengths)
            self.max_row_length, self.has_equal_lengths = int(self.lengths.max()), False
        if spans is None and window is None:
            if self._first:
                return AttentionPlan(causal=True)  # each token at its own position: no mask needed
            if num_tokens == 1 and self.has_equal_lengths:
                return AttentionPlan()  # one token that attends to all
        key_spans = None
        if spans is not None:
            spans = spans.to(self.lengths)
            key_spans = torch.zeros(len(spans), reached, dtype=spans.dtype, device=spans.device)
            key_spans = key_spans.scatter(1, self._slots, spans)[:, : self._seen]
        return AttentionPlan(causal=True, window=window, spans=spans, key_spans=key_spans, query_slots=self._slots)

    @property
    def _seen(self) -> int:
        """Number of slots that a pass attends to: all filled slots, and the padding in the first pass."""
        return self._slots.shape[1] if self._first else self.max_row_length

    def crop(self, lengths: Tensor) -> None:
        """Keep only the first `lengths` (B,) tokens of each row."""
        self._check_removable()
        self.lengths = torch.minimum(lengths.to(self.lengths), self.lengths)
        self.max_row_length = int(self.lengths.max())
        self.has_equal_lengths = bool((self.lengths == self.lengths[0]).all())

    def select_tokens(self, keep_mask: Tensor) -> None:
        """Keep only the tokens that `keep_mask` (B, K) selects, and close the gaps.

        Keys retain their rotary positions, so afterwards the position of the next token differs from its slot.
        """
        self._check_removable()
        K = keep_mask.shape[1]
        selected = keep_mask.to(self.lengths.device) & (
            torch.arange(K, device=self.lengths.device) < self.lengths[:, None]
        )
        order = (~selected).long().argsort(dim=1, stable=True)[:, : int(selected.sum(1).max())]  # (B, n)
        rows = torch.arange(len(order), device=order.device)[:, None]
        for store in (*self.k, *self.v):
            store[:, : order.shape[1]] = store[rows, order]
        if not self.is_fixed_size:
            self._capacity = max(64, order.shape[1])
            self.k, self.v = ([x[:, : self._capacity].clone() for x in stores] for stores in (self.k, self.v))
        self.lengths = selected.sum(1)
        self.max_row_length, self.has_equal_lengths = order.shape[1], bool((self.lengths == self.lengths[0]).all())

    def clear(self) -> None:
        """Remove all tokens and keep the allocation."""
        self.lengths = torch.zeros_like(self.lengths)
        self.max_row_length, self.has_equal_lengths = 0, True
        self.context = None
        self.recurrent_states = {}
        self.image_rows = None

    def _check_removable(self) -> None:
        if self.recurrent_states:
            raise ConfigError(
                "tokens cannot be removed from the state of linear attention", "clear the cache, or use another decoder"
            )

    def layer(self, i: int) -> "LayerCache":
        return LayerCache(self, i)

    def _make_room(self, num_slots: int) -> None:
        if self.is_fixed_size:
            raise ConfigError(
                f"the KV cache has a capacity of {self.capacity} tokens, and {num_slots} are needed",
                "create it with a larger capacity, or without one so that it grows",
            )
        grown = max(num_slots, 2 * self.capacity)
        padding = (0, 0, 0, 0, 0, grown - self.capacity)
        self.k, self.v = ([torch.nn.functional.pad(x, padding) for x in stores] for stores in (self.k, self.v))
        self._capacity = grown


class KeyValues(NamedTuple):
    """Projected keys and values (B, C, G, D) of a context of C tokens."""

    k: Tensor
    v: Tensor


class CrossAttentionContext(NamedTuple):
    """Keys and values for each cross-attention of a decoder, and the attention plan of the next tokens."""

    key_values: list[KeyValues]
    plan: AttentionPlan


class LayerCache(NamedTuple):
    """View of one layer of a cache."""

    cache: KVCache
    layer: int

    @property
    def counts(self) -> Tensor | None:
        """Number of real tokens (B,) among those being written; None for all."""
        return self.cache._counts

    @property
    def state(self) -> RecurrentState | None:
        """State of the layer with linear attention before the tokens being written."""
        return self.cache.recurrent_states.get(self.layer)

    def write_state(self, state: RecurrentState) -> None:
        self.cache.recurrent_states[self.layer] = state

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values (B, N, G, D) and return all of them (B, ·, G, D)."""
        cache, slots = self.cache, self.cache._slots
        if cache._first:  # all rows start at slot 0, so nothing else is in the cache
            for store, new in ((cache.k, k), (cache.v, v)):
                store[self.layer][:, : slots.shape[1]] = new.detach()
            return k, v
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        with torch.no_grad():
            for store, new in ((cache.k, k), (cache.v, v)):
                store[self.layer].index_put_((rows, slots), new.to(cache.dtype))
        return cache.k[self.layer][:, : cache._seen], cache.v[self.layer][:, : cache._seen]
