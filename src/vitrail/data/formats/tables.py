"""Tables with a picture in every row, as MMBench has them."""

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

from vitrail.data.formats.sample import Sample, Samples, asked, progress, refuse_twins
from vitrail.errors import DataError

_ALONE = threading.Lock()
_CELL = 1 << 28  # characters; a picture in base64 is a cell
_REFERENCE = 64  # a cell shorter than this may be the index of the row that holds the picture


class Place(NamedTuple):
    """Where in the file a row stands, and its cells without the picture."""

    line: int
    start: int
    length: int
    cells: dict[str, str]


class Table(NamedTuple):
    path: Path
    columns: tuple[str, ...]
    rows: list[Place]
    by_index: dict[str, int]

    def pictures(self, row: Place) -> tuple[bytes, ...]:
        """The bytes of a row's picture, or of several (MMMU), read again from the file: they are not kept in memory."""
        cell = self._cell(row)
        if len(cell) <= _REFERENCE and cell in self.by_index:
            cell = self._cell(self.rows[self.by_index[cell]])
        if not cell:
            raise DataError(f"{self.path}, line {row.line} has no picture", "leave that line out")
        cells = re.findall(r"['\"]([^'\"]*)['\"]", cell) if cell.startswith("[") else [cell]
        if not cells:
            raise DataError(f"{self.path}, line {row.line} has a list of no pictures", "leave that line out")
        try:
            return tuple(base64.b64decode(one, validate=True) for one in cells)
        except (binascii.Error, ValueError) as error:
            raise DataError(
                f"{self.path}, line {row.line}: the picture is no base64: {error}", "download the file again"
            ) from error

    def _cell(self, row: Place) -> str:
        try:
            with self.path.open("rb") as file, _wide_cells():
                file.seek(row.start)
                cells = next(csv.reader([file.read(row.length).decode()], delimiter="\t", strict=True))
            return cells[self.columns.index("image")]
        except (OSError, UnicodeDecodeError, csv.Error, StopIteration, IndexError) as error:
            raise DataError(f"{self.path} is not the file it was when it was opened", "open it again") from error


@contextmanager
def _wide_cells() -> Iterator[None]:
    """csv's limit of a cell is one number for the whole process: raise it meanwhile, for one thread at a time."""
    with _ALONE:
        kept = csv.field_size_limit(_CELL)
        try:
            yield
        finally:
            csv.field_size_limit(kept)


def read_table(path: Path, needs: tuple[str, ...]) -> Table:
    """One pass over a TSV: where each row stands, and all its cells but the picture."""
    if not path.is_file():
        raise DataError(f"{path} is no file", "check the spelling and the folder you are in")
    at = [0, 0]  # bytes and lines given to the parser so far
    rows: list[Place] = []
    with path.open("rb") as file, _wide_cells():
        reader = csv.reader(_lines(file, at), delimiter="\t", strict=True)
        try:
            columns = tuple(next(reader, ()))
            missing = [name for name in needs if name not in columns]
            if missing or len(set(columns)) != len(columns):
                raise DataError(
                    f"{path} has the columns {', '.join(columns)!r:.200}",
                    f"each once, and {', '.join(needs)} among them",
                )
            start, line = at
            for cells in progress(reader, path.name):
                if cells and len(cells) != len(columns):
                    raise DataError(
                        f"{path}, line {line + 1}: {len(cells)} cells for {len(columns)} columns", "mend that line"
                    )
                if cells:
                    kept = {name: cell for name, cell in zip(columns, cells, strict=True) if name != "image"}
                    rows.append(Place(line + 1, start, at[0] - start, kept))
                start, line = at
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}, line {at[1]}: {error}", "save it as UTF-8 with tabs between cells") from error
    names = [row.cells["index"] for row in rows]
    refuse_twins(names, path)
    return Table(path, columns, rows, {name: number for number, name in enumerate(names)})


def _lines(file: BinaryIO, at: list[int]) -> Iterator[str]:
    for line in file:
        first = at[0] == 0
        at[0] += len(line)
        at[1] += 1
        yield line.decode("utf-8-sig" if first else "utf-8")


def open_mmbench(path: Path) -> Samples:
    """MMBench, and what shares its form (SEED, AI2D, MMStar, …): index, question, image, A, B, …; perhaps hint and
    answer (a letter)."""
    table = read_table(path, ("index", "question", "image", "A", "B"))
    return Samples("mmbench", path, table.rows, partial(_choice, table))


def _choice(table: Table, row: Place) -> Sample:
    cells = dict(row.cells)
    name, question = cells.pop("index"), cells.pop("question")
    letters = [letter for letter in ascii_uppercase if letter in cells]
    choices = {letter: text for letter in letters if (text := cells.pop(letter))}
    hint, answer = cells.pop("hint", ""), cells.pop("answer", "").strip()
    if answer and answer not in choices:
        raise DataError(
            f"{table.path}, line {row.line}: the answer {answer!r:.80} is none of {', '.join(choices)}",
            "mend that line",
        )
    return Sample(
        id=name,
        pictures=(shown := table.pictures(row)),
        turns=asked(question, len(shown)),
        answers=(answer,) if answer else (),
        choices=choices,
        hint=hint,
        notes=cells,
    )
