"""Rows of JSON lists and JSON lines. Rows of a large file are read on access, by byte offset.

The offsets are indexed once, in one pass, and cached in the cache folder. All processes map the same index file, so a
million rows need no Python objects, and data workers share their memory.
"""

import contextlib
import hashlib
import mmap
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from vitrail.data.formats.data_files import check_file, decode_json, read_json_rows
from vitrail.data.formats.sample import Sample, SampleDataset, show_progress
from vitrail.data.sources.fetch import get_cache_folder
from vitrail.errors import DataError

T = TypeVar("T")

LARGE_FILE_BYTES = 64_000_000  # files from this size on are read on access
MAGIC = b"vitrail json index 1\n"
INTEGER = np.dtype("<i8")
HEADER_BYTES = 4096  # of an index file; the offsets follow
SCAN_BYTES = 1 << 24  # scanned at once
SPACES = b" \t\r\n"


@dataclass(frozen=True, eq=False)
class JsonIndex:
    """Positions of the rows of a file."""

    state: tuple[int, int]  # size and modification time of the indexed file
    digest: str  # of the whole file
    places: np.ndarray  # (N, 2) first byte and length


class JsonRows(Sequence[T], Generic[T]):
    """Rows of a JSON list or of JSON lines, decoded on access."""

    def __init__(self, path: Path, row_type: Any):
        self.path, self.row_type = path, row_type
        self._open()

    def _open(self) -> None:
        self.json_index = load_json_index(self.path)
        self._file = self.path.open("rb", buffering=0)
        if _get_state(os.fstat(self._file.fileno())) != self.json_index.state:
            raise DataError(f"{self.path} has changed while it was opened", "start again when it is complete")

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "row_type": self.row_type}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._open()

    def __len__(self) -> int:
        return len(self.json_index.places)

    def __getitem__(self, number: int) -> T:  # type: ignore[override]
        start, length = self.json_index.places[number].tolist()
        data = os.pread(self._file.fileno(), length, start)  # by position: processes share the open file
        if len(data) < length:
            raise DataError(f"{self.path} was truncated while it was read", "restore it, and start the command again")
        return decode_json(data, self.row_type, f"{self.path}, row {number}")

    @property
    def fingerprint(self) -> str:
        """Hash of the file."""
        return self.json_index.digest

    @property
    def lengths(self) -> np.ndarray:
        """Bytes (N,) of each row."""
        return self.json_index.places[:, 1]


def open_json_rows(path: Path, row_type: type[T]) -> Sequence[T]:
    """Open the rows of a JSON list or of JSON lines: all decoded, or `JsonRows` if the file is large."""
    check_file(path)
    return JsonRows(path, row_type) if path.stat().st_size >= LARGE_FILE_BYTES else read_json_rows(path, row_type)


@dataclass(frozen=True)
class RowReader(Generic[T]):
    """Makes the sample of a row that is read on access."""

    rows: JsonRows[T]
    find_problem: Callable[[T], tuple[str, str] | None]
    make_sample: Callable[[tuple[str, T]], Sample]

    def __call__(self, number: int) -> Sample:
        row: Any = self.rows[number]
        name = str(number) if row.id is None else f"{row.id}#{number}"
        _check_row(self.rows.path, number, name, self.find_problem(row))
        return self.make_sample((name, row))


def build_row_dataset(
    format_name: str,
    path: Path,
    rows: Sequence[T],
    find_problem: Callable[[T], tuple[str, str] | None],
    make_sample: Callable[[tuple[str, T]], Sample],
) -> SampleDataset:
    """Build a dataset from rows with an `id`. Rows are checked now, or on access if they are `JsonRows`.

    Repeated ids get `#2`, `#3`, …; with `JsonRows`, every id gets the number of its row.
    """
    if isinstance(rows, JsonRows):
        reader = RowReader(rows, find_problem, make_sample)
        return SampleDataset(format_name, path, range(len(rows)), reader, lazy_rows=rows)
    named_rows, names, repeats = [], set(), {}
    for number, row in enumerate(show_progress(rows, path.name)):
        row_id = getattr(row, "id", None)
        base_name = str(number if row_id is None else row_id)
        name = base_name
        while name in names:
            repeats[base_name] = repeats.get(base_name, 1) + 1
            name = f"{base_name}#{repeats[base_name]}"
        names.add(name)
        _check_row(path, number, name, find_problem(row))  # on opening, not during training
        named_rows.append((name, row))
    return SampleDataset(format_name, path, named_rows, make_sample)


def _check_row(path: Path, number: int, name: str, problem: tuple[str, str] | None) -> None:
    if problem is not None:
        raise DataError(f"{path}, sample {number} ({name:.80}): {problem[0]}", problem[1])


# ── the index ────────────────────────────────────────────────────────────────────────────────────────────────────


def load_json_index(path: Path) -> JsonIndex:
    """Load the index of a file from the cache folder, or build and save it."""
    return _load_index(path.resolve(), _get_state(path.stat()))


@lru_cache(maxsize=8)  # detection of the format and reading use the same
def _load_index(path: Path, state: tuple[int, int]) -> JsonIndex:
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    index_path = get_cache_folder() / "json" / f"{name}.index"
    found = _read_index(index_path, state)
    if found is None:
        found = scan_json(path)
        _save_index(index_path, found)
        found = _read_index(index_path, found.state) or found  # mapped from the file, if the cache folder is writable
    return found


