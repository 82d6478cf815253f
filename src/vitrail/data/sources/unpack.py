"""Unpacks untrusted archives: regular files only, all inside the given folder.

Links, devices, names that lead outside and duplicate names are skipped and counted. No link is ever written. An archive
that claims more bytes than the limit is refused.
"""

import errno
import fnmatch
import gzip
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from vitrail.data.sources.progress_bar import progress_bar
from vitrail.errors import DataError

CHUNK_BYTES = 1 << 20
MAX_BYTES = 4 << 30  # most bytes of an archive's files
MAX_ENTRIES = 1_000_000
_BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    gzip.BadGzipFile,
    EOFError,
    ValueError,
    LookupError,
    ArithmeticError,
    RuntimeError,  # an encrypted zip, an unsupported compression
)


_KINDS = {
    "file": tarfile.TarInfo.isreg,
    "folder": tarfile.TarInfo.isdir,
    "link": lambda info: info.islnk() or info.issym(),
}
_MODES = {0: "file", stat.S_IFREG: "file", stat.S_IFLNK: "link"}  # file modes in a zip that has them


class UnpackResult(NamedTuple):
    """Result of unpacking an archive."""

    files: int
    bytes: int
    skipped: int  # files that match no pattern
    refused: dict[str, int]  # reason → count


class _Entry(NamedTuple):
    """One entry of an archive."""

    name: str
    kind: str  # "file", "folder", "link" or "device"
    size: int
    open: Callable[[], IO[bytes] | None]
    read: int  # bytes of the archive read so far


def unpack_archive(
    archive: Path, into: Path, file_patterns: Sequence[str] = ("*",), *, max_bytes: int = MAX_BYTES
) -> UnpackResult:
    """Unpack files that match one of `file_patterns` (shell patterns, * also matches /) into a new folder."""
    into.mkdir(parents=True)
    refused: Counter[str] = Counter()
    files = 0
    total = 0
    unwanted = 0
    with _entries(archive) as entries, progress_bar(f"unpacking {archive.name}", archive.stat().st_size) as progress:
        for count, entry in enumerate(entries):
            progress.update(entry.read - progress.n)
            if count >= MAX_ENTRIES:
                raise DataError(f"{archive.name} has more than {MAX_ENTRIES:,} entries", "do not use this archive")
            if entry.kind == "folder":
                continue  # created when a file needs it
            path = resolve_member_path(entry.name)
            if path is None:
                refused["name that leads outside"] += 1
            elif not any(fnmatch.fnmatchcase(str(path), pattern) for pattern in file_patterns):
                unwanted += 1
            elif entry.kind != "file":
                refused[entry.kind] += 1
            elif entry.size > max_bytes - total:
                raise DataError(
                    f"{archive.name} claims over {max_bytes:,} bytes (at {entry.name!r:.100})",
                    "do not use this archive",
                )
            elif _write(entry, into / path):
                files, total = files + 1, total + entry.size
            else:
                refused["duplicate name"] += 1
    return UnpackResult(files, total, unwanted, dict(refused))


@contextmanager
def open_member(archive: Path, name: str) -> Iterator[IO[bytes]]:
    """Open one regular file inside a zip or a tar, without unpacking."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened, opened.open(name) as file:
                yield file
        else:
            with tarfile.open(archive) as opened:
                file = opened.extractfile(opened.getmember(name)) if opened.getmember(name).isreg() else None
                if file is None:
                    raise KeyError
                yield file
    except _BROKEN:
        raise DataError(f"{archive.name} has no readable file {name}", "fetch it again") from None


def resolve_member_path(name: str) -> PurePosixPath | None:
    """Return a name as a relative path, or None if it would lead outside on some system."""
    path = PurePosixPath(name)
    is_unsafe = (
        "\\" in name
        or "\0" in name
        or name[1:2] == ":"
        or any(len(part.encode(errors="replace")) > 255 for part in path.parts)
    )
    return None if path.is_absolute() or ".." in path.parts or is_unsafe or not path.parts else path


def _write(entry: _Entry, path: Path) -> bool:
    """Write a file. Return False if its name is taken, as a file or as a folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.open("xb")
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        return False
    remaining = entry.size
    file = entry.open()
    assert file is not None, "a plain file opens"
    with target, file:
        while remaining and (data := file.read(min(CHUNK_BYTES, remaining))):
            target.write(data)
            remaining -= len(data)
    if remaining:
        raise EOFError(f"{entry.name} is truncated")
    return True


@contextmanager
def _entries(archive: Path) -> Iterator[Iterator[_Entry]]:
    """Open a zip, a tar or a Debian package, and iterate over its entries."""
    try:
        with archive.open("rb") as raw:
            if raw.read(8) == b"!<arch>\n":
                raw.seek(_find_debian_data(raw))
                yield _tar_entries(raw)
            elif zipfile.is_zipfile(raw):
                yield _zip_entries(raw)
            else:
                raw.seek(0)
                yield _tar_entries(raw)
    except (OSError, *_BROKEN) as error:
        # Of OS errors, only an invalid position is the archive's fault.
        if isinstance(error, OSError) and not isinstance(error, _BROKEN) and error.errno != errno.EINVAL:
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{archive.name} is broken or not an archive: {reason}", "fetch it again") from None


def _tar_entries(raw: IO[bytes]) -> Iterator[_Entry]:
    with tarfile.open(fileobj=raw) as opened:
        for info in opened:
            kind = next((kind for kind, is_kind in _KINDS.items() if is_kind(info)), "device")
            yield _Entry(info.name, kind, info.size, lambda info=info: opened.extractfile(info), raw.tell())


def _zip_entries(raw: IO[bytes]) -> Iterator[_Entry]:
    read = 0
    with zipfile.ZipFile(raw) as opened:
        for info in opened.infolist():
            mode = stat.S_IFMT(info.external_attr >> 16)
            kind = "folder" if info.is_dir() else _MODES.get(mode, "device")
            yield _Entry(info.filename, kind, info.file_size, lambda info=info: opened.open(info), read)
            read += info.compress_size


def _find_debian_data(raw: IO[bytes]) -> int:
    """Return the offset of data.tar in a .deb, an `ar` archive of three members with headers of 60 bytes."""
    while len(header := raw.read(60)) == 60 and header.endswith(b"`\n"):
        name, size = header[:16].decode("latin-1").strip().rstrip("/"), int(header[48:58])
        if name.startswith("data.tar"):
            if name.endswith(".zst"):
                raise ValueError("zstd compression is not supported; Debian's own packages do not use it")
            return raw.tell()
        raw.seek(size + size % 2, 1)
    raise ValueError("it has no data.tar")
