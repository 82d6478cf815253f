"""Finite scalar quantization: every number of a vector is bounded and rounded to a few levels (Mentzer et al. 2023).

… any axes, D dimensions
"""

import math
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitrail.codecs.quantizers import digits
from vitrail.codecs.quantizers.base import Quantized, Quantizer, wide
from vitrail.config import Config
from vitrail.errors import ConfigError

SLACK = 1e-3  # the outermost levels are reached by finite numbers


class FSQConfig(Config, tag="fsq", tag_field="kind"):
    levels: tuple[int, ...]

    def __post_init__(self) -> None:
        digits.check(self.levels, "levels")
        if max(self.levels) > digits.EXACT:
            raise ConfigError(f"{max(self.levels)} levels are more than float32 tells apart", "use more dimensions")


class FSQ(Quantizer[FSQConfig]):
    """Codes lie in −1 … 1; the first dimension is the lowest digit of an id. No losses."""

    Config = FSQConfig
    low_first = lattice = True
    middle: Tensor
    reach: Tensor
    offset: Tensor
    start: Tensor

    def __init__(self, config: FSQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        self.radices = self.config.levels
        self.dim = self.width = len(self.radices)
        self.sizes = (math.prod(self.radices),)
        self.fill()

    def fill(self, device: torch.device | None = None) -> None:
        """Make the tables, once: made in every pass, each would be a copy to the device."""
        levels = torch.tensor(self.radices, dtype=torch.float64, device=device)
        offset = (levels % 2 == 0) * 0.5
        reach = (levels - 1) * (1 + SLACK) / 2
        tables = {"middle": levels // 2, "reach": reach, "offset": offset, "start": torch.atanh(offset / reach)}
        for name, table in tables.items():
            self.register_buffer(name, table.float(), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """`to_empty` must not leave the tables unset: they are in no state that could be loaded."""
        super()._apply(fn, recurse)
        self.fill(self.middle.device)
        return self

    def forward(self, x: Tensor) -> Quantized:
        self.check(x)
        with torch.autocast(x.device.type, enabled=False):
            z = wide(x)
            middle, reach, offset, start = (t.to(z.dtype) for t in (self.middle, self.reach, self.offset, self.start))
            codes, level = _Rounded.apply(z, start, reach, offset, middle, max(self.radices) > 1 / SLACK)
        ids = digits.join(level.nan_to_num_(), self.radices, self.low_first)
        return Quantized(codes.to(x.dtype), ids, {})

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        middle = torch.tensor(self.radices, device=ids.device) // 2
        return (digits.split(ids, self.radices, self.low_first) - middle).float() / middle


class _Rounded(torch.autograd.Function):
    """x → codes and levels, counted from 0. Backward it is the bound, tanh, alone: rounding passes slopes on."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, start: Tensor, reach: Tensor, offset: Tensor, middle: Tensor, clamp: bool
    ) -> tuple[Tensor, Tensor]:
        bound = (x + start).tanh_()
        level = torch.addcmul(-offset, bound, reach).round_()
        if clamp:  # the slack alone would add a level
            level = level.clamp(-middle, middle - 2 * offset)
        ctx.save_for_backward(bound, reach / middle)
        codes, level = level / middle, level + middle
        ctx.mark_non_differentiable(level)
        return codes, level

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore
        bound, scale = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(gradient, bound).mul_(scale), None, None, None, None, None
