"""Verification of cached data by checksum: fetched sources, package models, hub snapshots and shards.

A fetched source stores the checksums of its unpacked files, and a shard NAME.tar stores its own in NAME.tar.sha256, in
the format of `sha256sum`. The hub names large files by their checksum.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from vitrail.errors import DataError

CHECKSUM_SUFFIX = ".sha256"
SOURCE_CHECKSUMS_FILE = ".vitrail-sha256"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


class Verification(NamedTuple):
    """Result of a verification: how many files and bytes were read, and what is wrong with which of them."""

    files: int
    bytes: int
    damaged: tuple[str, ...]


def compute_checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path, target: Path, files: Iterable[Path]) -> None:
    """Write the checksums of files of a folder, in the format of `sha256sum`."""
    lines = [f"{compute_checksum(path)}  {path.relative_to(folder).as_posix()}\n" for path in sorted(files)]
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(target)


def read_checksums(file: Path) -> dict[str, str]:
    """Read what `write_checksums` wrote: path → SHA-256."""
    lines = [_LINE.fullmatch(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if not all(lines):
        raise DataError(f"{file} is not a list of checksums", "fetch or write the data again")
    return {match[2]: match[1] for match in lines if match}


def verify_files(folder: Path, checksums: Mapping[str, str]) -> Verification:
    """Compare files of a folder with their checksums."""
    size, damaged = 0, []
    for name, wanted in checksums.items():
        path = folder / name
        if not path.is_file():
            damaged.append(f"{path} is missing")
            continue
        size += path.stat().st_size
        if compute_checksum(path) != wanted:
            damaged.append(f"{path} was changed after it was stored")
    return Verification(len(checksums), size, tuple(damaged))


def verify_source_files(folder: Path, name: str) -> Verification:
    """Verify the unpacked files of a fetched source."""
    sums = folder / SOURCE_CHECKSUMS_FILE
    if not sums.is_file():
        raise DataError(
            f"{name} was fetched without checksums of its files", f"remove {folder.parent} and fetch it again"
        )
    checksums = read_checksums(sums)
    result = verify_files(folder, checksums)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    others = sorted(name for name in found - checksums.keys() if not name.startswith(".vitrail"))
    return result._replace(damaged=(*result.damaged, *(f"{folder / other} was added" for other in others)))


def verify_shards(folder: Path) -> Verification:
    """Verify the shards of a folder, or one shard. A shard without a checksum is reported."""
    shards = [folder] if folder.is_file() else sorted(folder.rglob("*.tar"))
    if not shards:
        raise DataError(f"{folder} has no shards", "give a folder of .tar files, or the name of a source")
    size, damaged = 0, []
    for shard in shards:
        sums = shard.with_name(shard.name + CHECKSUM_SUFFIX)
        if not sums.is_file():
            damaged.append(f"{shard} has no {sums.name}")
            continue
        result = verify_files(shard.parent, read_checksums(sums))
        size, damaged = size + result.bytes, [*damaged, *result.damaged]
    return Verification(len(shards), size, tuple(damaged))


def verify_snapshot(folder: Path) -> Verification:
    """Verify a snapshot of the hub, whose files link to blobs. Large blobs are named by their SHA-256, small ones by
    git's SHA-1."""
    files, size, damaged = [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()], 0, []
    for path in files:
        blob = path.resolve()
        if not blob.is_file():
            damaged.append(f"{path} is missing")
            continue
        size += blob.stat().st_size
        found = compute_checksum(blob) if len(blob.name) == 64 else _compute_git_sha1(blob)
        if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name) and found != blob.name:
            damaged.append(f"{path} was changed after it was stored")
    return Verification(len(files), size, tuple(damaged))


def _compute_git_sha1(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
