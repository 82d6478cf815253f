"""Bit packing of ids: lossless for 1 … 63 bits an id and any number of ids.

Bit b of id i is bit i · bits + b of the stream; bit j of the stream is bit j mod 8 of byte j // 8, lowest first. Unused
bits of the last byte are 0.
"""

import math

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError

WORD_BITS = 64
BLOCK_SIZE = 2**16  # ids packed at a time, so that their words fit into the CPU cache


def compute_packed_size(count: int, bits: int) -> int:
    """Return the number of bytes of `count` packed ids."""
    return -(-count * _checked(bits) // 8)


def pack_ids(ids: Tensor, bits: int) -> bytes:
    """Pack ids of any shape, 0 … 2^bits − 1, in order."""
    _checked(bits)
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ConfigError(f"ids have dtype {ids.dtype}, not an integer type", "give the ids of a quantizer")
    values = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
    if values.size and (values.min() < 0 or values.max() >> bits):
        wrong = values[(values < 0) | (values >> bits != 0)]
        raise DataError(
            f"{wrong.size} of {values.size} ids do not fit {bits} bits, for example {wrong[0]}",
            "pack with the number of bits of their quantizer",
        )
    period, words = _cycle(bits)
    cycles = -(-values.size // period)
    out = np.empty(cycles * words, "<u8")
    for start in range(0, cycles, step := max(1, BLOCK_SIZE // period)):
        stop = min(start + step, cycles)
        part = values[start * period : stop * period].view(np.uint64)
        if part.size < (stop - start) * period:
            part = np.concatenate([part, np.zeros((stop - start) * period - part.size, np.uint64)])
        columns = np.ascontiguousarray(part.reshape(-1, period).T)  # (period, cycles): one row for each id of a cycle
        packed_words = np.zeros((words, stop - start), np.uint64)
        for place, (word, shift) in enumerate(_places(bits)):
            packed_words[word] |= columns[place] << np.uint64(shift)
            if shift + bits > WORD_BITS:
                packed_words[word + 1] |= columns[place] >> np.uint64(WORD_BITS - shift)
        out[start * words : stop * words] = packed_words.T.ravel()
    return out.tobytes()[: compute_packed_size(values.size, bits)]


def unpack_ids(data: bytes | bytearray | memoryview | np.ndarray, bits: int, count: int) -> Tensor:
    """Unpack `count` ids that `pack_ids` has packed: (count,) int64."""
    raw = np.frombuffer(data, np.uint8)
    size = compute_packed_size(count, bits)
    if count < 0 or raw.size != size:
        raise DataError(
            f"{count} ids of {bits} bits take {size} bytes; there are {raw.size}",
            "the data is truncated or was packed with another number of bits",
        )
    if count * bits % 8 and raw[-1] >> (count * bits % 8):
        raise DataError(f"the last byte of {count} ids of {bits} bits has unused bits set", "the data is corrupted")
    period, words = _cycle(bits)
    cycles = -(-count // period)
    ids, mask = np.empty(cycles * period, np.int64), np.uint64(2**bits - 1)
    for start in range(0, cycles, step := max(1, BLOCK_SIZE // period)):
        stop = min(start + step, cycles)
        part = raw[start * words * 8 : stop * words * 8]
        if part.size < (stop - start) * words * 8:
            part = np.concatenate([part, np.zeros((stop - start) * words * 8 - part.size, np.uint8)])
        packed_words = np.ascontiguousarray(part.copy().view("<u8").reshape(-1, words).T)
        columns = np.empty((period, stop - start), np.uint64)
        for place, (word, shift) in enumerate(_places(bits)):
            value = packed_words[word] >> np.uint64(shift)
            if shift + bits > WORD_BITS:
                value |= packed_words[word + 1] << np.uint64(WORD_BITS - shift)
            columns[place] = value & mask
        ids[start * period : stop * period] = columns.T.ravel()
    return torch.from_numpy(ids[:count])


def _checked(bits: int) -> int:
    if not 1 <= bits <= 63:
        raise ConfigError(f"ids of {bits} bits cannot be packed", "use 1 … 63 bits")
    return bits


def _cycle(bits: int) -> tuple[int, int]:
    """Number of ids and of words after which the bit alignment repeats."""
    common = math.gcd(bits, WORD_BITS)
    return WORD_BITS // common, bits // common


def _places(bits: int) -> list[tuple[int, int]]:
    """Word and bit at which each id of a cycle starts."""
    return [divmod(place * bits, WORD_BITS) for place in range(_cycle(bits)[0])]
