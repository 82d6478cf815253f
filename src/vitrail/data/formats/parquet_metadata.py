"""Metadata of parquet files. It runs in the process of `parquet_check`, because pyarrow may end the process."""

from pyarrow.parquet import ParquetFile


def read_chunk_sizes(file: str) -> list[tuple[int, str, int]]:
    """Return group, column and size of every column chunk."""
    with ParquetFile(file) as opened:
        metadata, sizes = opened.metadata, []
        for group in range(metadata.num_row_groups):
            for column in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(column)
                sizes.append((group, chunk.path_in_schema.partition(".")[0], chunk.total_uncompressed_size))
        return sizes
