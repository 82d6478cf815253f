"""Writing a file of tokens (see `vitrail.codecs.container`).

A writer works on `NAME.partial` and gives it its name when it is whole. One that was killed goes on behind the records
that are sound: nothing is lost, nothing is there twice, and the file comes out as if nothing had happened.

h, w codes along the sides of a picture, G groups of a code
"""

import contextlib
import fcntl
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

from vitrail.codecs.container import (
    CHECK,
    FRAME,
    Body,
    Header,
    Index,
    Size,
    checksum,
    groups,
    lead_of,
    read_lead,
    trailer_of,
)
from vitrail.codecs.packing import pack
from vitrail.errors import DataError


class TokenWriter:
    """`add` pictures in order, then `finish`. Left early, it keeps what it has for the next writer of the same file,
    whose `done` names the pictures that are there already; of those, `multiple` at a time are kept."""

    def __init__(self, path: str | Path, header: Header, *, multiple: int = 1):
        self.path, self.header = Path(path), header
        self.partial = self.path.with_name(f"{self.path.name}.partial")
        self.done: list[str] = []
        self._known: set[str] = set()
        self._index = Index(b"", [], [])
        self._offsets: list[int] = []
        self._digest = hashlib.sha256()
        if self.path.exists():
            raise DataError(f"{self.path} exists already", "remove it, or give another path")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = _alone(self.partial)
        except OSError as error:
            raise DataError(f"{self.partial} cannot be written: {error.strerror}", "give another path") from error
        try:
            self._go_on(multiple)
        except BaseException:
            self.file.close()
            raise

    def add(self, name: str, ids: Tensor, size: Size, source: Size | None = None) -> None:
        """ids int64 (h, w) or (h, w, G), as the header says."""
        ids = ids.detach().cpu()
        self._check(name, ids, size)
        packed = b"".join(
            pack(part, bits) for part, bits in zip(groups(ids, self.header), self.header.bits, strict=True)
        )
        grid = (ids.shape[0], ids.shape[1])
        self._write(Body(name, None, grid, size, source or size, packed))

    def skip(self, name: str, reason: str) -> None:
        """A picture that cannot be read: its place is kept, with the reason."""
        self._write(Body(name, reason, (0, 0), (0, 0), (0, 0), b""))

    def flush(self) -> None:
        """Hand what was added to the system, where it outlives this process."""
        with self._writing():
            self.file.flush()

    def finish(self) -> Path:
        """Write index and trailer, and give the file its name."""
        self._index.offsets = np.array(self._offsets, "<i8").tobytes()
        start, body = self.file.tell(), msgspec.msgpack.encode(self._index)
        self._put(body + CHECK.pack(zlib.crc32(body)))
        with self._writing():
            self.file.write(trailer_of(start, len(body), self._digest.digest()))
            self.file.flush()
            os.fsync(self.file.fileno())
            self.partial.replace(self.path)
            self.file.close()
        return self.path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # a full disk was told of already
            self.file.close()

    # ---- records ------------------------------------------------------------------------------------------------

    def _check(self, name: str, ids: Tensor, size: Size) -> None:
        sizes = self.header.sizes
        shaped = ids.ndim == 3 and ids.shape[-1] == len(sizes) if self.header.groups else ids.ndim == 2
        if ids.dtype != torch.int64 or not shaped or not ids.numel():
            wanted = f"(h, w, {len(sizes)})" if self.header.groups else "(h, w)"
            raise DataError(f"{name}: ids are {ids.dtype} {tuple(ids.shape)}", f"give int64 {wanted}")
        for part, count in zip(groups(ids, self.header), sizes, strict=True):
            if part.min() < 0 or part.max() > count - 1:
                raise DataError(f"{name}: ids of {part.min()} … {part.max()}", f"they lie within 0 … {count - 1}")
        most = [n * self.header.factor for n in ids.shape[:2]]
        if not all(0 < side <= room for side, room in zip(size, most, strict=True)):
            raise DataError(
                f"{name}: a picture of {size[0]} × {size[1]} is not what {ids.shape[0]} × {ids.shape[1]} codes show",
                f"its sides are at least 1, and at most {most[0]} × {most[1]}",
            )

    def _write(self, body: Body) -> None:
        try:
            body.name.encode()
        except UnicodeEncodeError:
            raise DataError(f"the name {body.name!r} is no text", "rename the picture") from None
        if body.name in self._known:
            raise DataError(f"two pictures are called {body.name!r}", "give each its own name")
        start, data = self.file.tell(), msgspec.msgpack.encode(body)
        self._put(FRAME.pack(len(data), checksum(start, data)) + data)
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
                f"{self.partial} cannot be written: {error.strerror}", "make room and call it again: it goes on"
            ) from error

    def _remember(self, start: int, body: Body) -> None:
        self.done.append(body.name)
        self._known.add(body.name)
        if body.fault is None:
            self._offsets.append(start)
            self._index.names.append(body.name)
        else:
            self._index.faults.append((body.name, body.fault))

    def _go_on(self, multiple: int) -> None:
        """Keep the sound records of a writer that was killed, and cut off what lies behind them."""
        lead = lead_of(self.header)
        there, ends, bodies = self.file.read(len(lead)), [0], []
        if len(there) == len(lead) or not lead.startswith(there):  # else it was killed before all of that was written
            self._same(read_lead(self.file, self.partial)[0])
            ends = [len(lead)]
            for body, end in _sound(self.file, len(lead)):
                bodies.append(body)
                ends.append(end)
        kept = len(bodies) // multiple * multiple
        for start, body in zip(ends, bodies[:kept], strict=False):
            self._remember(start, body)
        self.file.seek(0)
        while (at := self.file.tell()) < ends[kept]:
            self._digest.update(self.file.read(min(1 << 20, ends[kept] - at)))
        self.file.truncate(ends[kept])
        if not ends[kept]:
            self._put(lead)

    def _same(self, found: Header) -> None:
        for field in (field for field in found.__struct_fields__ if field != "name"):  # a codec may have moved
            before, now = getattr(found, field), getattr(self.header, field)
            if before != now:
                raise DataError(
                    f"{self.partial} was begun with another {field}: {before!r:.80}, not {now!r:.80}",
                    "go on as it was begun, or remove it",
                )


def _alone(path: Path) -> BinaryIO:
    """The file, open for reading and writing by this process alone."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it may have finished, and renamed it, since it was opened here.
        alone = path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except OSError:
        alone = False
    if not alone:
        file.close()
        raise DataError(f"{path} is being written by another process", "wait for it, or give another path")
    return file


def _sound(file: BinaryIO, start: int) -> Iterator[tuple[Body, int]]:
    """The records from `start` on and where each ends, up to the first that is not whole."""
    size = os.fstat(file.fileno()).st_size
    file.seek(start)
    while True:
        frame = file.read(FRAME.size)
        length, check = FRAME.unpack(frame) if len(frame) == FRAME.size else (size, 0)
        if length > size - start - FRAME.size:
            return
        data = file.read(length)
        if checksum(start, data) != check:
            return
        try:
            body = msgspec.msgpack.decode(data, type=Body)
        except msgspec.DecodeError:
            return
        start += FRAME.size + length
        yield body, start
