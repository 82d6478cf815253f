"""Locates the members of a tar by its headers. Nothing is extracted, and names are never used as paths.

Reads ustar, GNU and pax. On damage the walk continues at the next valid header, which is at a multiple of 512 bytes and
has its own checksum.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

BLOCK = 512
ZEROS = bytes(BLOCK)
MAX_EXTENDED_HEADER = 1 << 20  # largest extended header in bytes; names are shorter
CHUNK = 1 << 20

ReadAt: TypeAlias = Callable[[int, int], bytes]  # length, position → bytes, fewer at the end

FILE_TYPES = b"0\x007"
EMPTY_TYPES = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}
UNSUPPORTED_TYPES = {b"S": "a sparse file", b"M": "a part of another volume's file"}


class TarMember(NamedTuple):
    """A file in the tar: `size` bytes from `offset` on."""

    name: str
    offset: int
    size: int


class TarFault(NamedTuple):
    """Something that could not be read. If it `affects_neighbours`, members may be missing around it."""

    name: str
    reason: str
    affects_neighbours: bool


class _Header(NamedTuple):
    name: bytes
    size: int
    kind: bytes


def walk_tar(read: ReadAt, end: int) -> Iterator[TarMember | TarFault]:
    """Yield the regular files of a tar of `end` bytes in order, and faults where they occur."""
    position, extension = 0, _NO_EXTENSION
    while position < end:
        block = read(BLOCK, position)
        header = None if block == ZEROS else _parse_header(block)
        if header is None:
            restart = _find_next_header(read, position + BLOCK, end)
            if block == ZEROS and restart is None:
                return  # the end-of-archive mark
            is_whole = len(block) == BLOCK
            description = (
                "zeros" if block == ZEROS else "a damaged header" if is_whole else "the end of a truncated file"
            )
            yield TarFault(f"byte {position:,}", description + _describe_restart(restart), True)
            if restart is None:
                return
            position, extension = restart, _NO_EXTENSION
            continue
        name = extension.name or _to_text(header.name)
        size = 0 if header.kind in EMPTY_TYPES or header.kind == b"5" else header.size
        if extension.size is not None and header.kind in FILE_TYPES:
            size = extension.size
        offset = position + BLOCK
        if size < 0 or offset + size > end or (header.kind in b"xgLK" and size > MAX_EXTENDED_HEADER):
            restart = _find_next_header(read, offset, end)
            yield TarFault(
                name, f"claims {size:,} bytes, the file has {end - offset:,}" + _describe_restart(restart), True
            )
            if restart is None:
                return
            position, extension = restart, _NO_EXTENSION
            continue
        position = offset + -(-size // BLOCK) * BLOCK
        if header.kind in b"xL":  # describes the next member
            body = read(size, offset)
            parsed = _Extension(_to_text(body), None, False) if header.kind == b"L" else _parse_pax(body)
            if parsed is None:
                yield TarFault(name, "an invalid extended header", True)
            else:
                extension = parsed if parsed.name or not extension.name else parsed._replace(name=extension.name)
            continue
        if header.kind in b"gK":  # global headers and link targets are not used here
            continue
        if header.kind in FILE_TYPES and not extension.sparse and not name.endswith("/"):
            yield TarMember(name, offset, size)
        elif header.kind not in (b"5", b"V") and not name.endswith("/"):  # folders and labels have no data
            description = (
                "a sparse file"
                if extension.sparse
                else (EMPTY_TYPES | UNSUPPORTED_TYPES).get(header.kind, f"of kind {header.kind!r}")
            )
            yield TarFault(name, f"is {description}, which is not supported: pack plain files", False)
        extension = _NO_EXTENSION
    yield TarFault(f"byte {end:,}", "no end-of-archive mark: the file may be truncated", True)


class _Extension(NamedTuple):
    """What an extended header says of the next member."""

    name: str
    size: int | None
    sparse: bool


_NO_EXTENSION = _Extension("", None, False)


def _parse_header(block: bytes) -> _Header | None:
    """Parse a header with a valid checksum, or return None."""
    try:
        if len(block) < BLOCK or _parse_number(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * 32:
            return None
        size = _parse_number(block[124:136])
    except ValueError:
        return None
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0":  # GNU uses the bytes of POSIX's name prefix for other fields
        prefix = block[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return _Header(name, size, block[156:157])


def _parse_number(field: bytes) -> int:
    """Parse octal digits, or a binary number after a byte of 0x80."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1
    digits = field.split(b"\0", 1)[0].strip()
    if digits and not digits.isdigit():
        raise ValueError(digits)
    return int(digits or b"0", 8)


def _parse_pax(body: bytes) -> _Extension | None:
    r"""Parse records of "length key=value\\n", or return None."""
    name, size, sparse, position = "", None, False, 0
    while position < len(body):
        match = re.compile(rb"(\d{1,7}) ([^=]+)=").match(body, position)
        if match is None or body[(stop := position + int(match[1])) - 1 : stop] != b"\n" or stop <= match.end():
            return None
        key, value = match[2], body[match.end() : stop - 1]
        if key == b"path":
            name = _to_text(value)
        elif key == b"size":
            if not value.isdigit() or len(value) > 18:
                return None
            size = int(value)
        elif key.startswith(b"GNU.sparse"):
            sparse = True
        position = stop
    return _Extension(name, size, sparse)


def _to_text(name: bytes) -> str:
    return name.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _find_next_header(read: ReadAt, position: int, end: int) -> int | None:
    """Find the first valid header from `position` on. Only blocks that contain "ustar" are examined."""
    size = 32 * BLOCK  # usually it is near
    while position < end:
        chunk = read(size, position)
        match = chunk.find(b"ustar")
        while match >= 0:
            start = match - 257
            if start >= 0 and start % BLOCK == 0 and _parse_header(chunk[start : start + BLOCK]) is not None:
                return position + start
            match = chunk.find(b"ustar", match + 1)
        position, size = position + size, min(2 * size, CHUNK)
    return None


def _describe_restart(restart: int | None) -> str:
    return "; nothing follows" if restart is None else f"; reading continues at byte {restart:,}"
