"""Read the sizes in a parquet file, in a limited process: pyarrow ends the process if some of them are damaged."""

from typing import NamedTuple

from vitrail.errors import DataError
from vitrail.limited_process import LimitedProcess, LimitExceededError

_reader = LimitedProcess("vitrail.data.formats.parquet_metadata:read_chunk_sizes")


class ColumnChunk(NamedTuple):
    """A column of one group of rows, and its bytes when it is read."""

    group: int
    column: str
    bytes: int


def list_chunks(file: str) -> list[ColumnChunk]:
    """List the column chunks of a parquet file. Raises DataError if pyarrow cannot read their sizes."""
    try:
        return [ColumnChunk(*row) for row in _reader.call(file)]
    except LimitExceededError as error:
        raise DataError(f"{file} cannot be read: reading its metadata {error}", "download it again") from None
