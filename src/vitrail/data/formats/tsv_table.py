"""TSV tables with an image in every row, as in MMBench."""

import base64
import binascii
import csv
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import BinaryIO, NamedTuple

from vitrail.data.formats.sample import Sample, SampleDataset, build_question_turns, check_unique_ids, show_progress
from vitrail.errors import DataError

_LIMIT_LOCK = threading.Lock()
_MAX_CELL = 1 << 28  # characters; a cell holds an image in base64
_MAX_REFERENCE = 64  # a shorter cell may be the index of the row that holds the image


class TableRow(NamedTuple):
    """Position of a row in the file, and its cells without the image."""

    line: int
    start: int
    length: int
    cells: dict[str, str]


class TsvTable(NamedTuple):
    """A TSV table whose images are read on access."""

    path: Path
    columns: tuple[str, ...]
    rows: list[TableRow]
    by_index: dict[str, int]

    def read_images(self, row: TableRow) -> tuple[bytes, ...]:
        """Read the images of a row from the file: one, or several (MMMU). They are not kept in memory."""
        cell = self._read_cell(row)
        if len(cell) <= _MAX_REFERENCE and cell in self.by_index:
            cell = self._read_cell(self.rows[self.by_index[cell]])
        if not cell:
            raise DataError(f"{self.path}, line {row.line} has no image", "remove that line")
        cells = re.findall(r"['\"]([^'\"]*)['\"]", cell) if cell.startswith("[") else [cell]
        if not cells:
            raise DataError(f"{self.path}, line {row.line} has an empty list of images", "remove that line")
        try:
            return tuple(base64.b64decode(one, validate=True) for one in cells)
        except (binascii.Error, ValueError) as error:
            raise DataError(
                f"{self.path}, line {row.line}: the image is not valid base64: {error}", "download the file again"
            ) from error

    def _read_cell(self, row: TableRow) -> str:
        try:
            with self.path.open("rb") as file, _raised_cell_limit():
                file.seek(row.start)
                cells = next(csv.reader([file.read(row.length).decode()], delimiter="\t", strict=True))
            return cells[self.columns.index("image")]
        except (OSError, UnicodeDecodeError, csv.Error, StopIteration, IndexError) as error:
            raise DataError(f"{self.path} has changed since it was opened", "open it again") from error


@contextmanager
def _raised_cell_limit() -> Iterator[None]:
    """Raise the csv module's cell size limit temporarily. The limit is global, so one thread at a time may hold it."""
    with _LIMIT_LOCK:
        previous = csv.field_size_limit(_MAX_CELL)
        try:
            yield
        finally:
            csv.field_size_limit(previous)


def read_table(path: Path, required_columns: tuple[str, ...]) -> TsvTable:
    """Read a TSV in one pass: the position of each row, and all its cells except the image."""
    if not path.is_file():
        raise DataError(f"{path} is not a file", "check the path and the current folder")
    position = [0, 0]  # bytes and lines read so far
    rows: list[TableRow] = []
    with path.open("rb") as file, _raised_cell_limit():
        reader = csv.reader(_decode_lines(file, position), delimiter="\t", strict=True)
        try:
            columns = tuple(next(reader, ()))
            missing = [name for name in required_columns if name not in columns]
            if missing or len(set(columns)) != len(columns):
                raise DataError(
                    f"{path} has the columns {', '.join(columns)!r:.200}",
                    f"give each column once, including {', '.join(required_columns)}",
                )
            start, line = position
            for cells in show_progress(reader, path.name):
                if cells and len(cells) != len(columns):
                    raise DataError(
                        f"{path}, line {line + 1}: {len(cells)} cells for {len(columns)} columns", "correct that line"
                    )
                if cells:
                    other_cells = {name: cell for name, cell in zip(columns, cells, strict=True) if name != "image"}
                    rows.append(TableRow(line + 1, start, position[0] - start, other_cells))
                start, line = position
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}, line {position[1]}: {error}", "save it as UTF-8 with tabs between cells"
            ) from error
    names = [row.cells["index"] for row in rows]
    check_unique_ids(names, path)
    return TsvTable(path, columns, rows, {name: number for number, name in enumerate(names)})


def _decode_lines(file: BinaryIO, position: list[int]) -> Iterator[str]:
    for line in file:
        first = position[0] == 0
        position[0] += len(line)
        position[1] += 1
        yield line.decode("utf-8-sig" if first else "utf-8")


def open_mmbench(path: Path) -> SampleDataset:
    """Open MMBench and formats like it (SEED, AI2D, MMStar, …).

    Columns are index, question, image, A, B, … and optionally hint and answer (a letter).
    """
    table = read_table(path, ("index", "question", "image", "A", "B"))
    return SampleDataset("mmbench", path, table.rows, partial(_to_choice_sample, table))


def _to_choice_sample(table: TsvTable, row: TableRow) -> Sample:
    cells = dict(row.cells)
    name, question = cells.pop("index"), cells.pop("question")
    letters = [letter for letter in ascii_uppercase if letter in cells]
    choices = {letter: text for letter in letters if (text := cells.pop(letter))}
    hint, answer = cells.pop("hint", ""), cells.pop("answer", "").strip()
    if answer and answer not in choices:
        raise DataError(
            f"{table.path}, line {row.line}: the answer {answer!r:.80} is none of {', '.join(choices)}",
            "correct that line",
        )
    return Sample(
        id=name,
        images=(images := table.read_images(row)),
        turns=build_question_turns(question, len(images)),
        answers=(answer,) if answer else (),
        choices=choices,
        hint=hint,
        metadata=cells,
    )
