"""Tables of scores over numbers of visual tokens: from CSV files, and those of the token-scaling paper by name."""

import csv
import math
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from vitrail.errors import DataError, nearest

PAPERS = ("paper", "paper-tuned", "paper-queries")
"""With the question, tuned further without it, and without it: the three models of arXiv 2412.18387."""


class Column(NamedTuple):
    """One task: its scores and the numbers of tokens they were had with, ascending."""

    n: tuple[float, ...]
    s: tuple[float, ...]

    def without(self, drop: tuple[float, ...]) -> "Column":
        kept = [(n, s) for n, s in zip(self.n, self.s, strict=True) if n not in drop]
        return Column(tuple(n for n, _ in kept), tuple(s for _, s in kept))


def read_scores(name: str | Path) -> dict[str, Column]:
    """Task → its column. A file has a column `n` and any number of columns of scores; a cell may be empty where a task
    was not tested, and lines that begin with # are remarks."""
    path = Path(name)
    if str(name) in PAPERS:
        text = resources.files("vitrail.lab").joinpath("data", f"{name}.csv").read_text(encoding="utf-8")
    else:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise DataError(
                f"{name} cannot be read: {reason}", nearest(str(name), PAPERS, f"give a CSV file or {_or(PAPERS)}")
            ) from None
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip() and not line.startswith("#")]
    rows = [_cells(line, f"line {i} of {name}") for i, line in lines]
    head = [cell.strip() for cell in rows[0]] if rows else []
    if "n" not in head or len(head) < 2:
        raise DataError(f"{name} has no column called n beside one of scores", "name them in its first line")
    if len(set(head)) < len(head):
        raise DataError(f"{name} has two columns called {max(head, key=head.count)!r}", "give each its own name")
    found: dict[str, list[tuple[float, float]]] = {task: [] for task in head if task != "n"}
    for (line, _), row in zip(lines[1:], rows[1:], strict=True):
        if len(row) != len(head):
            raise DataError(f"line {line} of {name} has {len(row)} cells, not {len(head)}", "mend it")
        cells = dict(zip(head, row, strict=True))
        n = _number(cells.pop("n"), f"line {line} of {name}, column n")
        for task, cell in cells.items():
            if cell.strip():
                found[task].append((n, _number(cell, f"line {line} of {name}, column {task}")))
    return {
        task: Column(*zip(*sorted(points), strict=True)) if points else Column((), ()) for task, points in found.items()
    }


def _cells(line: str, where: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise DataError(f"{where} cannot be read: {error}", "a row is one line: close its quotes there") from None


def _number(cell: str, where: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{where}: {cell.strip() or 'an empty cell'} is no number", "mend it, or leave a score empty")
    return value


def _or(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + " or " + names[-1]
