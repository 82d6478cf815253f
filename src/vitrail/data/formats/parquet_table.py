"""Parquet files with embedded images, as datasets are stored on the hubs. Text columns are read at once, images on
access."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data.formats.parquet_check import ColumnChunk, list_chunks
from vitrail.data.formats.sample import show_progress
from vitrail.errors import ConfigError, DataError
from vitrail.limited_process import BYTES_VARIABLE, get_file_limits

_ROW_BYTES, _CELL_BYTES = 256, 64  # memory of a row and of a cell as Python objects, without long texts
_BATCH_ROWS = 1024
_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(-[0-9a-f]+)?\.parquet")


class _RowPlace(NamedTuple):
    file: int
    group: int
    row: int


def is_parquet(path: Path) -> bool:
    """Whether a path is a parquet file, or a folder with one."""
    return path.suffix == ".parquet" or (path.is_dir() and next(path.glob("*.parquet"), None) is not None)


def list_parquet_files(path: Path) -> list[Path]:
    """List all files of the split that a file or folder belongs to.

    Files named like `test-00000-of-00002.parquet` must be complete. A folder must hold one split only.
    """
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
    elif path.is_file():
        match = _SHARD.fullmatch(path.name)
        siblings = path.parent.glob(f"{match['split']}-*-of-{match['count']}*.parquet") if match else ()
        files = sorted(file for file in siblings if _SHARD.fullmatch(file.name)) if match else [path]
    else:
        raise DataError(f"{path} is neither a file nor a folder", "check the path and the current folder")
    splits: dict[str, list[Path]] = {}
    for file in files:
        match = _SHARD.fullmatch(file.name)
        splits.setdefault(match["split"] if match else file.stem, []).append(file)
    if len(splits) > 1:
        raise DataError(f"{path} holds several splits: {', '.join(sorted(splits))}", "give a file of one split")
    if files and (last := _SHARD.fullmatch(files[-1].name)) and len(files) != int(last["count"]):
        raise DataError(f"{path} has {len(files)} of {int(last['count'])} parts", "download the missing parts")
    return files


class ParquetTable(Sequence[dict[str, Any]]):
    """Rows of one split as dictionaries without images. `image_columns` are the columns that hold images."""

    def __init__(self, path: Path):
        self.path, self.files = path, list_parquet_files(path)
        self.image_columns: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._row_places: list[_RowPlace] = []
        self._chunks: list[list[ColumnChunk]] = []  # of each file
        self._cached_group: tuple[tuple[int, int, str], Any] | None = None
        for number, file in enumerate(show_progress(self.files, f"read {path.name}")):
            self._read_file(number, file)

    def _read_file(self, number: int, file: Path) -> None:
        with _open_parquet(file) as opened:
            chunks = list_chunks(str(file))
            self._chunks.append(chunks)
            schema = opened.schema_arrow
            pictured = [name for name in schema.names if _is_image_type(schema.field(name).type)]
            if number and pictured != self.image_columns:
                raise DataError(f"{file} has other columns than {self.files[0].name}", "give files of one split")
            self.image_columns = pictured
            metadata, others = opened.metadata, [name for name in schema.names if name not in pictured]
            counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            _check_memory(sum(counts) * (_ROW_BYTES + _CELL_BYTES * len(others)), file)
            rows = [row for batch in _read_batches(opened, file, chunks, others) for row in batch.to_pylist()]
            if sum(counts) != len(rows):
                raise DataError(f"{file} declares {sum(counts):,} rows and has {len(rows):,}", "download it again")
            self._rows += rows
            for group, count in enumerate(counts):
                self._row_places += [_RowPlace(number, group, row) for row in range(count)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return self._rows[index]

    @property
    def columns(self) -> set[str]:
        """Names of all columns."""
        return {*(self._rows[0] if self._rows else ()), *self.image_columns}

    def read_images(self, index: int, column: str = "image") -> tuple[bytes, ...]:
        """Read the images of a row: one, several if the column is a list, none if it is empty."""
        if column not in self.image_columns:
            raise DataError(f"{self.path} has no image column {column!r}", f"it has {sorted(self.columns)}")
        place = self._row_places[index]
        key = (place.file, place.group, column)
        if self._cached_group is None or self._cached_group[0] != key:  # rows are mostly read in order
            file = self.files[place.file]
            with _open_parquet(file) as opened:
                batches = list(_read_batches(opened, file, self._chunks[place.file], [column], place.group))
            self._cached_group = key, [cell for batch in batches for cell in batch.column(0)]
        with _name_file_in_errors(self.files[place.file]):
            cell = self._cached_group[1][place.row].as_py()
        cells = cell if isinstance(cell, list) else [] if cell is None else [cell]
        return tuple(self._image_bytes(entry, index, column) for entry in cells)

    def _image_bytes(self, cell: Any, index: int, column: str) -> bytes:
        data = cell["bytes"] if isinstance(cell, dict) else cell
        if not data:
            raise DataError(
                f"{self.path}, row {index}: {column} names an image that is not in the file",
                "download the version with embedded images",
            )
        return data


def _read_batches(
    parquet_file: Any, file: Path, chunks: list[ColumnChunk], columns: list[str], group: int | None = None
) -> Iterator[Any]:
    """Read all rows, or those of one group, in batches. Raises DataError if they need more memory than the limit.

    A few bytes of a file can stand for gigabytes: repeated values are stored once.
    """
    groups, used = list(range(parquet_file.metadata.num_row_groups)) if group is None else [group], 0
    sizes = [chunk.bytes for chunk in chunks if chunk.group in groups and chunk.column in columns]
    largest = max(sizes, default=0)  # no value is larger
    _check_memory(largest, file)
    rows = get_file_limits().bytes // 8 // max(1, largest)
    for batch in parquet_file.iter_batches(max(1, min(_BATCH_ROWS, rows)), row_groups=groups, columns=columns):
        used += batch.nbytes
        _check_memory(used if group is not None else 2 * used, file)  # texts exist once more as Python objects
        yield batch


def _check_memory(num_bytes: int, file: Path) -> None:
    if num_bytes > (limit := get_file_limits().bytes):
        raise DataError(
            f"{file} needs {num_bytes / 1e6:,.0f} MB of memory, more than the limit of {limit / 1e6:,.0f} MB",
            f"split it, or set {BYTES_VARIABLE} to a higher limit if you trust the file",
        )


def _is_image_type(kind: Any) -> bool:
    """Whether a column type is bytes, a struct of bytes and path, or a list of either."""
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_image_type(kind.value_type)
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


@contextmanager
def _open_parquet(file: Path):
    """Open a parquet file. Errors of pyarrow become `DataError`."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(f"{file} is parquet, which needs pyarrow", "pip install 'vitrail[hf]'") from None
    with _name_file_in_errors(file), ParquetFile(file) as opened:
        yield opened


@contextmanager
def _name_file_in_errors(file: Path):
    """Convert the errors of pyarrow, and those of its values, to `DataError`."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError) as error:
        raise DataError(f"{file} cannot be read: {error!s:.200}", "download it again") from error
