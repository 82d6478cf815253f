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
from typing import Any, BinaryIO, ClassVar, Generic, Self, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

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
    is_size_covered,
    pack_groups,
    read_header,
    split_groups,
)
from vitrail.errors import DataError
from vitrail.file_lock import lock_file

R = TypeVar("R")  # type of the records


class RecordWriter(Generic[R]):
    """Base class of the writers of images and videos: records, index and trailer, and resuming.

    A writer that is left early keeps its records for the next writer of the same file, whose `completed_names` lists
    them. Of these, a multiple of `record_multiple` is kept.
    """

    media: ClassVar[str]  # images or videos
    record_type: ClassVar[Any]

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

    def _check_name(self, name: str) -> None:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataError(f"the name {name!r} is not valid text", "rename the file") from None
        if name in self._known:
            raise DataError(f"two {self.media} have the name {name!r}", "give each file its own name")

    def check_ids(self, name: str, ids: Tensor) -> None:
        """Raise `DataError` if ids are outside the sizes of the header."""
        for part, count in zip(split_groups(ids, self.header), self.header.sizes, strict=True):
            if part.min() < 0 or part.max() > count - 1:
                raise DataError(f"{name}: ids are in {part.min()} … {part.max()}", f"give ids within 0 … {count - 1}")

    def _write(self, body: R) -> None:
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

    def _remember(self, start: int, body: R) -> None:
        """Enter a record into the index."""
        raise NotImplementedError

    def _resume(self, multiple: int) -> None:
        """Keep the valid records of an interrupted writer, and truncate the rest."""
        header = encode_header(self.header)
        existing, ends, bodies = self.file.read(len(header)), [0], []
        if len(existing) == len(header) or not header.startswith(existing):  # else the header itself is incomplete
            stored, first = read_header(self.file, self.partial_path)
            self._check_header(stored)
            ends = [first]  # another name, or an older version, gives the stored header another length
            for body, end in _read_valid_records(self.file, first, self.record_type):
                bodies.append(body)
                ends.append(end)
        num_kept = len(bodies) // multiple * multiple
        for start, body in zip(ends, bodies[:num_kept], strict=False):
            self._remember(start, body)
        self._truncate(ends[num_kept])
        if not ends[num_kept]:
            self._put(header)

    def _truncate(self, end: int) -> None:
        """Remove all bytes after `end`, and compute the digest of those before."""
        self.file.seek(0)
        self._digest = hashlib.sha256()
        while (at := self.file.tell()) < end:
            self._digest.update(self.file.read(min(1 << 20, end - at)))
        self.file.truncate(end)

    def _check_header(self, stored_header: TokenFileHeader) -> None:
        before, now = _flatten(stored_header), _flatten(self.header)
        for field in before.keys() - {"name"}:  # the codec may have been moved
            if before[field] != now.get(field):
                raise DataError(
                    f"{self.partial_path} was started with another {field}: {before[field]!r:.80}, "
                    f"not {now.get(field)!r:.80}",
                    "resume with the same settings, or remove it",
                )


class TokenFileWriter(RecordWriter[TokenRecord]):
    """Write images with `add` in order, then call `finish`."""

    media, record_type = "images", TokenRecord

    def add(self, name: str, ids: Tensor, image_size: ImageSize, source_size: ImageSize | None = None) -> None:
        """Add ids int64 (h, w) or (h, w, G), as the header specifies."""
        ids = ids.detach().cpu()
        self._check(name, ids, image_size)
        packed = pack_groups(ids, self.header)
        grid = (ids.shape[0], ids.shape[1])
        self._add_record(TokenRecord(name, None, grid, image_size, source_size or image_size, packed))

    def skip(self, name: str, reason: str) -> None:
        """Record an image that cannot be read, with the reason."""
        self._add_record(TokenRecord(name, reason, (0, 0), (0, 0), (0, 0), b""))

    def _add_record(self, body: TokenRecord) -> None:
        self._check_name(body.name)
        self._write(body)

    def _remember(self, start: int, body: TokenRecord) -> None:
        self.completed_names.append(body.name)
        self._known.add(body.name)
        if body.error is None:
            self._offsets.append(start)
            self._index.names.append(body.name)
        else:
            self._index.errors.append((body.name, body.error))

    def _check(self, name: str, ids: Tensor, size: ImageSize) -> None:
        sizes = self.header.sizes
        shaped = ids.ndim == 3 and ids.shape[-1] == len(sizes) if self.header.groups else ids.ndim == 2
        if ids.dtype != torch.int64 or not shaped or not ids.numel():
            expected_shape = f"(h, w, {len(sizes)})" if self.header.groups else "(h, w)"
            raise DataError(
                f"{name}: ids are {ids.dtype} {tuple(ids.shape)}", f"give int64 ids of shape {expected_shape}"
            )
        self.check_ids(name, ids)
        limits = [n * self.header.factor for n in ids.shape[:2]]
        if not is_size_covered(size, (ids.shape[0], ids.shape[1]), self.header.factor):
            raise DataError(
                f"{name}: an image of {size[0]} × {size[1]} does not match {ids.shape[0]} × {ids.shape[1]} codes",
                f"give a size from 1 × 1 to {limits[0]} × {limits[1]}",
            )


def _flatten(header: TokenFileHeader) -> dict[str, Any]:
    """Return the fields of a header, with those of its videos."""
    fields = header.to_dict()
    return fields | (fields.pop("video") or {})


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


def _read_valid_records(file: BinaryIO, start: int, record_type: Any) -> Iterator[tuple[Any, int]]:
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
            body = msgspec.msgpack.decode(data, type=record_type)
        except msgspec.DecodeError:
            return
        start += RECORD_STRUCT.size + length
        yield body, start
