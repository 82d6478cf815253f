"""The number types of GGUF files, and how each is turned back into floats.

A quantised row is a chain of blocks; a block holds small integers and a scale or two. Every function takes blocks as
bytes (N, size) and gives numbers (N, length) in float32.

N blocks
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Quant(NamedTuple):
    name: str
    length: int  # numbers a block
    size: int  # bytes a block
    read: Callable[[Array], Array]


def _half(blocks: Array, at: int) -> Array:
    """The float16 at a byte, (N, 1) float32."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """All low halves of the bytes, then all high halves: (N, n) → (N, 2n)."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(packed: Array) -> Array:
    """32 bits, lowest first, each worth 16: (N, 4) → (N, 32)."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _f32(blocks: Array) -> Array:
    return blocks.view("<f4")


def _f16(blocks: Array) -> Array:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Array) -> Array:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)  # the upper half of a float32


def _q4_0(blocks: Array) -> Array:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Array) -> Array:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Array) -> Array:
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (q.astype(np.float32) - 16)


def _q5_1(blocks: Array) -> Array:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * q.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Array) -> Array:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


# ---- K-quants: 256 numbers in parts, each part with a small scale (and least value) of its own ------------------


def _six_bits(packed: Array) -> tuple[Array, Array]:
    """Scales and least values of 8 parts, 6 bits each, from 12 bytes: (N, 12) → (N, 8) twice.

    The first four of each lie in the low bits of bytes 0–3 and 4–7. The others have their low 4 bits in bytes 8–11,
    and their upper 2 bits are what the first eight bytes have left at the top.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    least = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scale.astype(np.float32), least.astype(np.float32)


def _parts_of_32(blocks: Array, q: Array) -> Array:
    """q (N, 8, 32) under the scales that Q4_K and Q5_K share."""
    scale, least = _six_bits(blocks[:, 4:16])
    scale, least = _half(blocks, 0) * scale, _half(blocks, 2) * least  # (N, 8)
    return (scale[:, :, None] * q.astype(np.float32) - least[:, :, None]).reshape(len(blocks), 256)


def _quads(packed: Array) -> Array:
    """Four runs of 32 bytes; the low halves of a run are one part, the high halves the next: (N, 128) → (N, 8, 32)."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Array) -> Array:
    return _parts_of_32(blocks, _quads(blocks[:, 16:]))


def _q5_k(blocks: Array) -> Array:
    part = np.arange(8, dtype=np.uint8)[:, None]
    fifth = blocks[:, None, 16:48] >> part & 1  # bit i of byte j belongs to number j of part i
    return _parts_of_32(blocks, _quads(blocks[:, 48:]) | fifth << 4)


def _q6_k(blocks: Array) -> Array:
    # Two halves of 128 numbers. Of each, 64 bytes hold the low 4 bits, as runs of 32: low low, high high; and 32
    # bytes hold the upper 2 bits of the four runs.
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    low = np.concatenate([low & 15, low >> 4], axis=2)  # (N, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)  # (N, 16)
    return (scale[:, :, None] * q).reshape(len(blocks), 256)


QUANTS: dict[int, Quant] = {
    0: Quant("F32", 1, 4, _f32),
    1: Quant("F16", 1, 2, _f16),
    2: Quant("Q4_0", 32, 18, _q4_0),
    3: Quant("Q4_1", 32, 20, _q4_1),
    6: Quant("Q5_0", 32, 22, _q5_0),
    7: Quant("Q5_1", 32, 24, _q5_1),
    8: Quant("Q8_0", 32, 34, _q8_0),
    12: Quant("Q4_K", 256, 144, _q4_k),
    13: Quant("Q5_K", 256, 176, _q5_k),
    14: Quant("Q6_K", 256, 210, _q6_k),
    30: Quant("BF16", 1, 2, _bf16),
}
"""The number a GGUF file gives a type → the type"""
