"""A file of tokens: pictures as bit-packed ids, behind a header that says which model can read them.

    magic · version · header            what all records share, with a checksum
    record, record, …                   length, checksum, then name, sizes and ids
    index · trailer                     where each record lies; the digest of all before; a checksum of each

A reader checks what it uses: a record whose bytes changed, were moved or cut off is refused. `vitrail.codecs.writer`
writes such files.

h, w codes along the sides of a picture, G groups of a code
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from vitrail.codecs.packing import packed_size, unpack
from vitrail.codecs.quantizers import bits_of
from vitrail.config import Config
from vitrail.errors import ConfigError, DataError

MAGIC, END = b"\x89VTOK\r\n\x1a", b"VTOKEND\n"
VERSION = 1
LEAD = struct.Struct("<8sHI")  # magic, version, length of the header; then the header and its checksum
FRAME = struct.Struct("<II")  # length of a record's body, checksum
TRAILER = struct.Struct("<QQ32sI8s")  # where the index lies, its length, digest of all before, checksum, end
CHECK = struct.Struct("<I")
AGAIN = "make it again from the pictures, or copy it again from where it was whole"

Size = tuple[int, int]


class Header(Config):
    """What all records share.

    model   the identity of the codec: a hash of its config and weights
    name    what the codec was called, for people
    sizes   how many values an id of each group has
    groups  whether ids have an axis of groups; if not, there is one size
    factor  pixels along a side of a code
    fit     how pictures were made to fit (see `Fit`)
    """

    model: str
    name: str
    sizes: tuple[int, ...]
    groups: bool
    factor: int
    fit: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1 or max(self.sizes) > 2**63 or self.factor < 1:
            raise ConfigError(f"ids of sizes {self.sizes}, {self.factor} pixels a side", "sizes are of 1 … 2⁶³ values")
        if not self.groups and len(self.sizes) > 1:
            raise ConfigError(f"ids without groups have one size, not {self.sizes}")

    @property
    def bits(self) -> tuple[int, ...]:
        """Bits of an id of each group."""
        return tuple(map(bits_of, self.sizes))


class Tokens(NamedTuple):
    """A picture as ids. `size` is the height and width that decoding gives back, `source` those of the picture that was
    read; the codes may reach a little beyond `size`."""

    name: str
    ids: Tensor  # int64 (h, w) or (h, w, G)
    size: Size
    source: Size


class Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A record as it lies in the file. One whose picture could not be read has the reason and nothing else."""

    name: str
    fault: str | None
    grid: Size
    size: Size
    source: Size
    packed: bytes


