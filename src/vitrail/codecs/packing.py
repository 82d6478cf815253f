"""Ids as bits, one after the other: exact for 1 … 63 bits an id and any number of them.

Bit b of id i is bit i · bits + b of the stream; bit j of the stream is bit j mod 8 of byte j // 8, lowest first. What
is left of the last byte is 0.
"""

import math

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError

WORD = 64
BLOCK = 2**16  # ids at a time: their words stay in the cache


def packed_size(count: int, bits: int) -> int:
    """Bytes that `count` ids take."""
    return -(-count * _checked(bits) // 8)


def pack(ids: Tensor, bits: int) -> bytes:
    """ids of any shape, 0 … 2^bits − 1, in order."""
    _checked(bits)
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ConfigError(f"ids to pack are integers, not {ids.dtype}", "give the ids that the quantizer gave")
    values = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
    if values.size and (values.min() < 0 or values.max() >> bits):
        wrong = values[(values < 0) | (values >> bits != 0)]
        raise DataError(
            f"{wrong.size} of {values.size} ids do not fit {bits} bits, such as {wrong[0]}",
            "pack with the bits of the quantizer they come from",
        )
    period, words = _cycle(bits)
    cycles = -(-values.size // period)
    out = np.empty(cycles * words, "<u8")
    for start in range(0, cycles, step := max(1, BLOCK // period)):
        stop = min(start + step, cycles)
        part = values[start * period : stop * period].view(np.uint64)
        if part.size < (stop - start) * period:
            part = np.concatenate([part, np.zeros((stop - start) * period - part.size, np.uint64)])
        columns = np.ascontiguousarray(part.reshape(-1, period).T)  # (period, cycles): one place of a cycle a row
        held = np.zeros((words, stop - start), np.uint64)
        for place, (word, shift) in enumerate(_places(bits)):
            held[word] |= columns[place] << np.uint64(shift)
            if shift + bits > WORD:
                held[word + 1] |= columns[place] >> np.uint64(WORD - shift)
        out[start * words : stop * words] = held.T.ravel()
    return out.tobytes()[: packed_size(values.size, bits)]


def unpack(data: bytes | bytearray | memoryview | np.ndarray, bits: int, count: int) -> Tensor:
    """What `pack` has made of `count` ids → (count,) int64"""
    raw = np.frombuffer(data, np.uint8)
    size = packed_size(count, bits)
    if count < 0 or raw.size != size:
        raise DataError(
            f"{count} ids of {bits} bits take {size} bytes; there are {raw.size}",
            "the data is cut off or of another kind",
        )
    if count * bits % 8 and raw[-1] >> (count * bits % 8):
        raise DataError(f"the last byte of {count} ids of {bits} bits has bits that no id has set", "it was altered")
    period, words = _cycle(bits)
    cycles = -(-count // period)
    ids, mask = np.empty(cycles * period, np.int64), np.uint64(2**bits - 1)
    for start in range(0, cycles, step := max(1, BLOCK // period)):
        stop = min(start + step, cycles)
        part = raw[start * words * 8 : stop * words * 8]
        if part.size < (stop - start) * words * 8:
            part = np.concatenate([part, np.zeros((stop - start) * words * 8 - part.size, np.uint8)])
        held = np.ascontiguousarray(part.copy().view("<u8").reshape(-1, words).T)
        columns = np.empty((period, stop - start), np.uint64)
        for place, (word, shift) in enumerate(_places(bits)):
            value = held[word] >> np.uint64(shift)
            if shift + bits > WORD:
                value |= held[word + 1] << np.uint64(WORD - shift)
            columns[place] = value & mask
        ids[start * period : stop * period] = columns.T.ravel()
    return torch.from_numpy(ids[:count])


def _checked(bits: int) -> int:
    if not 1 <= bits <= 63:
        raise ConfigError(f"ids of {bits} bits cannot be packed", "1 … 63 bits an id")
    return bits


def _cycle(bits: int) -> tuple[int, int]:
    """After so many ids, in so many words, the same begins again."""
    common = math.gcd(bits, WORD)
    return WORD // common, bits // common


def _places(bits: int) -> list[tuple[int, int]]:
    """Word and bit at which each id of a cycle begins."""
    return [divmod(place * bits, WORD) for place in range(_cycle(bits)[0])]
