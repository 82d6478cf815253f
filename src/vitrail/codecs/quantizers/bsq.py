"""Binary spherical quantization: a vector on the unit sphere takes the nearest corner of the cube in it (Zhao et al.
2024). QLIP's quantizer.

… any axes, D bits
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.codecs.quantizers import bits
from vitrail.codecs.quantizers.base import Quantized, Quantizer, mean_square, wide
from vitrail.codecs.quantizers.gradients import SMALL, straight_through
from vitrail.config import Config


class BSQConfig(Config, tag="bsq", tag_field="kind"):
    """sharpness  of the soft choice whose entropy is taken; 1 / temperature
    diversity  how much the entropy of the batch weighs against that of each vector
    group      bits whose joint entropy is taken exactly in that of the batch
    """

    bits: int
    sharpness: float = 1.0
    diversity: float = 1.0
    group: int = 1

    def __post_init__(self) -> None:
        bits.check(self.bits, self.group, self.sharpness)


class BSQ(Quantizer[BSQConfig]):
    """x is normalised; codes are ±1/√D, of length 1; the first dimension is the highest bit of an id.

    Losses: `commit`, the mean over vectors of |x − code|²; `entropy`, that of a vector's soft choice less that of the
    batch, in nats. The published penalty is `entropy` / sharpness.
    """

    Config = BSQConfig
    lattice = True

    def __init__(self, config: BSQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        self.dim = self.width = self.config.bits
        self.radices = (2,) * self.dim
        self.sizes = (2**self.dim,)

    def forward(self, x: Tensor) -> Quantized:
        self.check(x)
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            signs = wide(x) > 0  # a norm may overflow
            z = F.normalize(wide(x), dim=-1, eps=SMALL)
            hard = self._codes(signs, z.dtype)
            logits = 4 * c.sharpness * self.dim**-0.5 * z.reshape(-1, self.dim)
            losses = {
                "commit": mean_square(z, hard) * self.dim,
                "entropy": bits.entropy(logits, c.group, c.diversity, self.training),
            }
            codes = straight_through(z, hard).to(x.dtype)
        return Quantized(codes, bits.ids_of(signs), losses)

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        return self._codes(bits.signs_of(ids, self.dim), torch.float32)

    def _codes(self, signs: Tensor, kind: torch.dtype) -> Tensor:
        return (signs.to(kind) * 2 - 1) * self.dim**-0.5
