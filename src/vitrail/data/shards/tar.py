"""Where the members of a tar lie, found by reading its headers alone. Nothing is extracted: names are only names.

Reads ustar, GNU and pax. Damage does not end the walk: it is said, and the walk goes on at the next sound header, which
stands at a multiple of 512 bytes and carries its own checksum.
"""

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

BLOCK = 512
ZEROS = bytes(BLOCK)
MAX_NAME = 1 << 20  # bytes of an extended header; names are shorter
CHUNK = 1 << 20

FILES = b"0\x007"
EMPTY = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}
OTHER = {b"S": "a sparse file", b"M": "a part of another volume's file"}


class Member(NamedTuple):
    """A file in the tar: its bytes are `size` bytes from `offset` on."""

    name: str
    offset: int
    size: int


class Flaw(NamedTuple):
    """What could not be read. Around a `tear` members may be missing, so its neighbours cannot be trusted to be whole;
    other flaws concern one member alone."""

    name: str
    reason: str
    tear: bool


class _Header(NamedTuple):
    name: bytes
    size: int
    kind: bytes


def walk(file: int, end: int) -> Iterator[Member | Flaw]:
    """The regular files of an open tar of `end` bytes, in order, and its flaws where they are met."""
    at, given = 0, _NOTHING
    while at < end:
        block = os.pread(file, BLOCK, at)
        header = None if block == ZEROS else _header(block)
        if header is None:
            again = _next_header(file, at + BLOCK, end)
            if block == ZEROS and again is None:
                return  # the end mark
            what = "zeros" if block == ZEROS else "a damaged header" if len(block) == BLOCK else "the end of a cut file"
            yield Flaw(f"byte {at:,}", what + _onwards(again), True)
            if again is None:
                return
            at, given = again, _NOTHING
            continue
        name = given.name or _text(header.name)
        size = 0 if header.kind in EMPTY or header.kind == b"5" else header.size
        if given.size is not None and header.kind in FILES:
            size = given.size
        offset = at + BLOCK
        if size < 0 or offset + size > end or (header.kind in b"xgLK" and size > MAX_NAME):
            again = _next_header(file, offset, end)
            yield Flaw(name, f"claims {size:,} bytes where the file has {end - offset:,}" + _onwards(again), True)
            if again is None:
                return
            at, given = again, _NOTHING
            continue
        at = offset + -(-size // BLOCK) * BLOCK
        if header.kind in b"xL":  # about the member that follows
            body = os.pread(file, size, offset)
            more = _Given(_text(body), None, False) if header.kind == b"L" else _pax(body)
            if more is None:
                yield Flaw(name, "an extended header that makes no sense", True)
            else:
                given = more if more.name or not given.name else more._replace(name=given.name)
            continue
        if header.kind in b"gK":  # about all members, and about the target of a link: nothing that is used here
            continue
        if header.kind in FILES and not given.sparse and not name.endswith("/"):
            yield Member(name, offset, size)
        elif header.kind not in (b"5", b"V") and not name.endswith("/"):  # folders and labels hold nothing
            what = "a sparse file" if given.sparse else (EMPTY | OTHER).get(header.kind, f"of kind {header.kind!r}")
            yield Flaw(name, f"is {what}, which is not read: pack plain files", False)
        given = _NOTHING
    yield Flaw(f"byte {end:,}", "no end mark: the file may be cut short", True)


class _Given(NamedTuple):
    """What an extended header says of the next member."""

    name: str
    size: int | None
    sparse: bool


_NOTHING = _Given("", None, False)


def _header(block: bytes) -> _Header | None:
    """The fields of a header whose checksum is right."""
    try:
        if len(block) < BLOCK or _number(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * 32:
            return None
        size = _number(block[124:136])
    except ValueError:
        return None
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0":  # GNU has other fields where POSIX has the front of a long name
        front = block[345:500].split(b"\0", 1)[0]
        name = front + b"/" + name if front else name
    return _Header(name, size, block[156:157])


def _number(field: bytes) -> int:
    """Octal digits, or, after a byte of 0x80, the number itself."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1
    digits = field.split(b"\0", 1)[0].strip()
    if digits and not digits.isdigit():
        raise ValueError(digits)
    return int(digits or b"0", 8)


def _pax(body: bytes) -> _Given | None:
    """Records of "length key=value\\n"."""
    name, size, sparse, at = "", None, False, 0
    while at < len(body):
        match = re.compile(rb"(\d{1,7}) ([^=]+)=").match(body, at)
        if match is None or body[(stop := at + int(match[1])) - 1 : stop] != b"\n" or stop <= match.end():
            return None
        key, value = match[2], body[match.end() : stop - 1]
        if key == b"path":
            name = _text(value)
        elif key == b"size":
            if not value.isdigit() or len(value) > 18:
                return None
            size = int(value)
        elif key.startswith(b"GNU.sparse"):
            sparse = True
        at = stop
    return _Given(name, size, sparse)


def _text(name: bytes) -> str:
    return name.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _next_header(file: int, at: int, end: int) -> int | None:
    """The first sound header from `at` on; only blocks that say "ustar" are looked at."""
    size = 32 * BLOCK  # most often it is near
    while at < end:
        chunk = os.pread(file, size, at)
        place = chunk.find(b"ustar")
        while place >= 0:
            start = place - 257
            if start >= 0 and start % BLOCK == 0 and _header(chunk[start : start + BLOCK]) is not None:
                return at + start
            place = chunk.find(b"ustar", place + 1)
        at, size = at + size, min(2 * size, CHUNK)
    return None


def _onwards(again: int | None) -> str:
    return "; nothing after it" if again is None else f"; read on at byte {again:,}"
