"""Writer of token files (see `vitrail.codecs.token_file`).

The writer works on `NAME.partial` and renames it when it is complete. An interrupted writer resumes after the last
valid record: nothing is lost or duplicated, and the file is the same as without the interruption.

Shapes: h, w codes along the sides of an image, G id groups of a code.
"""

import contextlib
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from vitrail.codecs.bit_packing import pack_ids
from vitrail.codecs.token_file import (
    CHECKSUM_STRUCT,
    RECORD_STRUCT,
    ImageSize,
    TokenFileHeader,
    TokenFileIndex,
    TokenRecord,
    compute_record_checksum,
    encode_header,
    encode_trailer,
    read_header,
    split_groups,
)
from vitrail.errors import DataError
from vitrail.file_lock import lock_file


class TokenFileWriter:
    """Write images with `add` in order, then call `finish`.

    A writer that is left early keeps its records for the next writer of the same file, whose `completed_names` lists
    them. Of these, a multiple of `record_multiple` is kept.
    """

    def __init__(self, path: str | Path, header: TokenFileHeader, *, record_multiple: int = 1):
        self.path, self.header = Path(path), header
        self.partial_path = self.path.with_name(f"{self.path.name}.partial")
        self.completed_names: list[str] = []
        self._known: set[str] = set()
        self._index = TokenFileIndex(b"", [], [])
        self._offsets: list[int] = []
        self._digest = hashlib.sha256()
        if self.path.exists():
            raise DataError(f"{self.path} exists", "remove it, or give another path")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = _open_exclusively(self.partial_path)
        except OSError as error:
            raise DataError(f"{self.partial_path} cannot be written: {error.strerror}", "give another path") from error
        try:
            self._resume(record_multiple)
        except BaseException:
            self.file.close()
            raise

    def add(self, name: str, ids: Tensor, image_size: ImageSize, source_size: ImageSize | None = None) -> None:
        """Add ids int64 (h, w) or (h, w, G), as the header specifies."""
        ids = ids.detach().cpu()
        self._check(name, ids, image_size)
        packed = b"".join(
            pack_ids(part, bits) for part, bits in zip(split_groups(ids, self.header), self.header.bits, strict=True)
        )
        grid = (ids.shape[0], ids.shape[1])
        self._write(TokenRecord(name, None, grid, image_size, source_size or image_size, packed))

    def skip(self, name: str, reason: str) -> None:
        """Record an image that cannot be read, with the reason."""
        self._write(TokenRecord(name, reason, (0, 0), (0, 0), (0, 0), b""))

    def flush(self) -> None:
        """Flush buffered records to the operating system."""
        with self._writing():
            self.file.flush()

    def finish(self) -> Path:
        """Write index and trailer, and rename the file to its final name."""
        self._index.offsets = np.array(self._offsets, "<i8").tobytes()
        start, body = self.file.tell(), msgspec.msgpack.encode(self._index)
        self._put(body + CHECKSUM_STRUCT.pack(zlib.crc32(body)))
        with self._writing():
            self.file.write(encode_trailer(start, len(body), self._digest.digest()))
            self.file.flush()
            os.fsync(self.file.fileno())
            self.partial_path.replace(self.path)
            self.file.close()
        return self.path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # a full disk has been reported already
            self.file.close()

    # ---- records ------------------------------------------------------------------------------------------------

    def _check(self, name: str, ids: Tensor, size: ImageSize) -> None:
        sizes = self.header.sizes
        shaped = ids.ndim == 3 and ids.shape[-1] == len(sizes) if self.header.groups else ids.ndim == 2
        if ids.dtype != torch.int64 or not shaped or not ids.numel():
            expected_shape = f"(h, w, {len(sizes)})" if self.header.groups else "(h, w)"
            raise DataError(
                f"{name}: ids are {ids.dtype} {tuple(ids.shape)}", f"give int64 ids of shape {expected_shape}"
            )
        for part, count in zip(split_groups(ids, self.header), sizes, strict=True):
            if part.min() < 0 or part.max() > count - 1:
                raise DataError(f"{name}: ids are in {part.min()} … {part.max()}", f"give ids within 0 … {count - 1}")
        limits = [n * self.header.factor for n in ids.shape[:2]]
        if not all(0 < side <= limit for side, limit in zip(size, limits, strict=True)):
            raise DataError(
                f"{name}: an image of {size[0]} × {size[1]} does not match {ids.shape[0]} × {ids.shape[1]} codes",
                f"give a size from 1 × 1 to {limits[0]} × {limits[1]}",
            )

    def _write(self, body: TokenRecord) -> None:
        try:
            body.name.encode()
        except UnicodeEncodeError:
            raise DataError(f"the name {body.name!r} is not valid text", "rename the image") from None
        if body.name in self._known:
            raise DataError(f"two images have the name {body.name!r}", "give each its own name")
        start, data = self.file.tell(), msgspec.msgpack.encode(body)
        self._put(RECORD_STRUCT.pack(len(data), compute_record_checksum(start, data)) + data)
        self._remember(start, body)

    def _put(self, data: bytes) -> None:
        with self._writing():
            self.file.write(data)
        self._digest.update(data)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self.partial_path} cannot be written: {error.strerror}", "free disk space and run again to resume"
            ) from error

    def _remember(self, start: int, body: TokenRecord) -> None:
        self.completed_names.append(body.name)
        self._known.add(body.name)
        if body.error is None:
            self._offsets.append(start)
            self._index.names.append(body.name)
        else:
            self._index.errors.append((body.name, body.error))

    def _resume(self, multiple: int) -> None:
        """Keep the valid records of an interrupted writer, and truncate the rest."""
        header = encode_header(self.header)
        existing, ends, bodies = self.file.read(len(header)), [0], []
        if len(existing) == len(header) or not header.startswith(existing):  # else the header itself is incomplete
            self._check_header(read_header(self.file, self.partial_path)[0])
            ends = [len(header)]
            for body, end in _read_valid_records(self.file, len(header)):
                bodies.append(body)
                ends.append(end)
        num_kept = len(bodies) // multiple * multiple
        for start, body in zip(ends, bodies[:num_kept], strict=False):
            self._remember(start, body)
        self.file.seek(0)
        while (at := self.file.tell()) < ends[num_kept]:
            self._digest.update(self.file.read(min(1 << 20, ends[num_kept] - at)))
        self.file.truncate(ends[num_kept])
        if not ends[num_kept]:
            self._put(header)

    def _check_header(self, stored_header: TokenFileHeader) -> None:
        for field in (
            field for field in stored_header.__struct_fields__ if field != "name"
        ):  # the codec may have been moved
            expected, actual = getattr(stored_header, field), getattr(self.header, field)
            if expected != actual:
                raise DataError(
                    f"{self.partial_path} was started with another {field}: {expected!r:.80}, not {actual!r:.80}",
                    "resume with the same settings, or remove it",
                )


def _open_exclusively(path: Path) -> BinaryIO:
    """Open the file for reading and writing, locked for this process."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
    try:
        lock_file(file, wait=False)
        # Another process may have finished and renamed the file since it was opened here.
        alone = path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except OSError:
        alone = False
    if not alone:
        file.close()
        raise DataError(f"{path} is being written by another process", "wait for it, or give another path")
    return file


def _read_valid_records(file: BinaryIO, start: int) -> Iterator[tuple[TokenRecord, int]]:
    """Yield the records from `start` and the end of each, up to the first invalid one."""
    size = os.fstat(file.fileno()).st_size
    file.seek(start)
    while True:
        frame = file.read(RECORD_STRUCT.size)
        length, check = RECORD_STRUCT.unpack(frame) if len(frame) == RECORD_STRUCT.size else (size, 0)
        if length > size - start - RECORD_STRUCT.size:
            return
        data = file.read(length)
        if compute_record_checksum(start, data) != check:
            return
        try:
            body = msgspec.msgpack.decode(data, type=TokenRecord)
        except msgspec.DecodeError:
            return
        start += RECORD_STRUCT.size + length
        yield body, start
