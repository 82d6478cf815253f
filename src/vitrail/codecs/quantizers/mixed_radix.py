"""Ids as mixed-radix numbers with one digit for each dimension, exact up to 63 bits.

Shapes: … any axes, D digits, G groups of digits.
"""

import itertools
import math

import torch
from torch import Tensor

from vitrail.errors import ConfigError

MAX_IDS = 2**63  # ids are int64
MAX_EXACT_FLOAT32 = 2**24  # float32 represents all integers below


def place_values(radices: tuple[int, ...], lowest_digit_first: bool) -> list[int]:
    """Place value of each digit."""
    ordered = radices if lowest_digit_first else radices[::-1]
    values = [1, *itertools.accumulate(ordered[:-1], lambda a, b: a * b)]
    return values if lowest_digit_first else values[::-1]


def make_radices(size: int) -> tuple[int, ...]:
    """Radices of ids below `size`: bits if it is a power of two, else one digit."""
    return (2,) * (size - 1).bit_length() if size > 1 and size & (size - 1) == 0 else (size,)


def check_radices(radices: tuple[int, ...], name: str) -> None:
    if not radices or min(radices) < 2:
        raise ConfigError(f"{name} are {list(radices)}", "give one number of at least 2 for each dimension")
    if math.prod(radices) > MAX_IDS:
        raise ConfigError(
            f"{name} {list(radices)} need ids of {(math.prod(radices) - 1).bit_length()} bits, more than 63",
            "use fewer, or several quantizers",
        )


def group_radices(radices: tuple[int, ...], num_groups: int) -> tuple[int, ...]:
    """Merge neighbouring digits to groups of equal length."""
    if num_groups < 1 or not radices or len(radices) % num_groups:
        fits = [g for g in range(1, len(radices) + 1) if len(radices) % g == 0]
        raise ConfigError(
            f"ids of {len(radices)} digits cannot be split into {num_groups} equal groups",
            f"choose from {', '.join(map(str, fits))}" if fits else "use a quantizer whose ids have digits",
        )
    each = len(radices) // num_groups
    return tuple(math.prod(radices[i : i + each]) for i in range(0, len(radices), each))


def split_digits(ids: Tensor, radices: tuple[int, ...], lowest_digit_first: bool) -> Tensor:
    """Split ids (…) into digits (…, D)."""
    if len(radices) == 1:
        return ids.long().unsqueeze(-1)  # a radix of 2⁶³ is no int64
    ids = ids.long()
    parts = [
        ids // place % radix for place, radix in zip(place_values(radices, lowest_digit_first), radices, strict=True)
    ]
    return torch.stack(parts, -1).long()


def join_digits(values: Tensor, radices: tuple[int, ...], lowest_digit_first: bool) -> Tensor:
    """Join digits (…, D) to ids (…).

    The sum is in float32 while it is exact, else in int64. A matrix product is not used: it may have a lower precision.
    """
    if math.prod(radices) <= MAX_EXACT_FLOAT32 and values.dtype == torch.float32:
        total = values[..., 0] * place_values(radices, lowest_digit_first)[0]
        for digit, place in zip(values.unbind(-1)[1:], place_values(radices, lowest_digit_first)[1:], strict=True):
            total = total.add_(digit, alpha=place)
        return total.long()
    ids = torch.zeros(values.shape[:-1], dtype=torch.int64, device=values.device)
    for digit, place in zip(values.unbind(-1), place_values(radices, lowest_digit_first), strict=True):
        ids = ids + digit.long() * place
    return ids