class Index(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    offsets: bytes  # int64 of each record with ids
    names: list[str]
    faults: list[tuple[str, str]]


# ---- reading ----------------------------------------------------------------------------------------------------


class TokenFile(Sequence[Tokens]):
    """The pictures of a file by number or by name, in any order and from several threads or processes at once.

    With `model`, the identity of a codec, a file that another one made is refused.
    """

    def __init__(self, path: str | Path, *, model: str | None = None):
        self.path = Path(path)
        self._open()
        if model is not None and model != self.header.model:
            raise DataError(
                f"{self.path} was made by another codec: {self.header.name} ({self.header.model[:12]}), "
                f"not the one given ({model[:12]})",
                "give the codec that made it, with the same weights",
            )

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, which: int | str) -> Tokens:  # type: ignore[override]
        if isinstance(which, str):
            if which not in self._numbers:
                raise DataError(f"{self.path} holds no picture {which!r}", "its names are in `names`")
            which = self._numbers[which]
        if not -len(self) <= which < len(self):
            raise IndexError(which)
        return self._read(range(len(self))[which])

    @property
    def faults(self) -> dict[str, str]:
        """Pictures that could not be read when the file was made, and why."""
        return dict(self._index.faults)

    @property
    def names(self) -> list[str]:
        return self._index.names

    def check(self) -> None:
        """Read the whole file and compare it with its digest."""
        digest = hashlib.sha256()
        for start in range(0, self._end, 1 << 20):
            digest.update(self._bytes(start, min(1 << 20, self._end - start)))
        if digest.digest() != self._digest:
            raise DataError(f"{self.path} was altered: its digest is another", AGAIN)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._open()

    # ---- bytes --------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            if not self.path.is_file():
                raise DataError(f"{self.path} is no file", "give a file that `vitrail tokenize` made")
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}", "check the path") from error
        self.header, first = read_lead(self._file, self.path)
        size = os.fstat(self._file.fileno()).st_size
        self._end = size - TRAILER.size
        if self._end < first:
            raise self._short()
        start, length, self._digest, check, end = TRAILER.unpack(self._bytes(self._end, TRAILER.size))
        if end != END:
            raise self._short()
        if trailer_of(start, length, self._digest)[-12:-8] != CHECK.pack(check):
            raise self._altered("trailer")
        if start < first or start + length + CHECK.size != self._end:
            raise self._altered("trailer")
        body = self._bytes(start, length)
        if CHECK.pack(zlib.crc32(body)) != self._bytes(start + length, CHECK.size):
            raise self._altered("index")
        try:
            self._index = msgspec.msgpack.decode(body, type=Index)
            self._offsets = np.frombuffer(self._index.offsets, "<i8")
        except (msgspec.DecodeError, ValueError):
            raise self._altered("index") from None
        self._numbers = {name: number for number, name in enumerate(self._index.names)}
        self._first, self._last = first, start
        if len(self._offsets) != len(self._index.names):
            raise self._altered("index")

    def _read(self, number: int) -> Tokens:
        name, start = self._index.names[number], int(self._offsets[number])
        culprit = f"record {number} ({name!r})"
        if not self._first <= start <= self._last - FRAME.size:
            raise self._altered(culprit)
        length, check = FRAME.unpack(self._bytes(start, FRAME.size))
        if length > self._last - start - FRAME.size:
            raise self._altered(culprit)
        data = self._bytes(start + FRAME.size, length)
        if checksum(start, data) != check:
            raise self._altered(culprit)
        try:
            body = msgspec.msgpack.decode(data, type=Body)
            ids = self._ids(body)
        except (msgspec.DecodeError, ValueError, RuntimeError, DataError):
            raise self._altered(culprit) from None
        if body.name != name or ids is None:
            raise self._altered(culprit)
        return Tokens(name, ids, body.size, body.source)

    def _ids(self, body: Body) -> Tensor | None:
        """The ids of a record; None where they are none that the header allows."""
        (h, w), header = body.grid, self.header
        weights = [packed_size(h * w, bits) for bits in header.bits]
        fits = all(0 < side <= cells * header.factor for side, cells in zip(body.size, body.grid, strict=True))
        if min(h, w) < 1 or sum(weights) != len(body.packed) or not fits:
            return None
        parts, at = [], 0
        for bits, weight, size in zip(header.bits, weights, header.sizes, strict=True):
            part = unpack(body.packed[at : at + weight], bits, h * w).reshape(h, w)
            if part.min() < 0 or part.max() > size - 1:
                return None
            parts.append(part)
            at += weight
        return torch.stack(parts, dim=-1) if header.groups else parts[0]

    def _bytes(self, start: int, length: int) -> bytes:
        """By place alone, so that threads and forked processes may share the file."""
        data = os.pread(self._file.fileno(), length, start)
        while len(data) < length:
            more = os.pread(self._file.fileno(), length - len(data), start + len(data))
            if not more:
                raise self._short()
            data += more
        return data

    def _altered(self, what: str) -> DataError:
        return DataError(f"{self.path} was altered: the checksum of its {what} is another", AGAIN)

    def _short(self) -> DataError:
        return DataError(f"{self.path} is cut short or was never finished", f"{AGAIN}; `vitrail tokenize` goes on")


# ---- what reading and writing share ----------------------------------------------------------------------------------


def groups(ids: Tensor, header: Header) -> tuple[Tensor, ...]:
    return ids.unbind(-1) if header.groups else (ids,)


def checksum(start: int, data: bytes) -> int:
    """Of a record and the place where it lies, so that one that was moved is refused."""
    return zlib.crc32(data, zlib.crc32(struct.pack("<QI", start, len(data))))


def lead_of(header: Header) -> bytes:
    data = msgspec.json.encode(header)
    return LEAD.pack(MAGIC, VERSION, len(data)) + data + CHECK.pack(zlib.crc32(data))


def trailer_of(start: int, length: int, digest: bytes) -> bytes:
    check = zlib.crc32(struct.pack("<QQ32s", start, length, digest))
    return TRAILER.pack(start, length, digest, check, END)


def read_lead(file: BinaryIO, path: Path) -> tuple[Header, int]:
    """The header, and where the first record lies."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    lead = file.read(LEAD.size)
    if len(lead) < LEAD.size or lead[:8] != MAGIC:
        raise DataError(f"{path} is no file of tokens", "give a file that `vitrail tokenize` made")
    _, version, length = LEAD.unpack(lead)
    if version != VERSION:
        raise DataError(
            f"{path} is of version {version}, and this is for version {VERSION}",
            "use the vitrail that made it" if version > VERSION else AGAIN,
        )
    altered = DataError(f"{path} was altered: the checksum of its header is another", AGAIN)
    if length > size - LEAD.size - CHECK.size:
        raise altered
    data = file.read(length)
    if file.read(CHECK.size) != CHECK.pack(zlib.crc32(data)):
        raise altered
    try:
        return Header.read(msgspec.json.decode(data)), LEAD.size + length + CHECK.size
    except (msgspec.DecodeError, ConfigError, RecursionError):
        raise altered from None
