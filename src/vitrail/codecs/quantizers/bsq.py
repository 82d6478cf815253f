"""Binary spherical quantization: project to the unit sphere and take the nearest corner of its inscribed cube (Zhao et
al. 2024). Used by QLIP.
"""

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from vitrail.codecs.quantizers.binary_codes import BinaryQuantizer, BinaryQuantizerConfig
from vitrail.codecs.quantizers.gradient_estimators import MIN_NORM
from vitrail.registry import QUANTIZERS


class BSQConfig(BinaryQuantizerConfig, tag="bsq", tag_field="kind"):
    """Config of `BSQ`.

    code_scale  "unit": codes of length 1, as published; "sign": ±1 in every dimension, as the codes of LFQ. The values
                of unit codes are 1/√D, so that a decoder without pretrained weights starts with a weak input
    """

    code_scale: Literal["unit", "sign"] = "unit"


@QUANTIZERS.register("bsq")
class BSQ(BinaryQuantizer[BSQConfig]):
    """Binary spherical quantizer. Codes are ±1/√D, with length 1, or ±1 (`code_scale`); the first dimension is the
    highest bit of an id.

    Losses, with codes of length 1: `commit`, the mean of |x − code|² over vectors; `entropy`, see `entropy_loss`. The
    published penalty is `entropy` / inv_temperature.
    """

    Config = BSQConfig

    def __init__(self, config: BSQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        self.code_value, self.commit_weight = self.dim**-0.5, self.dim
        self.output_value = self.code_value if self.config.code_scale == "unit" else 1.0

    def normalize(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=MIN_NORM)
