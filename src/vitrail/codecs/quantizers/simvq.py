"""SimVQ: a frozen random codebook transformed by one learned matrix, so every update moves all codes.

Shapes: K codes, D width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.codecs.quantizers import mixed_radix
from vitrail.codecs.quantizers.gradient_estimators import GradientEstimator, pass_gradient
from vitrail.codecs.quantizers.nearest_codes import find_nearest_codes
from vitrail.codecs.quantizers.quantizer import Quantizer, QuantizerOutput, mean_squared_error, upcast
from vitrail.config import Config, PositiveInt
from vitrail.registry import QUANTIZERS


class SimVQConfig(Config, tag="simvq", tag_field="kind"):
    """Config of `SimVQ`.

    gradient_estimator  "straight" or "rotation". With "rotation" few codes stay in use: codes are centered at the
                        origin
                        and scale with the matrix, so vectors fit only the inner codes, at large angles, and the rotated
                        gradient does not push them outwards.
    """

    codebook_size: PositiveInt
    dim: PositiveInt
    gradient_estimator: GradientEstimator = "straight"


@QUANTIZERS.register("simvq")
class SimVQ(Quantizer[SimVQConfig]):
    """SimVQ quantizer. Losses: `commit`, mean (x − code)² with gradients to x; `codebook`, the same with gradients to
    the matrix.
    """

    Config = SimVQConfig

    def __init__(self, config: SimVQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        c = self.config
        self.dim = c.dim
        self.width = self.dim
        self.vocab_sizes = (c.codebook_size,)
        self.radices = mixed_radix.make_radices(c.codebook_size)
        self.codebook = nn.Buffer(torch.randn(c.codebook_size, c.dim) / c.dim**0.5)
        self.matrix = nn.Parameter(torch.empty(c.dim, c.dim))
        nn.init.kaiming_uniform_(self.matrix, a=5**0.5)  # as in nn.Linear

    def get_codebook(self) -> Tensor:
        return self.codebook @ self.matrix.to(self.codebook.dtype).T

    def forward(self, x: Tensor) -> QuantizerOutput:
        self.check_input(x)
        with torch.autocast(x.device.type, enabled=False):
            z = upcast(x)
            table = self.get_codebook().to(z.dtype)
            ids = find_nearest_codes(z.reshape(-1, self.dim), table)
            hard = F.embedding(ids, table).view_as(z)
            losses = {"commit": mean_squared_error(z, hard.detach()), "codebook": mean_squared_error(hard, z.detach())}
            codes = pass_gradient(z, hard, self.config.gradient_estimator).to(x.dtype)
        return QuantizerOutput(codes, ids.view(x.shape[:-1]), losses)

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        with torch.autocast(ids.device.type, enabled=False):
            return F.embedding(ids.long(), self.get_codebook())
