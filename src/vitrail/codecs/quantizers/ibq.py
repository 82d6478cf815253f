"""Index backpropagation quantization: gradients pass the choice of the index, so every vector updates all codes (Shi et
al. 2024).

Shapes: N vectors, K codes, D width.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.codecs.quantizers import mixed_radix, rank_statistics
from vitrail.codecs.quantizers.nearest_codes import find_nearest_codes
from vitrail.codecs.quantizers.quantizer import Quantizer, QuantizerOutput, compute_entropy, mean_squared_error, upcast
from vitrail.config import Config, PositiveFloat, PositiveInt
from vitrail.registry import QUANTIZERS

MAX_CHUNK_PRODUCTS = 2**24  # largest number of vector–code products in memory


class IBQConfig(Config, tag="ibq", tag_field="kind"):
    """Config of `IBQ`.

    inv_temperature   of the soft assignment in the entropy loss
    diversity_weight  weight of the batch entropy against the entropy of each vector
    """

    codebook_size: PositiveInt
    dim: PositiveInt
    inv_temperature: PositiveFloat = 100.0
    diversity_weight: float = 1.0


@QUANTIZERS.register("ibq")
class IBQ(Quantizer[IBQConfig]):
    """A vector takes the code with the highest dot product; backward, the softmax-weighted mean of all codes.

    Losses: `commit`, mean (x − code)² with gradients to x; `codebook`, the same with gradients to the codes; `entropy`,
    the mean entropy of each vector's soft assignment minus the weighted entropy of the batch, in nats. The backward
    pass recomputes soft assignments in chunks of vectors.
    """

    Config = IBQConfig

    def __init__(self, config: IBQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        c = self.config
        self.dim = c.dim
        self.width = self.dim
        self.vocab_sizes = (c.codebook_size,)
        self.radices = mixed_radix.make_radices(c.codebook_size)
        self.codebook = nn.Parameter(torch.randn(c.codebook_size, c.dim) / c.dim**0.5)

    def get_codebook(self) -> Tensor:
        return upcast(self.codebook)

    def forward(self, x: Tensor) -> QuantizerOutput:
        self.check_input(x)
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            z = upcast(x)
            flat, table = z.reshape(-1, self.dim), self.get_codebook().to(z.dtype)
            ids = find_nearest_codes(flat, table, by_dot_product=True)
            hard = F.embedding(ids, table)
            codes = hard
            if torch.is_grad_enabled() and (flat.requires_grad or table.requires_grad):
                soft = torch.cat([_checkpointed(_soft_codes, part, table) for part in self._chunks(flat)])
                codes = hard + (soft - soft.detach())
            sums = [_checkpointed(_sum_choices, part, table * c.inv_temperature) for part in self._chunks(flat)]
            own, chosen = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
            mean = rank_statistics.mean_over_ranks(chosen, len(flat)) if self.training else chosen / max(len(flat), 1)
            losses = {
                "commit": mean_squared_error(flat, hard.detach()),
                "codebook": mean_squared_error(hard, flat.detach()),
                "entropy": own / max(len(flat), 1) - c.diversity_weight * compute_entropy(mean),
            }
        return QuantizerOutput(codes.view_as(z).to(x.dtype), ids.view(x.shape[:-1]), losses)

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        return F.embedding(ids.long(), self.get_codebook())

    def _chunks(self, x: Tensor) -> Iterator[Tensor]:
        return iter(x.split(max(1, MAX_CHUNK_PRODUCTS // self.config.codebook_size)))


def _checkpointed(function: Any, x: Tensor, table: Tensor) -> Any:
    return checkpoint(function, x, table, use_reentrant=False) if torch.is_grad_enabled() else function(x, table)


def _soft_codes(x: Tensor, table: Tensor) -> Tensor:
    """Mean code of each vector; its gradient goes to the assignment, not to the averaged codes."""
    return (x @ table.T).softmax(1) @ table.detach()


def _sum_choices(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed entropy of the soft assignments, and how often each code is chosen (K,)."""
    logs = (x @ table.T).log_softmax(1)
    p = logs.exp()
    return -(p * logs).sum(), p.sum(0)
