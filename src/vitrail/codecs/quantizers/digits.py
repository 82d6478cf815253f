"""Ids as numbers of mixed radix: a digit a dimension, all in integers, exact up to 63 bits.

… any axes, D digits, G groups of digits
"""

import itertools
import math

import torch
from torch import Tensor

from vitrail.errors import ConfigError

MOST = 2**63  # ids are int64
EXACT = 2**24  # below, float32 has every integer


def places(radices: tuple[int, ...], low_first: bool) -> list[int]:
    """What each digit counts for."""
    ordered = radices if low_first else radices[::-1]
    values = [1, *itertools.accumulate(ordered[:-1], lambda a, b: a * b)]
    return values if low_first else values[::-1]


def of(size: int) -> tuple[int, ...]:
    """The digits of an id below `size`: its bits, if it is a power of two."""
    return (2,) * (size - 1).bit_length() if size > 1 and size & (size - 1) == 0 else (size,)


def check(radices: tuple[int, ...], what: str) -> None:
    if not radices or min(radices) < 2:
        raise ConfigError(f"{what} cannot be {list(radices)}", "give one number of at least 2 for each dimension")
    if math.prod(radices) > MOST:
        raise ConfigError(
            f"{what} {list(radices)} make ids of {(math.prod(radices) - 1).bit_length()} bits; 63 fit an integer",
            "use fewer, or several quantizers side by side",
        )


def grouped(radices: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """Neighbouring digits together, as many in every group."""
    if groups < 1 or not radices or len(radices) % groups:
        fits = [g for g in range(1, len(radices) + 1) if len(radices) % g == 0]
        raise ConfigError(
            f"ids of {len(radices)} digits cannot be split into {groups} equal groups",
            f"choose from {', '.join(map(str, fits))}" if fits else "this quantizer's ids have no digits",
        )
    each = len(radices) // groups
    return tuple(math.prod(radices[i : i + each]) for i in range(0, len(radices), each))


def split(ids: Tensor, radices: tuple[int, ...], low_first: bool) -> Tensor:
    """(…) → (…, D)"""
    if len(radices) == 1:
        return ids.long().unsqueeze(-1)  # a radix of 2⁶³ is no int64
    ids = ids.long()
    parts = [ids // place % radix for place, radix in zip(places(radices, low_first), radices, strict=True)]
    return torch.stack(parts, -1).long()


def join(values: Tensor, radices: tuple[int, ...], low_first: bool) -> Tensor:
    """(…, D) → (…): in float32 while it holds every sum exactly, and in int64 beyond its 24 bits. Never by a matrix
    product, which may be taken in fewer bits."""
    if math.prod(radices) <= EXACT and values.dtype == torch.float32:
        total = values[..., 0] * places(radices, low_first)[0]
        for digit, place in zip(values.unbind(-1)[1:], places(radices, low_first)[1:], strict=True):
            total = total.add_(digit, alpha=place)
        return total.long()
    ids = torch.zeros(values.shape[:-1], dtype=torch.int64, device=values.device)
    for digit, place in zip(values.unbind(-1), places(radices, low_first), strict=True):
        ids = ids + digit.long() * place
    return ids
