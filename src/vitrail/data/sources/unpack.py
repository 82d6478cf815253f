"""Unpack archives by strangers: plain files only, all of them inside the given folder.

Links, devices, names that lead outside and second files of one name are not made; they are counted. No link is ever
written, so none can be followed. Whatever claims more bytes than the limit is refused as a whole.
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

from vitrail.data.sources.progress import bar
from vitrail.errors import DataError

CHUNK = 1 << 20
LIMIT = 4 << 30  # bytes of one archive's files
ENTRIES = 1_000_000
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
    RuntimeError,  # an encrypted zip, a compression that is not supported
)


_KINDS = {
    "file": tarfile.TarInfo.isreg,
    "folder": tarfile.TarInfo.isdir,
    "link": lambda info: info.islnk() or info.issym(),
}
_MODES = {0: "file", stat.S_IFREG: "file", stat.S_IFLNK: "link"}  # of a zip that knows of them


class Unpacked(NamedTuple):
    """What came of an archive."""

    files: int
    bytes: int
    unwanted: int  # files that `keep` does not name
    refused: dict[str, int]  # why → how many


class _Entry(NamedTuple):
    name: str
    kind: str  # "file", "folder", "link" or "device"
    size: int
    open: Callable[[], IO[bytes] | None]
    read: int  # bytes of the archive read so far


def unpack(archive: Path, into: Path, keep: Sequence[str] = ("*",), *, limit: int = LIMIT) -> Unpacked:
    """Write the files whose names match one of `keep` (shell patterns, * also matches /) into a new folder."""
    into.mkdir(parents=True)
    refused: Counter[str] = Counter()
    files = total = unwanted = 0
    with _entries(archive) as entries, bar(f"unpacking {archive.name}", archive.stat().st_size) as progress:
        for count, entry in enumerate(entries):
            progress.update(entry.read - progress.n)
            if count >= ENTRIES:
                raise DataError(f"{archive.name} holds over {ENTRIES:,} entries", "do not use it")
            if entry.kind == "folder":
                continue  # made when a file needs it
            path = inside(entry.name)
            if path is None:
                refused["name that leads outside"] += 1
            elif not any(fnmatch.fnmatchcase(str(path), pattern) for pattern in keep):
                unwanted += 1
            elif entry.kind != "file":
                refused[entry.kind] += 1
            elif entry.size > limit - total:
                raise DataError(f"{archive.name} claims over {limit:,} bytes (at {entry.name!r:.100})", "do not use it")
            elif _write(entry, into / path):
                files, total = files + 1, total + entry.size
            else:
                refused["name that comes twice"] += 1
    return Unpacked(files, total, unwanted, dict(refused))


@contextmanager
def member(archive: Path, name: str) -> Iterator[IO[bytes]]:
    """One plain file inside a zip or a tar, without unpacking."""
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
        raise DataError(f"{archive.name} holds no readable file {name}", "fetch it again") from None


def inside(name: str) -> PurePosixPath | None:
    """A name as a path below any folder, or nothing where it would lead elsewhere on some system."""
    path = PurePosixPath(name)
    strange = (
        "\\" in name
        or "\0" in name
        or name[1:2] == ":"
        or any(len(part.encode(errors="replace")) > 255 for part in path.parts)
    )
    return None if path.is_absolute() or ".." in path.parts or strange or not path.parts else path


def _write(entry: _Entry, path: Path) -> bool:
    """Whether the file could be made; a name that is taken, as a file or as a folder, stays what it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        out = path.open("xb")
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        return False
    left = entry.size
    file = entry.open()
    assert file is not None, "a plain file opens"
    with out, file:
        while left and (data := file.read(min(CHUNK, left))):
            out.write(data)
            left -= len(data)
    if left:
        raise EOFError(f"{entry.name} ends early")
    return True


@contextmanager
def _entries(archive: Path) -> Iterator[Iterator[_Entry]]:
    """The entries of a zip, a tar or a Debian package, in their order."""
    try:
        with archive.open("rb") as raw:
            if raw.read(8) == b"!<arch>\n":
                raw.seek(_debian_data(raw))
                yield _tar(raw)
            elif zipfile.is_zipfile(raw):
                yield _zip(raw)
            else:
                raw.seek(0)
                yield _tar(raw)
    except (OSError, *_BROKEN) as error:
        # Of the system's errors, only an impossible place in a file is the archive's fault.
        if isinstance(error, OSError) and not isinstance(error, _BROKEN) and error.errno != errno.EINVAL:
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{archive.name} is no archive, or a broken one: {reason}", "fetch it again") from None


def _tar(raw: IO[bytes]) -> Iterator[_Entry]:
    with tarfile.open(fileobj=raw) as opened:
        for info in opened:
            kind = next((kind for kind, is_kind in _KINDS.items() if is_kind(info)), "device")
            yield _Entry(info.name, kind, info.size, lambda info=info: opened.extractfile(info), raw.tell())


def _zip(raw: IO[bytes]) -> Iterator[_Entry]:
    read = 0
    with zipfile.ZipFile(raw) as opened:
        for info in opened.infolist():
            mode = stat.S_IFMT(info.external_attr >> 16)
            kind = "folder" if info.is_dir() else _MODES.get(mode, "device")
            yield _Entry(info.filename, kind, info.file_size, lambda info=info: opened.open(info), read)
            read += info.compress_size


def _debian_data(raw: IO[bytes]) -> int:
    """Where data.tar begins in a .deb, which is an `ar` of three members, each behind a header of 60 bytes."""
    while len(header := raw.read(60)) == 60 and header.endswith(b"`\n"):
        name, size = header[:16].decode("latin-1").strip().rstrip("/"), int(header[48:58])
        if name.startswith("data.tar"):
            if name.endswith(".zst"):
                raise ValueError("it is packed with zstd, which Debian's own packages are not")
            return raw.tell()
        raw.seek(size + size % 2, 1)
    raise ValueError("it holds no data.tar")
