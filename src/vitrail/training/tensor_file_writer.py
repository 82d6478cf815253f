"""Write safetensors files without holding the interpreter lock, so that a thread can write while training goes on."""

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 2**24
DTYPE_NAMES = {  # in the order in which safetensors stores them
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class WrittenFile(NamedTuple):
    size: int  # bytes
    sha256: str


def write_tensor_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> WrittenFile:
    """Write tensors of the CPU to a safetensors file and sync it to disk. Returns its size and checksum.

    `safetensors.torch.save_file` writes the same bytes, but copies each tensor and blocks all other threads meanwhile.
    """
    order = list(DTYPE_NAMES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for part in (struct.pack("<Q", len(text)) + text, *(_view_bytes(tensors[name]) for name in names)):
            data = memoryview(part)
            while len(data):
                written = file.write(data[:CHUNK_BYTES])
                digest.update(data[:written])
                data, size = data[written:], size + (written or 0)
        os.fsync(file.fileno())
    return WrittenFile(size, digest.hexdigest())


def _view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor without a copy."""
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
