"""Index backpropagation quantization: the gradient passes the choice of the index itself, so that every code learns
from every vector (Shi et al. 2024).

N vectors, K codes, D width
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.codecs.quantizers import digits, ranks
from vitrail.codecs.quantizers.base import Quantized, Quantizer, entropy_of, mean_square, wide
from vitrail.codecs.quantizers.search import nearest
from vitrail.config import Config
from vitrail.errors import ConfigError

ROOM = 2**24  # products of vectors and codes that are held at once


class IBQConfig(Config, tag="ibq", tag_field="kind"):
    """sharpness  of the soft choice whose entropy is taken; 1 / temperature
    diversity  how much the entropy of the batch weighs against that of each vector
    """

    codes: int
    dim: int
    sharpness: float = 100.0
    diversity: float = 1.0

    def __post_init__(self) -> None:
        if self.codes < 1 or self.dim < 1:
            raise ConfigError(f"a codebook of {self.codes} codes of width {self.dim} is empty")
        if not self.sharpness > 0:
            raise ConfigError(f"a sharpness of {self.sharpness} tells no codes apart", "use a number above 0")


class IBQ(Quantizer[IBQConfig]):
    """A vector takes the code with the highest product; backward, the mean of all codes by softmax of the products.

    Losses: `commit`, mean (x − code)² that moves x; `codebook`, the same that moves the codes; `entropy`, that of a
    vector's soft choice less that of the batch, in nats, over all codes. The soft choices are made again in the
    backward pass, a chunk of vectors at a time.
    """

    Config = IBQConfig

    def __init__(self, config: IBQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        c = self.config
        self.dim = self.width = c.dim
        self.sizes = (c.codes,)
        self.radices = digits.of(c.codes)
        self.codebook = nn.Parameter(torch.randn(c.codes, c.dim) / c.dim**0.5)

    def table(self) -> Tensor:
        return wide(self.codebook)

    def forward(self, x: Tensor) -> Quantized:
        self.check(x)
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            z = wide(x)
            flat, table = z.reshape(-1, self.dim), self.table().to(z.dtype)
            ids = nearest(flat, table, product=True)
            hard = F.embedding(ids, table)
            codes = hard
            if torch.is_grad_enabled() and (flat.requires_grad or table.requires_grad):
                soft = torch.cat([_remade(_soft, part, table) for part in self._chunks(flat)])
                codes = hard + (soft - soft.detach())
            sums = [_remade(_sums, part, table * c.sharpness) for part in self._chunks(flat)]
            own, chosen = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
            mean = ranks.mean(chosen, len(flat)) if self.training else chosen / max(len(flat), 1)
            losses = {
                "commit": mean_square(flat, hard.detach()),
                "codebook": mean_square(hard, flat.detach()),
                "entropy": own / max(len(flat), 1) - c.diversity * entropy_of(mean),
            }
        return Quantized(codes.view_as(z).to(x.dtype), ids.view(x.shape[:-1]), losses)

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        return F.embedding(ids.long(), self.table())

    def _chunks(self, x: Tensor) -> Iterator[Tensor]:
        return iter(x.split(max(1, ROOM // self.config.codes)))


def _remade(function: Any, x: Tensor, table: Tensor) -> Any:
    return checkpoint(function, x, table, use_reentrant=False) if torch.is_grad_enabled() else function(x, table)


def _soft(x: Tensor, table: Tensor) -> Tensor:
    """The mean code of each vector; it moves the choice, not the codes that are averaged."""
    return (x @ table.T).softmax(1) @ table.detach()


def _sums(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The entropies of the soft choices, summed, and how often each code is chosen (K,)"""
    logs = (x @ table.T).log_softmax(1)
    p = logs.exp()
    return -(p * logs).sum(), p.sum(0)
