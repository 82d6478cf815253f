"""Read results files: their origin, and scores by variant, test, score name and seed."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.errors import DataError

ORIGIN_LABELS = {"date": "", "device": "", "torch": "torch ", "commit": "commit "}
"""Keys of an origin → prefix in text."""

ScoreTable = Mapping[tuple[str, str, str], Mapping[int, float]]
"""(variant, test, score) → seed → value"""
_Cell = tuple[str, str, str, int, float]


class ResultsFile(NamedTuple):
    """Scores of a file, or of several, with their origin."""

    origin: Mapping[str, Any]
    values: ScoreTable


def read_results_json(file: Path) -> Any:
    """Read the JSON of a results file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}", "run the command that writes it first") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid JSON: {error}", "write it again") from None


def read_results_file(file: Path) -> ResultsFile:
    """Read the scores of a sweep's table, and of tests of models named VARIANT-SEED."""
    data = read_results_json(file)
    data = data if isinstance(data, dict) else {"table": data}
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    try:
        for variant, test, score, seed, value in (*_iter_sweep_cells(data), *_iter_eval_cells(data)):
            found.setdefault((variant, test, score), {})[seed] = value
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file} is not the table of a sweep: {error!r}", "write it again with vitrail sweep") from None
    return ResultsFile(data.get("origin", {}), found)


def _iter_sweep_cells(data: Mapping[str, Any]) -> Iterator[_Cell]:
    for row in data.get("table", ()):
        for seed, value in row["values"].items():
            yield row["variant"], row["test"], row["score"], int(seed), float(value)


def _iter_eval_cells(data: Mapping[str, Any]) -> Iterator[_Cell]:
    for test, models in data.get("evals", {}).items():
        for name, scores in models.items():
            variant, dash, seed = name.rpartition("-")
            if dash and seed.isdecimal():
                for score, row in scores.get("scores", scores).items():
                    yield variant, test, score, int(seed), float(row["value"])


def read_results_files(files: list[Path]) -> ResultsFile | None:
    """Read several files as one, with their origins by name. None if a file does not exist."""
    if not all(file.is_file() for file in files):
        return None
    every = {file.stem: read_results_file(file) for file in files}
    values = {key: seeds for one in every.values() for key, seeds in one.values.items()}
    return ResultsFile({name: one.origin for name, one in every.items()}, values)
