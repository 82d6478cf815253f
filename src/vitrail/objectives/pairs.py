"""Which pairs of a contrastive batch are positive, which negative, and which are left out.

N rows, M columns
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import ConfigError

Labels = Tensor | tuple[Tensor, Tensor] | None
"""None: row i belongs to column i · ids of the rows (N,) and of the columns (M,): equal ones belong together, and a
negative one is left out · a table (N, M): bool, or int8 with 1 for positive, −1 for negative, 0 for left out"""

ROWS = 1024
"""Rows of a table that are looked at together."""


class Pairs(NamedTuple):
    """Labels as the tiles read them; without ids and table, row i belongs to column i + shift."""

    shift: int = 0
    rows: Tensor | None = None
    columns: Tensor | None = None
    table: Tensor | None = None

    @property
    def labelled(self) -> bool:
        return self.rows is not None or self.table is not None

    def cut(self, rows: slice, columns: slice) -> "Pairs":
        """Those of a tile."""
        if self.table is not None:
            return Pairs(table=self.table[rows, columns])
        if self.rows is not None and self.columns is not None:
            return Pairs(rows=self.rows[rows], columns=self.columns[columns])
        return Pairs(self.shift + rows.start - columns.start)

    def beside(self, first: int, count: int, ids: Tensor | None) -> "Pairs":
        """Against `count` columns, the first of which is number `first` of all, with these ids."""
        if self.table is not None:
            return Pairs(table=self.table[:, first : first + count])
        return Pairs(self.shift - first, self.rows, ids)

    def signs(self, N: int, M: int, device: torch.device) -> Tensor:
        """(N, M) in int8: 1 positive, −1 negative, 0 left out"""
        if self.table is not None:
            return self.table.to(torch.int8) * 2 - 1 if self.table.dtype == torch.bool else self.table.sign()
        if self.rows is not None and self.columns is not None:
            a, b = self.rows[:, None], self.columns[None, :]
            return torch.where((a < 0) | (b < 0), 0, (a == b).to(torch.int8) * 2 - 1).to(torch.int8)
        own = torch.arange(N, device=device)[:, None] + self.shift == torch.arange(M, device=device)
        return own.to(torch.int8) * 2 - 1

    def counted(self, N: int, device: torch.device) -> Tensor:
        """How many rows have any pair that is not left out."""
        if self.rows is not None:
            return (self.rows >= 0).sum()
        if self.table is not None and self.table.dtype != torch.bool:
            return torch.stack([part.any(1).sum() for part in self.table.split(ROWS)]).sum()
        return torch.full((), N, device=device)


def read(labels: Labels, N: int, M: int) -> Pairs:
    """Labels as they are given, checked."""
    if labels is None:
        if N != M:
            raise ConfigError(
                f"{N} rows and {M} columns do not pair off", "give labels: ids of both, or a table of all pairs"
            )
        return Pairs()
    if isinstance(labels, tuple):
        rows, columns = labels
        if rows.shape != (N,) or columns.shape != (M,) or rows.is_floating_point() or columns.is_floating_point():
            raise ConfigError(
                f"ids {_seen(rows)} and {_seen(columns)} do not name {N} rows and {M} columns",
                "give one integer a row and one a column",
            )
        return Pairs(rows=rows.contiguous(), columns=columns.contiguous())
    if labels.shape != (N, M) or labels.dtype not in (torch.bool, torch.int8):
        raise ConfigError(
            f"a table {_seen(labels)} does not label {N} × {M} pairs",
            "give bool, or int8 with 1 for positive, −1 for negative and 0 for left out; or ids of rows and columns",
        )
    return Pairs(table=labels if labels.stride(1) == 1 else labels.contiguous())


def _seen(x: Tensor) -> str:
    return f"{tuple(x.shape)} of {str(x.dtype).removeprefix('torch.')}"
