"""Paged KV cache: keys and values in pages that sequences share, and attention over them.

A sequence owns a table of pages. Slot s of a sequence is slot s % S of page table[s // S]. The queries of several
sequences form one row of tokens, so that a pass computes nothing for padding.

    passes = PagedPass(cache, rows, …)                       # which sequences, and which of their slots are written
    decoder.forward_embeddings(embeds, positions, plan, cache=passes)

N tokens of a pass, R sequences of a pass, P pages, S slots per page, M pages of the longest table, G key/value heads,
H heads, D head width
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.nn.attention_backends import compute_attention
from vitrail.nn.attention_plans import AttentionPlan
from vitrail.nn.kernels import HAS_TRITON

KERNEL_HEAD_DIMS = frozenset((16, 32, 64, 128, 256))
TILE_ROWS = 64  # queries times heads of a group in a tile of the kernel
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class PagedKVCache:
    """Keys and values of all layers in pages.

    `shapes` are the numbers of key/value heads and their width (G, D) of each layer. Page 0 belongs to no sequence:
    rows that only pad a batch write to it.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        num_pages: int,
        page_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        if num_pages < 2 or page_size < 1:
            raise ConfigError(
                f"a paged KV cache has {num_pages} pages of {page_size} slots",
                "use two pages or more, of 1 slot or more",
            )
        self.num_pages, self.page_size = num_pages, page_size
        self.shapes = tuple(shapes)
        self.k = [torch.zeros(num_pages, heads, page_size, D, dtype=dtype, device=device) for heads, D in shapes]
        self.v = [torch.zeros_like(k) for k in self.k]

    @staticmethod
    def count_page_bytes(shapes: Sequence[tuple[int, int]], page_size: int, dtype: torch.dtype) -> int:
        """Count the bytes of one page in all layers."""
        return 2 * sum(heads * D for heads, D in shapes) * page_size * dtype.itemsize

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero pages, which may contain NaN values."""
        for store in (*self.k, *self.v):
            store[list(pages)] = 0


@dataclass(frozen=True)
class PagedPass:
    """One pass over a paged cache: the tokens that it writes, and the sequences that they belong to.

    slots         (N,) slot of each token in its own sequence
    token_rows    (N,) row of `tables` of each token
    tables        (R, M) pages of the sequences, int32
    max_length    slots of the longest sequence, including the tokens of this pass
    chunks        row of `tables` and number of tokens of each sequence; None for one token each
    tiles         (3, T) int32 for the kernel: row, first token and number of tokens of each tile; None for one each
    tile_tokens   tokens that a tile has at most
    splits        parts of a sequence that the kernel processes in parallel
    """

    cache: PagedKVCache
    slots: Tensor
    token_rows: Tensor
    tables: Tensor
    max_length: int
    chunks: tuple[tuple[int, int], ...] | None = None
    tiles: Tensor | None = None
    tile_tokens: int = 1
    splits: int = 1

    @property
    def max_row_length(self) -> int:
        """Slots of the longest sequence."""
        return self.max_length

    def layer(self, i: int) -> "PagedLayer":
        return PagedLayer(self, i)


@dataclass(frozen=True)
class PagedLayer:
    """View of one layer of a pass."""

    batch: PagedPass
    layer: int

    def write(self, k: Tensor, v: Tensor) -> None:
        """Write new keys and values (N, G, D) to their slots."""
        batch, S = self.batch, self.batch.cache.page_size
        pages = batch.tables[batch.token_rows, batch.slots // S].long()  # (N,)
        offsets = batch.slots % S
        for store, new in ((batch.cache.k[self.layer], k), (batch.cache.v[self.layer], v)):
            store[pages, :, offsets] = new.to(store.dtype)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, logit_softcap: float | None = None
    ) -> Tensor:
        """Write keys and values (1, N, G, D) and attend with q (1, N, H, D) over each sequence. Returns (1, N, H, D).

        The plan is causal, perhaps with a window and spans (1, N).
        """
        self.write(k[0], v[0])
        if supports_kernel(q, plan):
            return self._attend_by_kernel(q[0].contiguous(), plan, logit_softcap)[None]
        return self.attend_plain(q, plan, logit_softcap)

    def _attend_by_kernel(self, q: Tensor, plan: AttentionPlan, logit_softcap: float | None) -> Tensor:
        from vitrail.nn.kernels.paged_attention_triton import attend_paged

        batch = self.batch
        return attend_paged(
            q,
            batch.cache.k[self.layer],
            batch.cache.v[self.layer],
            batch.tables,
            batch.slots,
            token_rows=batch.token_rows,
            tiles=batch.tiles,
            tile_tokens=batch.tile_tokens,
            window=None if plan.window is None else plan.window[0] + 1,
            logit_softcap=logit_softcap,
            splits=batch.splits,
        )

    def attend_plain(self, q: Tensor, plan: AttentionPlan, logit_softcap: float | None = None) -> Tensor:
        """Attend by gathering the pages of each sequence: the reference of the kernel."""
        batch = self.batch
        if batch.chunks is None:
            k, v = self._gather(batch.tables[batch.token_rows], batch.max_length)
            rows = replace(plan, query_slots=batch.slots[:, None])
            return compute_attention(q[0][:, None], k, v, rows, logit_softcap=logit_softcap).transpose(0, 1)
        outputs, start = [], 0
        for row, count in batch.chunks:
            slots = batch.slots[start : start + count]  # (n,)
            length = int(slots[-1]) + 1
            k, v = self._gather(batch.tables[row : row + 1], length)
            one = replace(plan, query_slots=slots[None])
            if plan.spans is not None:
                spans = plan.spans[:, start : start + count]
                earlier = spans.new_zeros(1, length - count)
                one = replace(one, spans=spans, key_spans=torch.cat([earlier, spans], 1))
            outputs.append(compute_attention(q[:, start : start + count], k, v, one, logit_softcap=logit_softcap))
            start += count
        return torch.cat(outputs, 1)

    def _gather(self, tables: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values (R, length, G, D) of the sequences with these tables (R, M)."""
        pages = tables[:, : -(-length // self.batch.cache.page_size)].long()

        def collect(store: Tensor) -> Tensor:
            return store[pages].transpose(2, 3).flatten(1, 2)[:, :length]  # (R, M, G, S, D) → (R, M·S, G, D)

        return collect(self.batch.cache.k[self.layer]), collect(self.batch.cache.v[self.layer])


def count_tile_tokens(heads_per_group: int) -> int:
    """Return how many tokens a tile of the kernel has at most."""
    return max(1, TILE_ROWS // (1 << (heads_per_group - 1).bit_length()))


def supports_kernel(q: Tensor, plan: AttentionPlan) -> bool:
    """Whether the Triton kernel supports these queries and this plan: on a GPU, without bidirectional spans."""
    D: Any = q.shape[-1]
    return q.is_cuda and plan.spans is None and q.dtype in KERNEL_DTYPES and D in KERNEL_HEAD_DIMS and HAS_TRITON
