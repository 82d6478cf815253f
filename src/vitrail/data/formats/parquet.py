"""Parquet files with pictures inside, as the hubs keep data sets: words are read at once, pictures when asked for."""

import re
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data.formats.sample import progress
from vitrail.errors import ConfigError, DataError

_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(-[0-9a-f]+)?\.parquet")


class _Place(NamedTuple):
    file: int
    group: int
    row: int


def is_parquet(path: Path) -> bool:
    """Whether it is such a file, or a folder with one."""
    return path.suffix == ".parquet" or (path.is_dir() and next(path.glob("*.parquet"), None) is not None)


def shards(path: Path) -> list[Path]:
    """All files of the split that a file or folder belongs to: those named `test-00000-of-00002.parquet` come together
    and complete, and a folder must not hold several splits."""
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
    elif path.is_file():
        found = _SHARD.fullmatch(path.name)
        alike = path.parent.glob(f"{found['split']}-*-of-{found['count']}*.parquet") if found else ()
        files = sorted(file for file in alike if _SHARD.fullmatch(file.name)) if found else [path]
    else:
        raise DataError(f"{path} is neither a file nor a folder", "check the spelling and the folder you are in")
    splits: dict[str, list[Path]] = {}
    for file in files:
        found = _SHARD.fullmatch(file.name)
        splits.setdefault(found["split"] if found else file.stem, []).append(file)
    if len(splits) > 1:
        raise DataError(f"{path} holds {', '.join(sorted(splits))}", "give a file of the one that is meant")
    if files and (last := _SHARD.fullmatch(files[-1].name)) and len(files) != int(last["count"]):
        raise DataError(f"{path}: {len(files)} of {int(last['count'])} pieces are there", "download the others too")
    return files


class Table(Sequence[dict[str, Any]]):
    """The rows of one split, as dictionaries without their pictures; `pictured` are the columns that hold those."""

    def __init__(self, path: Path):
        self.path, self.files = path, shards(path)
        self.pictured: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._places: list[_Place] = []
        self._kept: tuple[tuple[int, int, str], Any] | None = None
        for number, file in enumerate(progress(self.files, f"read {path.name}")):
            self._read(number, file)

    def _read(self, number: int, file: Path) -> None:
        with _opened(file) as opened:
            schema = opened.schema_arrow
            pictured = [name for name in schema.names if _holds_pictures(schema.field(name).type)]
            if number and pictured != self.pictured:
                raise DataError(f"{file} has other columns than {self.files[0].name}", "give pieces of one split")
            self.pictured = pictured
            self._rows += opened.read([name for name in schema.names if name not in pictured]).to_pylist()
            for group in range(opened.num_row_groups):
                rows = opened.metadata.row_group(group).num_rows
                self._places += [_Place(number, group, row) for row in range(rows)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return self._rows[index]

    @property
    def columns(self) -> set[str]:
        return {*(self._rows[0] if self._rows else ()), *self.pictured}

    def pictures(self, index: int, column: str = "image") -> tuple[bytes, ...]:
        """The bytes of a row's picture, of several where the column is a list, of none where it is empty."""
        if column not in self.pictured:
            raise DataError(f"{self.path} has no column {column!r} of pictures", f"it has {sorted(self.columns)}")
        place = self._places[index]
        key = (place.file, place.group, column)
        if self._kept is None or self._kept[0] != key:  # rows are mostly asked for in their order
            with _opened(self.files[place.file]) as opened:
                self._kept = key, opened.read_row_group(place.group, columns=[column]).column(0)
        cell = self._kept[1][place.row].as_py()
        cells = cell if isinstance(cell, list) else [] if cell is None else [cell]
        return tuple(self._bytes(one, index, column) for one in cells)

    def _bytes(self, cell: Any, index: int, column: str) -> bytes:
        data = cell["bytes"] if isinstance(cell, dict) else cell
        if not data:
            raise DataError(
                f"{self.path}, row {index}: {column} names a picture that is not in the file",
                "download the version with pictures inside",
            )
        return data


def _holds_pictures(kind: Any) -> bool:
    """Bytes, a hub's struct of bytes and a path, or a list of either."""
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _holds_pictures(kind.value_type)
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


@contextmanager
def _opened(file: Path):
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(f"{file} is parquet, which needs a package", "pip install 'vitrail[hf]'") from None
    try:
        with ParquetFile(file) as opened:
            yield opened
    except (ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read: {error!s:.200}", "download it again") from error
