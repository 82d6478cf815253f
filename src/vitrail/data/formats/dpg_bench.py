"""DPG-Bench's CSV table: one row for each question, with the rows of a prompt in sequence."""

import csv
import io
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from vitrail.data.formats.data_files import read_text
from vitrail.data.question_graphs import GraphQuestion, QuestionGraph, find_problem
from vitrail.errors import DataError

REQUIRED_COLUMNS = ("item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language")
"""Columns that must exist. `keywords`, `category_broad` and `category_detailed` are ignored."""


class _Row(NamedTuple):
    line: int
    item: str
    text: str
    question: GraphQuestion


def read_dpg(path: str | Path) -> list[QuestionGraph]:
    """Read all rows of `dpg_bench.csv`.

    The category of a question is the text before the bracket in its `tuple` column, as in the original code.
    """
    path = Path(path)
    graphs: list[QuestionGraph] = []
    first_lines: dict[str, int] = {}  # first line of each prompt
    for item, group in groupby(_read_rows(path), key=lambda row: row.item):
        rows = list(group)
        if item in first_lines:
            raise DataError(
                f"{path}, line {rows[0].line}: the prompt {item!r:.80} occurs already at line {first_lines[item]}",
                "put all rows of a prompt together, or change one of the two item_ids",
            )
        first_lines[item] = rows[0].line
        other = next((row for row in rows if row.text != rows[0].text), None)
        if other is not None:
            raise DataError(
                f"{path}, line {other.line}: the text of prompt {item!r:.80} differs from line {rows[0].line}",
                "give both lines the same text, or different item_ids",
            )
        problem = find_problem([row.question for row in rows])
        if problem is not None:
            raise DataError(
                f"{path}, line {rows[problem.position].line}: the question {problem.problem}", problem.remedy
            )
        graphs.append(QuestionGraph(item, rows[0].text, tuple(row.question for row in rows)))
    if not graphs:
        raise DataError(f"{path} has no rows", "copy or download it again")
    return graphs


def _read_rows(path: Path) -> Iterator[_Row]:
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        columns = next(reader)
        missing = [name for name in REQUIRED_COLUMNS if name not in columns]
        if missing:
            raise DataError(
                f"{path} has no column {missing[0]!r}; its first line: {', '.join(columns)!r:.200}",
                f"add all of {', '.join(REQUIRED_COLUMNS)}",
            )
        duplicate = next((name for name in columns if columns.count(name) > 1), None)
        if duplicate is not None:
            raise DataError(f"{path} has the column {duplicate!r:.80} twice", "remove one of them")
        start = reader.line_num + 1
        for cells in reader:
            line, start = start, reader.line_num + 1  # a text may span several lines
            if not cells:
                continue
            if len(cells) != len(columns):
                raise DataError(
                    f"{path}, line {line}: {len(cells)} cells for {len(columns)} columns",
                    "fix that line; put texts with commas in quotation marks",
                )
            yield _parse_row(path, line, dict(zip(columns, cells, strict=True)))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}", "save it as CSV with commas") from error


def _parse_row(path: Path, line: int, cells: dict[str, str]) -> _Row:
    for name in REQUIRED_COLUMNS:
        if not cells[name].strip():
            raise DataError(f"{path}, line {line}: {name} is empty", "fill it in; write 0 for no dependency")
    category = cells["tuple"].split("(")[0].strip()
    if not category:
        raise DataError(
            f"{path}, line {line}: {cells['tuple']!r:.80} has no category",
            "write it as “attribute - color (boat, red)”",
        )
    number = _parse_integer(path, line, "proposition_id", cells["proposition_id"])
    dependencies = [_parse_integer(path, line, "dependency", id_) for id_ in cells["dependency"].split(",")]
    question = GraphQuestion(
        number, category, cells["question_natural_language"], tuple(id_ for id_ in dependencies if id_)
    )
    return _Row(line, cells["item_id"], cells["text"].strip(), question)


def _parse_integer(path: Path, line: int, name: str, text: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text):
        raise DataError(
            f"{path}, line {line}: {name} has {text.strip()!r:.80}, which is not an integer",
            "write ids as 1, 2, …, separated by commas",
        )
    return int(text)
