"""SimVQ: a frozen random codebook seen through one learnt matrix, so that every code moves when any is used.

K codes, D width
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.codecs.quantizers import digits
from vitrail.codecs.quantizers.base import Quantized, Quantizer, mean_square, wide
from vitrail.codecs.quantizers.gradients import Through, through
from vitrail.codecs.quantizers.search import nearest
from vitrail.config import Config
from vitrail.errors import ConfigError


class SimVQConfig(Config, tag="simvq", tag_field="kind"):
    """through  the gradient that passes the choice. Codes lie around the origin here and a matrix can scale all of
    them, so vectors may fit those in the middle alone, at a large angle to them. There a rotated gradient
    points elsewhere, nothing drives vectors out again, and a few codes end up in use.
    """

    codes: int
    dim: int
    through: Through = "straight"

    def __post_init__(self) -> None:
        if self.codes < 1 or self.dim < 1:
            raise ConfigError(f"a codebook of {self.codes} codes of width {self.dim} is empty")


class SimVQ(Quantizer[SimVQConfig]):
    """Losses: `commit`, mean (x − code)² that moves x; `codebook`, the same that moves the matrix."""

    Config = SimVQConfig

    def __init__(self, config: SimVQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        c = self.config
        self.dim = self.width = c.dim
        self.sizes = (c.codes,)
        self.radices = digits.of(c.codes)
        self.codebook = nn.Buffer(torch.randn(c.codes, c.dim) / c.dim**0.5)
        self.matrix = nn.Parameter(torch.empty(c.dim, c.dim))
        nn.init.kaiming_uniform_(self.matrix, a=5**0.5)  # as nn.Linear starts

    def table(self) -> Tensor:
        return self.codebook @ self.matrix.to(self.codebook.dtype).T

    def forward(self, x: Tensor) -> Quantized:
        self.check(x)
        with torch.autocast(x.device.type, enabled=False):
            z = wide(x)
            table = self.table().to(z.dtype)
            ids = nearest(z.reshape(-1, self.dim), table)
            hard = F.embedding(ids, table).view_as(z)
            losses = {"commit": mean_square(z, hard.detach()), "codebook": mean_square(hard, z.detach())}
            codes = through(z, hard, self.config.through).to(x.dtype)
        return Quantized(codes, ids.view(x.shape[:-1]), losses)

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        with torch.autocast(ids.device.type, enabled=False):
            return F.embedding(ids.long(), self.table())
