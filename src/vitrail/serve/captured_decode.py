"""Decoding steps as CUDA graphs, one for each batch size of a ladder. A batch uses the next larger size.

B rows of a graph, V vocabulary
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.generate.cuda_graph_decode import copy_to_device

SMALL_BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)
BATCH_STEP = 32  # of larger batches
NUM_PROGRAMS = 528  # programs of the attention kernel that fill a large GPU: 4 on each of 132 multiprocessors
MAX_SPLITS = 32


class DecodeResult(NamedTuple):
    """Result of a decoding step, in buffers that the next step overwrites.

    logits  (B, V)
    ids     (B,) most likely tokens, which the table of last tokens already has; None if they are not computed
    finite  (B,) whether the logits are finite
    """

    logits: Tensor
    ids: Tensor | None = None
    finite: Tensor | None = None


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes that have a graph."""
    larger = range(SMALL_BATCHES[-1] + BATCH_STEP, max_num_seqs + BATCH_STEP, BATCH_STEP)
    sizes = [
        *(size for size in SMALL_BATCHES if size < max_num_seqs),
        *(size for size in larger if size < max_num_seqs),
    ]
    return [*sizes, max_num_seqs]


def choose_splits(rows: int, kv_heads: int) -> int:
    """Return into how many parts the attention kernel divides the sequences, so that few rows fill the GPU too."""
    wanted = NUM_PROGRAMS // max(1, rows * kv_heads)
    return max(1, min(MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1)))


def select_most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely token of each row (B,), and whether the row is finite (B,). NaN counts as largest."""
    B, V = logits.shape
    size = next((size for size in (256, 128, 64, 32) if V % size == 0), None)
    if size is None:
        best, ids = logits.max(-1)
        return ids, best.isfinite()
    best, where = logits.reshape(B, V // size, size).max(-1)  # in two stages: few rows do not fill a GPU
    value, chunk = best.max(-1, keepdim=True)
    return (chunk * size + where.gather(1, chunk))[:, 0], value[:, 0].isfinite()


class CapturedDecode:
    """Run decoding steps by CUDA graphs.

    `compute` maps table rows, slots and positions (B,) and a number of splits to logits (B, V). It reads the tokens
    from `last_ids` itself, and the graph writes the most likely next ones there.
    """

    def __init__(
        self,
        compute: Callable[[Tensor, Tensor, Tensor, int], Tensor],
        last_ids: Tensor,
        *,
        max_num_seqs: int,
        num_known_ids: int,
        logits_width: int,
        dtype: torch.dtype,
        kv_heads: int,
    ):
        self.compute, self.last_ids, self.num_known_ids, self.kv_heads = compute, last_ids, num_known_ids, kv_heads
        self.sizes, device = batch_sizes(max_num_seqs), last_ids.device
        self.padding_row = len(last_ids) - 1
        self.logits = torch.zeros(max_num_seqs, logits_width, dtype=dtype, device=device)
        self.ids = torch.zeros(max_num_seqs, dtype=torch.long, device=device)
        self.finite = torch.zeros(max_num_seqs, dtype=torch.bool, device=device)
        self.inputs = torch.zeros(3, max_num_seqs, dtype=torch.long, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def warm_up(self) -> None:
        """Capture all graphs, the largest first, whose memory the others share."""
        for size in reversed(self.sizes):
            self._get_graph(size)

    def __call__(self, rows: list[int], slots: list[int], positions: list[int]) -> DecodeResult:
        count = len(rows)
        size = next(size for size in self.sizes if size >= count)
        graph = self._get_graph(size)
        packed = np.zeros((3, size), dtype=np.int64)
        packed[0] = self.padding_row
        packed[:, :count] = (rows, slots, positions)
        copy_to_device(torch.from_numpy(packed), self.inputs[:, :size])
        graph.replay()
        return DecodeResult(self.logits[:count], self.ids[:count], self.finite[:count])

    def run_step(self, size: int) -> None:
        """Run a step of `size` rows on the static buffers: what a graph records."""
        rows, slots, positions = (x[:size] for x in self.inputs)
        logits = self.compute(rows, slots, positions, choose_splits(size, self.kv_heads))
        self.logits[:size].copy_(logits)
        ids, finite = select_most_likely(logits[:, : self.num_known_ids])
        self.ids[:size].copy_(ids)
        self.finite[:size].copy_(finite)
        self.last_ids[rows] = ids

    def _get_graph(self, size: int) -> torch.cuda.CUDAGraph:
        if size in self._graphs:
            return self._graphs[size]
        self.inputs[0].fill_(self.padding_row)  # the warm-up writes to the page of padding only
        self.inputs[1:].zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(2):  # compiles kernels outside of the graph
                self.run_step(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may prepare images on the GPU meanwhile.
        with torch.no_grad(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self.run_step(size)
        self._pool = self._pool or graph.pool()
        self._graphs[size] = graph
        return graph
