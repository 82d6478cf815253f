"""GGUF files (versions 2 and 3): metadata and tensors.

The files are untrusted: every count, length and offset is checked against the file size before it is used.
"""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.hub.gguf_quantization import QUANTIZATION_TYPES, QuantizationType

MAGIC = b"GGUF"
NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9
MAX_ARRAY_DEPTH = 4  # nested arrays
MIN_PAIR_BYTES, MIN_TENSOR_BYTES = (
    8 + 4 + 1,
    8 + 4 + 8 + 4 + 8,
)  # smallest size of a metadata pair and of a tensor entry
MAX_AXES = 4


class TensorEntry(NamedTuple):
    """A tensor: its shape with rows first, its type, and its bytes [start, end) in the file."""

    shape: tuple[int, ...]
    quantization: QuantizationType
    start: int
    end: int


class _Cursor:
    """Sequential reader that never reads past the end of the file."""

    def __init__(self, path: Path, data: np.memmap):
        self.path, self.data, self.position = path, data.data, 0

    def take(self, size: int, field: str) -> memoryview:
        """Read bytes."""
        if size > len(self.data) - self.position:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: {field} at byte {self.position:,} needs {size:,} bytes, "
                f"but {len(self.data) - self.position:,} are left",
                "download it again",
            )
        self.position += size
        return self.data[self.position - size : self.position]

    def number(self, kind: str, field: str) -> Any:
        """Read a number of a `struct` format."""
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind), field))[0]

    def count(self, field: str, min_bytes: int) -> int:
        """Read the number of items that follow, each of at least `min_bytes` bytes."""
        number = self.number("Q", f"the number of {field}")
        if number * min_bytes > len(self.data) - self.position:
            raise CheckpointError(
                f"{self.path} declares {number:,} {field} and has {len(self.data) - self.position:,} bytes left for "
                f"them",
                "download it again",
            )
        return number

    def text(self, field: str) -> str:
        """Read a string."""
        raw = self.take(self.number("Q", f"the length of {field}"), field)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {field} is not UTF-8", "download it again") from None

    def value(self, kind: int, field: str, depth: int = 0) -> Any:
        """Read a metadata value of any type."""
        if kind in NUMBER_FORMATS:
            return self.number(NUMBER_FORMATS[kind], field)
        if kind == STRING:
            return self.text(field)
        if kind != ARRAY or depth == MAX_ARRAY_DEPTH:
            reason = f"arrays {depth} deep" if kind == ARRAY else f"a value of the unknown type {kind}"
            raise CheckpointError(f"{self.path}: {field} contains {reason}", "download it again")
        inner = self.number("I", f"the type of {field}")
        if inner in NUMBER_FORMATS:
            width = struct.calcsize("<" + NUMBER_FORMATS[inner])
            raw = self.take(self.count(f"values of {field}", width) * width, field)
            return np.frombuffer(raw, np.dtype("<" + NUMBER_FORMATS[inner])).tolist()
        return [self.value(inner, field, depth + 1) for _ in range(self.count(f"values of {field}", 8))]


class GGUFFile:
    """A GGUF file: `metadata`, tensor `entries` by name, and `read_tensor`, which dequantizes one."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            if not self.path.stat().st_size:
                raise CheckpointError(f"{self.path} is empty", "download it again")
            self._data = np.memmap(self.path, mode="r")
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}", "check the path") from None
        cursor = _Cursor(self.path, self._data)
        if cursor.take(4, "the magic number") != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file", "download it again")
        version = cursor.number("I", "the version")
        if version not in (2, 3):
            raise CheckpointError(
                f"{self.path} has GGUF version {version}", "versions 2 and 3 (little-endian) are supported"
            )
        tensors = cursor.count("tensors", MIN_TENSOR_BYTES)
        self.metadata: dict[str, Any] = {}
        for _ in range(cursor.count("metadata pairs", MIN_PAIR_BYTES)):
            key = cursor.text("a metadata key")
            if key in self.metadata:
                raise CheckpointError(f"{self.path} has the key {key[:80]!r} twice", "download it again")
            self.metadata[key] = cursor.value(cursor.number("I", f"the type of {key[:80]!r}"), repr(key[:80]))
        self.entries = self._entries(cursor, tensors)

    def _entries(self, cursor: _Cursor, count: int) -> dict[str, TensorEntry]:
        declared: dict[str, tuple[tuple[int, ...], QuantizationType, int]] = {}
        for _ in range(count):
            name = cursor.text("a tensor's name")
            field = f"tensor {name[:80]!r}"
            axes = cursor.number("I", field)
            if not 1 <= axes <= MAX_AXES or name in declared:
                raise CheckpointError(f"{self.path}: {field} has {axes} axes or is a duplicate", "download it again")
            # The file stores the fastest axis first.
            shape = tuple(cursor.number("Q", field) for _ in range(axes))[::-1]
            kind, offset = cursor.number("I", field), cursor.number("Q", field)
            if kind not in QUANTIZATION_TYPES:
                known = ", ".join(quant.name for quant in QUANTIZATION_TYPES.values())
                raise CheckpointError(f"{self.path}: {field} has the unsupported type {kind}", f"known: {known}")
            quant = QUANTIZATION_TYPES[kind]
            if shape[-1] % quant.block_length or 0 in shape:
                raise CheckpointError(
                    f"{self.path}: {field} of shape {shape} is not divisible into {quant.name} blocks"
                )
            declared[name] = shape, quant, offset
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path} aligns its tensors to {alignment!r} bytes", "it must be a power of 2")
        data_start, entries = -(-cursor.position // alignment) * alignment, {}
        for name, (shape, quant, offset) in declared.items():
            numbers = 1
            for n in shape:
                numbers *= n
            start = data_start + offset
            end = start + numbers // quant.block_length * quant.block_bytes
            if offset % alignment or end > len(self._data):
                raise CheckpointError(
                    f"{self.path} is truncated or damaged: tensor {name[:80]!r} is at bytes {start:,} to {end:,}, "
                    f"but the file has {len(self._data):,}",
                    "download it again",
                )
            entries[name] = TensorEntry(shape, quant, start, end)
        return entries

    def read_tensor(self, name: str) -> Tensor:
        """Read and dequantize a tensor, float32."""
        if name not in self.entries:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}", "check that the checkpoint is complete and of this kind"
            )
        shape, quant, start, end = self.entries[name]
        blocks = np.array(self._data[start:end]).reshape(-1, quant.block_bytes)
        return torch.from_numpy(quant.dequantize(blocks)).reshape(shape)

    def require_value(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return a metadata value of the given type. `{arch}` in the key stands for the architecture."""
        key = key.replace("{arch}", str(self.metadata.get("general.architecture")))
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            raise CheckpointError(f"{self.path}: {key} is {'missing' if value is None else repr(value)[:80]}")
        return value

    def get_value(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a metadata value, or the default if it is missing."""
        full = key.replace("{arch}", str(self.metadata.get("general.architecture")))
        return default if full not in self.metadata else self.require_value(key, kind)
