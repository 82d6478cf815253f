"""One interface for everything between an encoder and a decoder: vectors in, the codes that stand for them out.

A quantizer computes in float32 whatever it is given (float64 stays), and gives codes in the type of its input. Codes
have the exact values that `lookup` gives (in float32: those of a float64 input have more digits); only their gradients
go another way.

… any axes, D width, G ids of one vector
"""

import math
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from vitrail.codecs.quantizers import digits
from vitrail.config import Config
from vitrail.errors import ConfigError, DataError

C = TypeVar("C", bound=Config)


class Quantized(NamedTuple):
    codes: Tensor
    """(…, D), with gradients to the input"""
    ids: Tensor | None
    """(…) or, where one vector has several, (…, G), int64; None where codes are continuous"""
    losses: dict[str, Tensor]
    """unweighted means over the vectors of this batch (in `entropy`, over the batch of all ranks)"""


class Quantizer(nn.Module, Generic[C]):
    """`q(x)` for x (…, dim); `q.lookup(ids)` gives the codes back, bit for bit.

    dim      width of what it reads
    width    width of the codes: `dim`, but for KL, which reads a mean and a variance
    sizes    how many values each id of a vector can have
    radices  the digits of an id, where it has any: `split` cuts between them
    """

    Config: ClassVar[Any]  # the type of its config
    low_first: ClassVar[bool] = False  # whether the first digit is the lowest of an id
    lattice: ClassVar[bool] = False  # whether a digit is a number of the code; else codes are rows of a table

    def __init__(self, config: C | None = None, **fields: Any):
        super().__init__()
        self.config: C = self.Config(**fields) if config is None else config
        self.dim, self.width = 0, 0
        self.sizes: tuple[int, ...] = ()
        self.radices: tuple[int, ...] = ()
        self.register_load_state_dict_pre_hook(_whole)

    @property
    def bits(self) -> int:
        """What packing takes for one vector: every id in whole bits. 0 where codes are continuous and have no ids."""
        return sum(bits_of(size) for size in self.sizes)

    def forward(self, x: Tensor) -> Quantized:
        raise NotImplementedError

    def lookup(self, ids: Tensor) -> Tensor:
        """ids → codes (…, D), float32"""
        raise NotImplementedError

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Buffers follow the model to another device, but stay in float32: in bfloat16 running means stand still."""
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in kept.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    # ---- ids as several smaller ones --------------------------------------------------------------------------------

    def groups(self, count: int) -> tuple[int, ...]:
        """The vocabulary of each of `count` parts of an id."""
        return digits.grouped(self.radices, count)

    def split(self, ids: Tensor, groups: int) -> Tensor:
        """ids (…) → (…, groups), in the order of the digits; part g has `q.groups(groups)[g]` values."""
        self.check_ids(ids)
        return digits.split(ids, self.groups(groups), self.low_first)

    def join(self, parts: Tensor) -> Tensor:
        """What `split` has taken apart (…, groups) → (…)"""
        sizes = self.groups(parts.shape[-1])
        check_range(parts, sizes, f"parts of {type(self).__name__}'s ids")
        return digits.join(parts, sizes, self.low_first)

    # ---- what cannot be quantized -----------------------------------------------------------------------------------

    def check(self, x: Tensor) -> None:
        name = type(self).__name__
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise ConfigError(
                f"{name} reads vectors of {self.dim} numbers; it was given a tensor of shape {tuple(x.shape)}",
                "project to that width, and put the channels last",
            )
        if not x.is_floating_point():
            raise ConfigError(f"{name} quantizes floating-point numbers, not {x.dtype}", "give it features, not ids")
        # On a GPU the answer would hold up every training step; there, what is not finite shows in the loss. A sum is
        # finite only if all it sums is.
        if (x.device.type == "cpu" or not self.training) and can_look(x) and not bool(x.sum().isfinite()):
            bad = int((~x.isfinite().all(-1)).sum())
            if bad:
                raise DataError(
                    f"{bad} of {math.prod(x.shape[:-1])} vectors given to {name} hold nan or infinity",
                    "look at the encoder's weights and input; such a vector has no code",
                )

    def check_ids(self, ids: Tensor) -> None:
        if len(self.sizes) > 1 and ids.shape[-1:] != (len(self.sizes),):
            raise ConfigError(
                f"{type(self).__name__} has {len(self.sizes)} ids a vector; it was given {tuple(ids.shape)}",
                "keep them on the last axis",
            )
        check_range(ids, self.sizes, f"{type(self).__name__}'s ids")


def _whole(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Buffers stay in float32 also where they come from a file whose every weight was cast."""
    for name, own in module.named_buffers(recurse=False):
        found = state.get(prefix + name)
        if found is not None and own.is_floating_point() and found.is_floating_point():
            state[prefix + name] = found.to(own.dtype)


def check_range(ids: Tensor, sizes: tuple[int, ...], what: str) -> None:
    """Refuse ids that are no integers of 0 … size − 1."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ConfigError(f"{what} are integers, not {ids.dtype}", "give the ids that the quantizer gave, as int64")
    if not ids.numel() or not can_look(ids):
        return
    wide = torch.atleast_1d(ids.long())
    last = torch.tensor(sizes, device=ids.device) - 1 if max(sizes) < 2**63 else torch.tensor(2**63 - 1).to(ids.device)
    outside = (wide < 0) | (wide > last)
    if bool(outside.any()):
        ranges = f"0 … {sizes[0] - 1}" if len(set(sizes)) == 1 else f"0 … {[size - 1 for size in sizes]}"
        raise DataError(
            f"{int(outside.sum())} of {what} are outside {ranges}, such as {int(wide[outside][0])}",
            "they come from another quantizer, or were altered",
        )


def can_look(x: Tensor) -> bool:
    """Whether Python may ask for values: not while a graph is traced or captured, nor without data."""
    if torch.compiler.is_compiling() or x.device.type == "meta":
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def bits_of(size: int) -> int:
    """Whole bits that hold 0 … size − 1."""
    return max(1, (size - 1).bit_length())


def wide(x: Tensor) -> Tensor:
    """In float32, or float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mean_square(x: Tensor, y: Tensor) -> Tensor:
    """Mean (x − y)²; of no numbers, 0."""
    return (x - y).square().sum() / max(x.numel(), 1)


def entropy_of(p: Tensor) -> Tensor:
    """−Σ p log p, all of p, in nats; with a finite gradient where p is 0."""
    return -(p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum()
