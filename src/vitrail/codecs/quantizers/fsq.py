"""Finite scalar quantization: bound every channel and round it to a few levels (Mentzer et al. 2023).

Shapes: … any axes, D dimensions.
"""

import math
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitrail.codecs.quantizers import mixed_radix
from vitrail.codecs.quantizers.quantizer import Quantizer, QuantizerOutput, upcast
from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.registry import QUANTIZERS

RANGE_SLACK = 1e-3  # extends the bound so that finite inputs reach the outermost levels


class FSQConfig(Config, tag="fsq", tag_field="kind"):
    levels: tuple[int, ...]

    def __post_init__(self) -> None:
        mixed_radix.check_radices(self.levels, "levels")
        if max(self.levels) > mixed_radix.MAX_EXACT_FLOAT32:
            raise ConfigError(f"{max(self.levels)} levels exceed the precision of float32", "use more dimensions")


@QUANTIZERS.register("fsq")
class FSQ(Quantizer[FSQConfig]):
    """Finite scalar quantizer. Codes are in −1 … 1; the first dimension is the lowest digit of an id. There are no
    losses.
    """

    Config = FSQConfig
    lowest_digit_first = True
    is_lattice = True
    middle: Tensor
    reach: Tensor
    offset: Tensor
    start: Tensor

    def __init__(self, config: FSQConfig | None = None, **fields: Any):
        super().__init__(config, **fields)
        self.radices = self.config.levels
        self.dim = len(self.radices)
        self.width = self.dim
        self.vocab_sizes = (math.prod(self.radices),)
        self.make_tables()

    def make_tables(self, device: torch.device | None = None) -> None:
        """Create the tables once: in every pass they would be copied to the device again."""
        levels = torch.tensor(self.radices, dtype=torch.float64, device=device)
        offset = (levels % 2 == 0) * 0.5
        reach = (levels - 1) * (1 + RANGE_SLACK) / 2
        tables = {"middle": levels // 2, "reach": reach, "offset": offset, "start": torch.atanh(offset / reach)}
        for name, table in tables.items():
            self.register_buffer(name, table.float(), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Recompute the tables after a move: `to_empty` leaves them unset, and no checkpoint holds them."""
        super()._apply(fn, recurse)
        self.make_tables(self.middle.device)
        return self

    def forward(self, x: Tensor) -> QuantizerOutput:
        self.check_input(x)
        with torch.autocast(x.device.type, enabled=False):
            z = upcast(x)
            middle, reach, offset, start = (t.to(z.dtype) for t in (self.middle, self.reach, self.offset, self.start))
            codes, level = _Rounded.apply(z, start, reach, offset, middle, max(self.radices) > 1 / RANGE_SLACK)
        ids = mixed_radix.join_digits(level.nan_to_num_(), self.radices, self.lowest_digit_first)
        return QuantizerOutput(codes.to(x.dtype), ids, {})

    def lookup(self, ids: Tensor) -> Tensor:
        self.check_ids(ids)
        middle = torch.tensor(self.radices, device=ids.device) // 2
        return (mixed_radix.split_digits(ids, self.radices, self.lowest_digit_first) - middle).float() / middle


class _Rounded(torch.autograd.Function):
    """Round x to codes and levels, counted from 0; backward is the gradient of the bound (tanh), straight through
    rounding.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, start: Tensor, reach: Tensor, offset: Tensor, middle: Tensor, clamp: bool
    ) -> tuple[Tensor, Tensor]:
        bound = (x + start).tanh_()
        level = torch.addcmul(-offset, bound, reach).round_()
        if clamp:  # with many levels, the slack would add a level
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
