"""Shard files, local or remote: size and version, and bytes by position.

Remote files are read by ranges through fsspec (`s3://`, `gs://`, `https://`, `memory://`). Nothing is downloaded as a
whole.
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from vitrail.errors import ConfigError, DataError

BLOCK_BYTES = 1 << 20  # read at once when the headers of a remote shard are scanned
ATTEMPTS = 4  # of a remote read
FIRST_WAIT = 0.5  # seconds before the second attempt; doubled for each further one
# What identifies a version of a remote file, in the names of different file systems. The first that exists is used.
VERSION_KEYS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "updated", "created")

FileState: TypeAlias = tuple[int, int]  # size, and modification time or hash of the version
T = TypeVar("T")


class RemoteReadError(DataError):
    """A remote file could not be read. The run stops, because the data itself may be readable later."""


@dataclass(frozen=True)
class RemoteFile:
    """A file on a remote file system, by its URL."""

    url: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    def __str__(self) -> str:
        return self.url

    def read_state(self) -> FileState:
        """Return the size, and a hash of the version."""
        fs, path = open_file_system(self.url)
        info = _retry(lambda: fs.info(path), self.url)
        if info.get("size") is None:
            raise DataError(f"{self.url}: the server does not tell its size", "use a server that supports ranges")
        version = next((str(info[key]) for key in VERSION_KEYS if info.get(key) is not None), "")
        digest = hashlib.blake2b(version.encode(), digest_size=8).digest()
        return int(info["size"]), int.from_bytes(digest, "little") >> 1

    def read(self, length: int, position: int) -> bytes:
        """Read bytes from a position on: fewer at the end of the file."""
        if not length:
            return b""
        fs, path = open_file_system(self.url)
        return _retry(lambda: fs.cat_file(path, start=position, end=position + length), self.url)


ShardFile: TypeAlias = Path | RemoteFile


def is_remote(name: str) -> bool:
    """Whether a name is a URL."""
    return "://" in name


def open_file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it. fsspec keeps one of each for every process."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(f"{url} needs fsspec, which is not installed", "pip install 'vitrail[data]'") from None
    try:
        return url_to_fs(url)
    except ImportError as error:  # of the package of a protocol
        raise ConfigError(f"{url} cannot be opened: {error}", "install the package that it names") from error
    except ValueError as error:
        raise DataError(f"{url} cannot be opened: {error}", "check the protocol before ://") from error


def _retry(read: Callable[[], T], url: str) -> T:
    """Call a function that reads from a network. Errors that may pass are tried again."""
    wait = FIRST_WAIT
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return read()
        except (FileNotFoundError, PermissionError) as error:
            raise RemoteReadError(f"{url} cannot be read: {type(error).__name__}: {error}", "check the URL") from error
        except Exception as error:  # every file system has errors of its own
            if attempt == ATTEMPTS:
                raise RemoteReadError(
                    f"{url} cannot be read after {ATTEMPTS} attempts: {type(error).__name__}: {error!s:.200}",
                    "check the connection, and start the command again: it resumes",
                ) from error
        time.sleep(wait)
        wait *= 2
    raise AssertionError


class BlockReader:
    """Reads a remote file by blocks, for many small reads in ascending order."""

    def __init__(self, file: RemoteFile):
        self.file, self._start, self._block = file, 0, b""

    def __call__(self, length: int, position: int) -> bytes:
        inside = position - self._start
        if not 0 <= inside <= len(self._block) - length:
            self._start, inside = position, 0
            self._block = self.file.read(max(length, BLOCK_BYTES), position)
        return self._block[inside : inside + length]


class ShardReader:
    """An open shard. It is checked that the shard has not changed since it was indexed."""

    def __init__(self, file: ShardFile, state: FileState):
        self.is_remote = isinstance(file, RemoteFile)
        if isinstance(file, RemoteFile):
            self._read, current = file.read, file.read_state()
        else:
            self._opened = file.open("rb", buffering=0)  # closed with its last reference
            # By position: threads and forked workers may share the open file.
            self._read, current = partial(os.pread, self._opened.fileno()), get_file_state(file.stat())
        if current != state:
            raise DataError("is in a file that has changed since it was indexed")

    def read(self, length: int, position: int) -> bytes:
        """Read `length` bytes."""
        data = self._read(length, position)
        while len(data) < length:
            rest = self._read(length - len(data), position + len(data))
            if not rest:
                raise DataError(f"is truncated: {len(data):,} of {length:,} bytes")
            data += rest
        return data


def get_file_state(status: os.stat_result) -> FileState:
    """Return size and modification time of a local file."""
    return status.st_size, status.st_mtime_ns
