"""Finite scalar quantization: every number of a vector is bounded and rounded to a few levels (Mentzer et al. 2023).

… any axes, D dimensions
"""

import math
from typing import Any

import torch
from torch import Tensor

from vitrail.codecs.quantizers import digits
from vitrail.codecs.quantizers.base import Quantized, Quantizer, wide
from vitrail.codecs.quantizers.gradients import straight_through
from vitrail.config import Config

SLACK = 1e-3  # the outermost levels are reached by finite numbers


class FSQConfig(Config, tag="fsq", tag_field="kind"):
    levels: tuple[int, ...]

    def __post_init__(self) -> None:
        digits.check(self.levels, "levels")


class FSQ(Quantizer[FSQConfig]):
    """Codes lie in −1 … 1; the first dimension is the lowest digit of an id. No losses."""

    Config = FSQConfig
    low_first = True

    def __init__(self, config: FSQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        self.radices = self.config.levels
        self.dim = self.width = len(self.radices)
        self.sizes = (math.prod(self.radices),)

    def forward(self, x: Tensor) -> Quantized:
        self.check(x)
        with torch.autocast(x.device.type, enabled=False):
            z = wide(x)
            levels = torch.tensor(self.radices, device=x.device)
            middle = (levels // 2).to(z.dtype)
            reach = ((levels - 1) * (1 + SLACK) / 2).to(z.dtype)
            offset = (levels % 2 == 0) * z.new_tensor(0.5)
            bounded = torch.tanh(z + torch.atanh(offset / reach)) * reach - offset
            level = bounded.detach().round()
            if max(self.radices) > 1 / SLACK:  # the slack alone would add a level
                level = level.clamp(-middle, levels - 1 - middle)
            codes = (straight_through(bounded, level) / middle).to(x.dtype)
        return Quantized(codes, digits.join((level + middle).nan_to_num(), self.radices, self.low_first), {})

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        middle = torch.tensor(self.radices, device=ids.device) // 2
        return (digits.split(ids, self.radices, self.low_first) - middle).float() / middle