def _get_state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def scan_json(path: Path) -> JsonIndex:
    """Find the rows of a JSON list or of JSON lines. Memory is bounded: the file is mapped, not read."""
    with path.open("rb") as file:
        state = _get_state(os.fstat(file.fileno()))
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            skipped = 3 if mapped[:3] == b"\xef\xbb\xbf" else 0
            first = skipped
            while mapped[first : first + 1] in (b" ", b"\t", b"\r", b"\n"):
                first += 1
            is_list = mapped[first : first + 1] == b"["
            view = memoryview(mapped)
            try:
                places = _find_list_rows(view, skipped, path) if is_list else _find_lines(view, skipped)
                digest = hashlib.blake2b(digest_size=8)
                for start in range(0, len(view), SCAN_BYTES):
                    digest.update(view[start : start + SCAN_BYTES])
            finally:
                view.release()
    return JsonIndex(state, digest.hexdigest(), places)


def _find_list_rows(data: memoryview, skipped: int, path: Path) -> np.ndarray:
    """Return start and length (N, 2) of the rows of a list."""
    with data[skipped:] as content:
        rows: Any = decode_json(content, list[msgspec.Raw], str(path))  # type: ignore[arg-type]
        lengths = np.fromiter((memoryview(row).nbytes for row in rows), INTEGER, len(rows))
        bytes_ = np.frombuffer(content, np.uint8)
        starts = _place_rows(bytes_, lengths)
        if starts is None:  # separators of several lengths
            base = bytes_.__array_interface__["data"][0]
            starts = np.fromiter(
                (np.frombuffer(row, np.uint8).__array_interface__["data"][0] - base for row in rows),
                INTEGER,
                len(rows),
            )
        del rows, bytes_
    return np.stack([starts + skipped, lengths], 1)


def _place_rows(data: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
    """Return the starts (N,) of rows with separators of one length, as most programs write them; None otherwise.

    It is exact: a separator is one comma among spaces, and a row does not begin with a space.
    """
    if not len(lengths):
        return np.zeros(0, INTEGER)
    spaces = np.frombuffer(SPACES, np.uint8)
    first = _skip_spaces(data, _skip_spaces(data, 0) + 1)
    if len(lengths) == 1:
        return np.array([first], INTEGER)
    comma = _skip_spaces(data, first + int(lengths[0]))
    gap = _skip_spaces(data, comma + 1) - first - int(lengths[0])
    starts = first + np.concatenate([[0], np.cumsum(lengths[:-1] + gap)])
    if starts[-1] + lengths[-1] > len(data):
        return None
    commas = np.zeros(len(lengths) - 1, np.int64)
    for place in range(gap):
        separator = data[starts[1:] - gap + place]
        commas += separator == ord(",")
        if not (np.isin(separator, spaces) | (separator == ord(","))).all():
            return None
    return starts if (commas == 1).all() and not np.isin(data[starts], spaces).any() else None


def _skip_spaces(data: np.ndarray, position: int) -> int:
    while position < len(data) and int(data[position]) in SPACES:
        position += 1
    return position


def _find_lines(data: memoryview, skipped: int) -> np.ndarray:
    """Return start and length (N, 2) of the lines that are not empty."""
    ends = []
    for start in range(skipped, len(data), SCAN_BYTES):
        ends.append(np.flatnonzero(np.frombuffer(data[start : start + SCAN_BYTES], np.uint8) == ord("\n")) + start)
    line_ends = np.concatenate([*ends, [len(data)]]).astype(INTEGER)
    starts = np.concatenate([[skipped], line_ends[:-1] + 1])
    lengths = line_ends - starts
    with memoryview(data) as view:
        bytes_ = np.frombuffer(view, np.uint8)
        first = bytes_[np.minimum(starts, len(data) - 1)]
        del bytes_
        is_used = lengths > 0
        for number in np.flatnonzero(is_used & np.isin(first, np.frombuffer(SPACES, np.uint8))).tolist():
            is_used[number] = bool(bytes(view[starts[number] : line_ends[number]]).strip())
    return np.stack([starts[is_used], lengths[is_used]], 1)


def _save_index(path: Path, index: JsonIndex) -> None:
    """Save an index. If the cache folder is read-only, the index is rebuilt next time."""
    places = np.ascontiguousarray(index.places, INTEGER)
    fields = [index.state, index.digest, len(places), zlib.crc32(places.data)]
    header = (MAGIC + msgspec.json.encode(fields)).ljust(HEADER_BYTES)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            file.write(header)
            file.write(places.data)
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def _read_index(path: Path, state: tuple[int, int]) -> JsonIndex | None:
    """Map an index file; None if it is missing, damaged, or does not match the file."""
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
        if not header.startswith(MAGIC):
            return None
        fields = msgspec.json.decode(header[len(MAGIC) :], type=tuple[tuple[int, int], str, int, int])
        stored_state, digest, count, checksum = fields
        if stored_state != state or path.stat().st_size != HEADER_BYTES + 16 * count:
            return None
        places = np.memmap(path, INTEGER, "r", HEADER_BYTES, (count, 2)) if count else np.zeros((0, 2), INTEGER)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    is_valid = zlib.crc32(np.ascontiguousarray(places).data) == checksum and (places >= 0).all()
    return JsonIndex(state, digest, places) if is_valid and (places.sum(1) <= state[0]).all() else None
