"""DPG-Bench's table: a row a question, the rows of a prompt one behind the other."""

import csv
import io
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from vitrail.data.formats.files import read_text
from vitrail.data.graphs import Graph, Question, fault
from vitrail.errors import DataError

COLUMNS = ("item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language")
"""Those that are read; `keywords`, `category_broad` and `category_detailed` may be there too."""


class _Row(NamedTuple):
    line: int
    item: str
    text: str
    question: Question


def read_dpg(path: str | Path) -> list[Graph]:
    """`dpg_bench.csv`, every row of it. A question's category is what stands before the bracket of its `tuple`, as the
    original reads it."""
    path = Path(path)
    graphs: list[Graph] = []
    lines: dict[str, int] = {}  # where each prompt begins
    for item, group in groupby(_rows(path), key=lambda row: row.item):
        rows = list(group)
        if item in lines:
            raise DataError(
                f"{path}, line {rows[0].line}: the prompt {item!r:.80} was there before, from line {lines[item]}",
                "put all rows of a prompt together, or give one of the two another item_id",
            )
        lines[item] = rows[0].line
        other = next((row for row in rows if row.text != rows[0].text), None)
        if other is not None:
            raise DataError(
                f"{path}, line {other.line}: the prompt {item!r:.80} has another text than in line {rows[0].line}",
                "give both lines one text, or different item_ids",
            )
        found = fault([row.question for row in rows])
        if found is not None:
            raise DataError(f"{path}, line {rows[found.place].line}: the question {found.problem}", found.fix)
        graphs.append(Graph(item, rows[0].text, tuple(row.question for row in rows)))
    if not graphs:
        raise DataError(f"{path} has no row", "copy or download it again")
    return graphs


def _rows(path: Path) -> Iterator[_Row]:
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        columns = next(reader)
        missing = [name for name in COLUMNS if name not in columns]
        if missing:
            raise DataError(
                f"{path} has no column {missing[0]!r}; its first line: {', '.join(columns)!r:.200}",
                f"give all of {', '.join(COLUMNS)}",
            )
        twice = next((name for name in columns if columns.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"{path} has the column {twice!r:.80} twice", "leave one of them out")
        start = reader.line_num + 1
        for cells in reader:
            line, start = start, reader.line_num + 1  # a text may go over several lines
            if not cells:
                continue
            if len(cells) != len(columns):
                raise DataError(
                    f"{path}, line {line}: {len(cells)} cells for {len(columns)} columns",
                    "mend that line; a text with commas stands in quotation marks",
                )
            yield _row(path, line, dict(zip(columns, cells, strict=True)))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}", "save it as CSV with commas") from error


def _row(path: Path, line: int, cells: dict[str, str]) -> _Row:
    for name in COLUMNS:
        if not cells[name].strip():
            raise DataError(f"{path}, line {line}: {name} is empty", "mend that line; no dependency is written 0")
    category = cells["tuple"].split("(")[0].strip()
    if not category:
        raise DataError(
            f"{path}, line {line}: {cells['tuple']!r:.80} names no category",
            "write it as “attribute - color (boat, red)”",
        )
    number = _whole(path, line, "proposition_id", cells["proposition_id"])
    depends = [_whole(path, line, "dependency", one) for one in cells["dependency"].split(",")]
    question = Question(number, category, cells["question_natural_language"], tuple(one for one in depends if one))
    return _Row(line, cells["item_id"], cells["text"].strip(), question)


def _whole(path: Path, line: int, name: str, text: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text):
        raise DataError(
            f"{path}, line {line}: {name} has {text.strip()!r:.80}, which is no whole number",
            "write ids as 1, 2, …, several with commas between them",
        )
    return int(text)
