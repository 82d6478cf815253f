"""Base class of quantizers: vectors in, codes and ids out.

A quantizer computes in float32 (float64 stays float64) and returns codes in the dtype of its input. In float32, codes
are exactly the values of `lookup`; only their gradients differ.

Shapes: … any axes, D width, G ids of one vector.
"""

import math
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from vitrail.codecs.quantizers import mixed_radix
from vitrail.config import Config
from vitrail.errors import ConfigError, DataError

C = TypeVar("C", bound=Config)


class QuantizerOutput(NamedTuple):
    codes: Tensor
    """codes (…, D), with gradients to the input"""
    ids: Tensor | None
    """int64 ids (…), or (…, G) if a vector has several; None if codes are continuous"""
    losses: dict[str, Tensor]
    """unweighted losses, means over the vectors of this batch (`entropy`: over the batch of all ranks)"""


class Quantizer(nn.Module, Generic[C]):
    """Base class: `quantizer(x)` for x (…, dim); `quantizer.lookup(ids)` returns exactly the same codes.

    dim          width of the input
    width        width of the codes: `dim`, except for KL, which takes a mean and a variance
    vocab_sizes  number of values of each id of a vector
    radices      digits of an id, if it has any; `split_ids` splits between digits
    """

    Config: ClassVar[Any]  # type of the config
    lowest_digit_first: ClassVar[bool] = False  # whether the first digit is the lowest digit of an id
    is_lattice: ClassVar[bool] = False  # whether a digit is a channel of the code; else codes are rows of a codebook

    def __init__(self, config: C | None = None, **fields: Any):
        super().__init__()
        self.config: C = self.Config(**fields) if config is None else config
        self.dim, self.width = 0, 0
        self.vocab_sizes: tuple[int, ...] = ()
        self.radices: tuple[int, ...] = ()
        self.register_load_state_dict_pre_hook(_keep_buffers_float32)

    @property
    def bits(self) -> int:
        """Bits of the packed ids of one vector, whole bits for each id; 0 if codes are continuous."""
        return sum(bits_per_id(size) for size in self.vocab_sizes)

    def forward(self, x: Tensor) -> QuantizerOutput:
        raise NotImplementedError

    def lookup(self, ids: Tensor) -> Tensor:
        """Look up the codes (…, D) of ids, in float32."""
        raise NotImplementedError

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move buffers to another device, but keep them in float32: running means do not change in bfloat16."""
        buffers = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in buffers.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    # ---- splitting ids ----------------------------------------------------------------------------------------------

    def group_sizes(self, num_groups: int) -> tuple[int, ...]:
        """Vocabulary size of each of `num_groups` parts of an id."""
        return mixed_radix.group_radices(self.radices, num_groups)

    def split_ids(self, ids: Tensor, num_groups: int) -> Tensor:
        """Split ids (…) into parts (…, num_groups) in digit order; part g has `group_sizes(num_groups)[g]` values."""
        self.check_ids(ids)
        return mixed_radix.split_digits(ids, self.group_sizes(num_groups), self.lowest_digit_first)

    def join_ids(self, parts: Tensor) -> Tensor:
        """Join parts (…, groups) from `split_ids` to ids (…)."""
        sizes = self.group_sizes(parts.shape[-1])
        check_id_range(parts, sizes, f"parts of {type(self).__name__}'s ids")
        return mixed_radix.join_digits(parts, sizes, self.lowest_digit_first)

    # ---- input checks -----------------------------------------------------------------------------------------------

    def check_input(self, x: Tensor) -> None:
        name = type(self).__name__
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise ConfigError(
                f"{name} needs vectors of width {self.dim}, but the input has shape {tuple(x.shape)}",
                "project to that width, with channels last",
            )
        if not x.is_floating_point():
            raise ConfigError(f"{name} needs floating-point input, not {x.dtype}", "give features, not ids")
        # On a GPU this check would synchronize every training step; there, a non-finite input shows in the loss.
        # A sum is finite only if all its terms are.
        if (x.device.type == "cpu" or not self.training) and can_read_values(x) and not bool(x.sum().isfinite()):
            bad = int((~x.isfinite().all(-1)).sum())
            if bad:
                raise DataError(
                    f"{bad} of {math.prod(x.shape[:-1])} input vectors of {name} contain NaN or infinity",
                    "check the encoder's weights and input",
                )

    def check_ids(self, ids: Tensor) -> None:
        if len(self.vocab_sizes) > 1 and ids.shape[-1:] != (len(self.vocab_sizes),):
            raise ConfigError(
                f"{type(self).__name__} has {len(self.vocab_sizes)} ids a vector, but the ids have shape "
                f"{tuple(ids.shape)}",
                "put the ids of a vector on the last axis",
            )
        check_id_range(ids, self.vocab_sizes, f"{type(self).__name__}'s ids")


def _keep_buffers_float32(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Keep buffers in float32 when they are loaded from a checkpoint in another dtype."""
    for name, own in module.named_buffers(recurse=False):
        loaded = state.get(prefix + name)
        if loaded is not None and own.is_floating_point() and loaded.is_floating_point():
            state[prefix + name] = loaded.to(own.dtype)


def check_id_range(ids: Tensor, sizes: tuple[int, ...], name: str) -> None:
    """Raise if ids are not integers in 0 … size − 1."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ConfigError(f"{name} have dtype {ids.dtype}, not an integer type", "give int64 ids of the quantizer")
    if not ids.numel() or not can_read_values(ids):
        return
    values = torch.atleast_1d(ids.long())
    last = torch.tensor(sizes, device=ids.device) - 1 if max(sizes) < 2**63 else torch.tensor(2**63 - 1).to(ids.device)
    outside = (values < 0) | (values > last)
    if bool(outside.any()):
        ranges = f"0 … {sizes[0] - 1}" if len(set(sizes)) == 1 else f"0 … {[size - 1 for size in sizes]}"
        raise DataError(
            f"{int(outside.sum())} of {name} are outside {ranges}, for example {int(values[outside][0])}",
            "give ids of this quantizer",
        )


def can_read_values(x: Tensor) -> bool:
    """Whether tensor values can be read: not during compilation or graph capture, and not on the meta device."""
    if torch.compiler.is_compiling() or x.device.type == "meta":
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def bits_per_id(size: int) -> int:
    """Number of bits that hold 0 … size − 1."""
    return max(1, (size - 1).bit_length())


def upcast(x: Tensor) -> Tensor:
    """Convert to float32; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mean_squared_error(x: Tensor, y: Tensor) -> Tensor:
    """Mean of (x − y)²; 0 for empty tensors."""
    return (x - y).square().sum() / max(x.numel(), 1)


def compute_entropy(p: Tensor) -> Tensor:
    """Entropy −Σ p log p of all elements, in nats, with finite gradients at p = 0."""
    return -(p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum()
