"""Quantization types of GGUF files, and how each is dequantized.

A quantized row is a sequence of blocks. A block holds small integers and one or two scales. Every function takes N
blocks as bytes (N, block_bytes) and returns float32 values (N, block_length).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Array = np.ndarray


class QuantizationType(NamedTuple):
    """A quantization type."""

    name: str
    block_length: int  # values in a block
    block_bytes: int  # bytes of a block
    dequantize: Callable[[Array], Array]


def _read_scale(blocks: Array, offset: int) -> Array:
    """Read the float16 at a byte offset, (N, 1) float32."""
    return blocks[:, offset : offset + 2].copy().view("<f2").astype(np.float32)


def _unpack_nibbles(packed: Array) -> Array:
    """Return the low halves of all bytes, then the high halves: (N, n) → (N, 2n)."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _unpack_fifth_bits(packed: Array) -> Array:
    """Return 32 bits, lowest first, each with the value 16: (N, 4) → (N, 32)."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _dequantize_f32(blocks: Array) -> Array:
    return blocks.view("<f4")


def _dequantize_f16(blocks: Array) -> Array:
    return blocks.view("<f2").astype(np.float32)


def _dequantize_bf16(blocks: Array) -> Array:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)  # the upper half of a float32


def _dequantize_q4_0(blocks: Array) -> Array:
    return _read_scale(blocks, 0) * (_unpack_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _dequantize_q4_1(blocks: Array) -> Array:
    return _read_scale(blocks, 0) * _unpack_nibbles(blocks[:, 4:]).astype(np.float32) + _read_scale(blocks, 2)


def _dequantize_q5_0(blocks: Array) -> Array:
    q = _unpack_nibbles(blocks[:, 6:]) | _unpack_fifth_bits(blocks[:, 2:6])
    return _read_scale(blocks, 0) * (q.astype(np.float32) - 16)


def _dequantize_q5_1(blocks: Array) -> Array:
    q = _unpack_nibbles(blocks[:, 8:]) | _unpack_fifth_bits(blocks[:, 4:8])
    return _read_scale(blocks, 0) * q.astype(np.float32) + _read_scale(blocks, 2)


def _dequantize_q8_0(blocks: Array) -> Array:
    return _read_scale(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


# ---- K-quants: 256 values in parts, each with its own small scale (and minimum) ---------------------------------


def _unpack_six_bits(packed: Array) -> tuple[Array, Array]:
    """Unpack the scales and minimums of 8 parts, 6 bits each, from 12 bytes: (N, 12) → (N, 8) twice.

    The first four of each are the low bits of bytes 0–3 and 4–7. The others have their low 4 bits in bytes 8–11 and
    their high 2 bits in the high bits of bytes 0–7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minimum = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _scale_parts(blocks: Array, q: Array) -> Array:
    """Apply the scales and minimums of Q4_K and Q5_K to q (N, 8, 32)."""
    scale, minimum = _unpack_six_bits(blocks[:, 4:16])
    scale, minimum = _read_scale(blocks, 0) * scale, _read_scale(blocks, 2) * minimum  # (N, 8)
    return (scale[:, :, None] * q.astype(np.float32) - minimum[:, :, None]).reshape(len(blocks), 256)


def _unpack_runs(packed: Array) -> Array:
    """Unpack four runs of 32 bytes: low halves are one part, high halves the next. (N, 128) → (N, 8, 32)."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _dequantize_q4_k(blocks: Array) -> Array:
    return _scale_parts(blocks, _unpack_runs(blocks[:, 16:]))


def _dequantize_q5_k(blocks: Array) -> Array:
    part = np.arange(8, dtype=np.uint8)[:, None]
    fifth = blocks[:, None, 16:48] >> part & 1  # bit i of byte j belongs to value j of part i
    return _scale_parts(blocks, _unpack_runs(blocks[:, 48:]) | fifth << 4)


def _dequantize_q6_k(blocks: Array) -> Array:
    # Two halves of 128 values. For each half, 64 bytes hold the low 4 bits as runs of 32 (low, low, high, high), and
    # 32 bytes hold the high 2 bits of the four runs.
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    low = np.concatenate([low & 15, low >> 4], axis=2)  # (N, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scale = _read_scale(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)  # (N, 16)
    return (scale[:, :, None] * q).reshape(len(blocks), 256)


QUANTIZATION_TYPES: dict[int, QuantizationType] = {
    0: QuantizationType("F32", 1, 4, _dequantize_f32),
    1: QuantizationType("F16", 1, 2, _dequantize_f16),
    2: QuantizationType("Q4_0", 32, 18, _dequantize_q4_0),
    3: QuantizationType("Q4_1", 32, 20, _dequantize_q4_1),
    6: QuantizationType("Q5_0", 32, 22, _dequantize_q5_0),
    7: QuantizationType("Q5_1", 32, 24, _dequantize_q5_1),
    8: QuantizationType("Q8_0", 32, 34, _dequantize_q8_0),
    12: QuantizationType("Q4_K", 256, 144, _dequantize_q4_k),
    13: QuantizationType("Q5_K", 256, 176, _dequantize_q5_k),
    14: QuantizationType("Q6_K", 256, 210, _dequantize_q6_k),
    30: QuantizationType("BF16", 1, 2, _dequantize_bf16),
}
"""Type number in GGUF files → quantization type."""
