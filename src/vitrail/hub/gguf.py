"""GGUF files (versions 2 and 3): what they say of themselves, and their tensors.

A file is a stranger's: every count, length and offset is held against the bytes that are there before it is used.
"""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.hub.quants import QUANTS, Quant

MAGIC = b"GGUF"
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9
DEEPEST = 4  # arrays within arrays
LEAST_PAIR, LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes a metadata pair and a tensor's entry have at least
AXES = 4


class Entry(NamedTuple):
    """One tensor: shape with rows first, type, and where its bytes lie in the file."""

    shape: tuple[int, ...]
    quant: Quant
    start: int
    end: int


class _Cursor:
    """Reads a file from the front, and never past its end."""

    def __init__(self, path: Path, data: np.memmap):
        self.path, self.data, self.at = path, data.data, 0

    def take(self, size: int, what: str) -> memoryview:
        if size > len(self.data) - self.at:
            raise CheckpointError(
                f"{self.path} is cut short or damaged: {what} at byte {self.at:,} needs {size:,} bytes "
                f"and {len(self.data) - self.at:,} are left",
                "fetch it again",
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, kind: str, what: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind), what))[0]

    def count(self, what: str, least: int) -> int:
        """How many of something follow, each of `least` bytes or more."""
        found = self.number("Q", f"the number of {what}")
        if found * least > len(self.data) - self.at:
            raise CheckpointError(
                f"{self.path} says it holds {found:,} {what} and has {len(self.data) - self.at:,} bytes left for them",
                "fetch it again",
            )
        return found

    def text(self, what: str) -> str:
        raw = self.take(self.number("Q", f"the length of {what}"), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8", "fetch it again") from None

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind], what)
        if kind == STRING:
            return self.text(what)
        if kind != ARRAY or depth == DEEPEST:
            reason = f"arrays {depth} deep" if kind == ARRAY else f"a value of the unknown type {kind}"
            raise CheckpointError(f"{self.path}: {what} holds {reason}", "fetch it again")
        inner = self.number("I", f"the type of {what}")
        if inner in NUMBERS:
            width = struct.calcsize("<" + NUMBERS[inner])
            raw = self.take(self.count(f"values of {what}", width) * width, what)
            return np.frombuffer(raw, np.dtype("<" + NUMBERS[inner])).tolist()
        return [self.value(inner, what, depth + 1) for _ in range(self.count(f"values of {what}", 8))]


class GGUF:
    """`metadata` as plain values, and `entries`, the tensors by name; `read` turns one back into floats."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            if not self.path.stat().st_size:
                raise CheckpointError(f"{self.path} is empty", "fetch it again")
            self._data = np.memmap(self.path, mode="r")
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}", "check the path") from None
        cursor = _Cursor(self.path, self._data)
        if cursor.take(4, "the magic number") != MAGIC:
            raise CheckpointError(f"{self.path} is no GGUF file", "fetch it again")
        version = cursor.number("I", "the version")
        if version not in (2, 3):
            raise CheckpointError(
                f"{self.path} is GGUF of version {version}", "versions 2 and 3 are read, little-endian"
            )
        tensors = cursor.count("tensors", LEAST_TENSOR)
        self.metadata: dict[str, Any] = {}
        for _ in range(cursor.count("metadata pairs", LEAST_PAIR)):
            key = cursor.text("a metadata key")
            if key in self.metadata:
                raise CheckpointError(f"{self.path} has the key {key[:80]!r} twice", "fetch it again")
            self.metadata[key] = cursor.value(cursor.number("I", f"the type of {key[:80]!r}"), repr(key[:80]))
        self.entries = self._entries(cursor, tensors)

    def _entries(self, cursor: _Cursor, count: int) -> dict[str, Entry]:
        found: dict[str, tuple[tuple[int, ...], Quant, int]] = {}
        for _ in range(count):
            name = cursor.text("a tensor's name")
            what = f"tensor {name[:80]!r}"
            axes = cursor.number("I", what)
            if not 1 <= axes <= AXES or name in found:
                raise CheckpointError(f"{self.path}: {what} has {axes} axes, or stands twice", "fetch it again")
            shape = tuple(cursor.number("Q", what) for _ in range(axes))[::-1]  # the file has the fastest axis first
            kind, offset = cursor.number("I", what), cursor.number("Q", what)
            if kind not in QUANTS:
                known = ", ".join(quant.name for quant in QUANTS.values())
                raise CheckpointError(f"{self.path}: {what} is of type {kind}, which is not read", f"known: {known}")
            quant = QUANTS[kind]
            if shape[-1] % quant.length or 0 in shape:
                raise CheckpointError(f"{self.path}: {what} of shape {shape} does not divide into {quant.name} blocks")
            found[name] = shape, quant, offset
        step = self.metadata.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1 or step & (step - 1):
            raise CheckpointError(f"{self.path} aligns its tensors to {step!r} bytes", "it must be a power of 2")
        base, entries = -(-cursor.at // step) * step, {}
        for name, (shape, quant, offset) in found.items():
            numbers = 1
            for n in shape:
                numbers *= n
            start = base + offset
            end = start + numbers // quant.length * quant.size
            if offset % step or end > len(self._data):
                raise CheckpointError(
                    f"{self.path} is cut short or damaged: tensor {name[:80]!r} lies at bytes {start:,} to {end:,} "
                    f"and {len(self._data):,} are there",
                    "fetch it again",
                )
            entries[name] = Entry(shape, quant, start, end)
        return entries

    def read(self, name: str) -> Tensor:
        """One tensor in float32."""
        if name not in self.entries:
            raise CheckpointError(f"{self.path} has no tensor {name!r}", "is it a checkpoint of this kind, and whole?")
        shape, quant, start, end = self.entries[name]
        blocks = np.array(self._data[start:end]).reshape(-1, quant.size)
        return torch.from_numpy(quant.read(blocks)).reshape(shape)

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """A metadata value of a given type; `{arch}` in the key is the model's architecture."""
        key = key.replace("{arch}", str(self.metadata.get("general.architecture")))
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            raise CheckpointError(f"{self.path}: {key} is {'missing' if value is None else repr(value)[:80]}")
        return value

    def maybe(self, key: str, kind: type | tuple[type, ...], otherwise: Any = None) -> Any:
        full = key.replace("{arch}", str(self.metadata.get("general.architecture")))
        return otherwise if full not in self.metadata else self.need(key, kind)
