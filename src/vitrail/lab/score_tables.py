"""Read tables of scores over numbers of visual tokens: CSV files, and the tables of the token-scaling paper."""

import csv
import math
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from vitrail.errors import DataError, suggest_name

PAPER_TABLES = ("paper", "paper-tuned", "paper-queries")
"""Models of arXiv 2412.18387: with the question, tuned without it, and without it."""


class ScoreColumn(NamedTuple):
    """Scores s of one task at numbers of tokens n, ascending."""

    n: tuple[float, ...]
    s: tuple[float, ...]

    def without(self, token_counts: tuple[float, ...]) -> "ScoreColumn":
        """Return a copy without some numbers of tokens."""
        kept = [(n, s) for n, s in zip(self.n, self.s, strict=True) if n not in token_counts]
        return ScoreColumn(tuple(n for n, _ in kept), tuple(s for _, s in kept))


def read_score_table(name: str | Path) -> dict[str, ScoreColumn]:
    """Read a table as task → column.

    A file has a column `n` and one column of scores per task. Cells may be empty, and lines that start with # are
    comments.
    """
    path = Path(name)
    if str(name) in PAPER_TABLES:
        text = resources.files("vitrail.lab").joinpath("data", f"{name}.csv").read_text(encoding="utf-8")
    else:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise DataError(
                f"{name} cannot be read: {reason}",
                suggest_name(str(name), PAPER_TABLES, f"give a CSV file or {_join_with_or(PAPER_TABLES)}"),
            ) from None
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip() and not line.startswith("#")]
    rows = [_parse_cells(line, f"line {i} of {name}") for i, line in lines]
    head = [cell.strip() for cell in rows[0]] if rows else []
    if "n" not in head or len(head) < 2:
        raise DataError(f"{name} needs a column n and a column of scores", "name the columns in the first line")
    if len(set(head)) < len(head):
        raise DataError(f"{name} has two columns named {max(head, key=head.count)!r}", "rename one")
    found: dict[str, list[tuple[float, float]]] = {task: [] for task in head if task != "n"}
    for (line, _), row in zip(lines[1:], rows[1:], strict=True):
        if len(row) != len(head):
            raise DataError(f"line {line} of {name} has {len(row)} cells, not {len(head)}", "correct the line")
        cells = dict(zip(head, row, strict=True))
        n = _parse_number(cells.pop("n"), f"line {line} of {name}, column n")
        for task, cell in cells.items():
            if cell.strip():
                found[task].append((n, _parse_number(cell, f"line {line} of {name}, column {task}")))
    return {
        task: ScoreColumn(*zip(*sorted(points), strict=True)) if points else ScoreColumn((), ())
        for task, points in found.items()
    }


def _parse_cells(line: str, where: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise DataError(f"{where} cannot be read: {error}", "close the quotes within the line") from None


def _parse_number(cell: str, where: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{where}: {cell.strip() or 'an empty cell'} is not a number", "correct the cell")
    return value


def _join_with_or(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + " or " + names[-1]
