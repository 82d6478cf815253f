"""Labels of a contrastive batch: which pairs are positive, negative or ignored.

N rows, M columns
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import ConfigError

Labels = Tensor | tuple[Tensor, Tensor] | None
"""One of:

- None: row i belongs to column i.
- ids of rows (N,) and columns (M,): equal ids are positive pairs; a negative id is ignored.
- a table (N, M): bool, or int8 with 1 for positive, −1 for negative, 0 for ignored.
"""

TABLE_CHUNK_ROWS = 1024
"""Rows of a table that are processed at a time."""


class PairLabels(NamedTuple):
    """Parsed labels. Without ids and table, row i belongs to column i + `diagonal_offset`."""

    diagonal_offset: int = 0
    row_ids: Tensor | None = None
    column_ids: Tensor | None = None
    table: Tensor | None = None

    @property
    def has_labels(self) -> bool:
        return self.row_ids is not None or self.table is not None

    def select_tile(self, rows: slice, columns: slice) -> "PairLabels":
        """Return the labels of a tile."""
        if self.table is not None:
            return PairLabels(table=self.table[rows, columns])
        if self.row_ids is not None and self.column_ids is not None:
            return PairLabels(row_ids=self.row_ids[rows], column_ids=self.column_ids[columns])
        return PairLabels(self.diagonal_offset + rows.start - columns.start)

    def select_columns(self, start: int, count: int, column_ids: Tensor | None) -> "PairLabels":
        """Return the labels of `count` columns from column `start` on, whose ids are `column_ids`."""
        if self.table is not None:
            return PairLabels(table=self.table[:, start : start + count])
        return PairLabels(self.diagonal_offset - start, self.row_ids, column_ids)

    def sign_matrix(self, N: int, M: int, device: torch.device) -> Tensor:
        """Return an int8 matrix (N, M): 1 positive, −1 negative, 0 ignored."""
        if self.table is not None:
            return self.table.to(torch.int8) * 2 - 1 if self.table.dtype == torch.bool else self.table.sign()
        if self.row_ids is not None and self.column_ids is not None:
            a, b = self.row_ids[:, None], self.column_ids[None, :]
            return torch.where((a < 0) | (b < 0), 0, (a == b).to(torch.int8) * 2 - 1).to(torch.int8)
        own = torch.arange(N, device=device)[:, None] + self.diagonal_offset == torch.arange(M, device=device)
        return own.to(torch.int8) * 2 - 1

    def count_rows(self, N: int, device: torch.device) -> Tensor:
        """Return the number of rows with at least one pair that is not ignored."""
        if self.row_ids is not None:
            return (self.row_ids >= 0).sum()
        if self.table is not None and self.table.dtype != torch.bool:
            return torch.stack([part.any(1).sum() for part in self.table.split(TABLE_CHUNK_ROWS)]).sum()
        return torch.full((), N, device=device)


def parse_labels(labels: Labels, N: int, M: int) -> PairLabels:
    """Check labels and convert them to `PairLabels`."""
    if labels is None:
        if N != M:
            raise ConfigError(
                f"{N} rows and {M} columns need labels", "pass ids of rows and columns, or a table of all pairs"
            )
        return PairLabels()
    if isinstance(labels, tuple):
        rows, columns = labels
        if rows.shape != (N,) or columns.shape != (M,) or rows.is_floating_point() or columns.is_floating_point():
            raise ConfigError(
                f"ids {_describe(rows)} and {_describe(columns)} do not match {N} rows and {M} columns",
                "pass one integer per row and one per column",
            )
        return PairLabels(row_ids=rows.contiguous(), column_ids=columns.contiguous())
    if labels.shape != (N, M) or labels.dtype not in (torch.bool, torch.int8):
        raise ConfigError(
            f"label table {_describe(labels)} does not match {N} × {M} pairs",
            "pass bool, or int8 with 1 for positive, −1 for negative and 0 for ignored; or ids of rows and columns",
        )
    return PairLabels(table=labels if labels.stride(1) == 1 else labels.contiguous())


def _describe(x: Tensor) -> str:
    return f"{tuple(x.shape)} of {str(x.dtype).removeprefix('torch.')}"
