"""Files of results: where their numbers come from, and the numbers by variant, test, score and seed."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.errors import DataError

Values = Mapping[tuple[str, str, str], Mapping[int, float]]
"""(variant, test, score) → seed → value: what a sweep's table says."""
_Cell = tuple[str, str, str, int, float]


class Kept(NamedTuple):
    origin: Mapping[str, Any]
    values: Values


def read_data(file: Path) -> Any:
    """What a file of results holds."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}", "run what writes it first") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is no JSON: {error}", "write it again") from None


def read_kept(file: Path) -> Kept:
    """A sweep's table, bare or with its origin beside it; or tests of folders NAME-SEED, which are variants too."""
    data = read_data(file)
    data = data if isinstance(data, dict) else {"table": data}
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    try:
        for variant, test, score, seed, value in (*_of_table(data), *_of_tests(data)):
            found.setdefault((variant, test, score), {})[seed] = value
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file} is no table of a sweep: {error!r}", "write it again, with vitrail sweep") from None
    return Kept(data.get("origin", {}), found)


def _of_table(data: Mapping[str, Any]) -> Iterator[_Cell]:
    for row in data.get("table", ()):
        for seed, value in row["values"].items():
            yield row["variant"], row["test"], row["score"], int(seed), float(value)


def _of_tests(data: Mapping[str, Any]) -> Iterator[_Cell]:
    for test, models in data.get("evals", {}).items():
        for name, scores in models.items():
            variant, dash, seed = name.rpartition("-")
            if dash and seed.isdecimal():
                for score, row in scores.get("scores", scores).items():
                    yield variant, test, score, int(seed), float(row["value"])


def read_several(files: list[Path]) -> Kept | None:
    """What several files say together, with the origin of each under its name; None where one is not there yet."""
    if not all(file.is_file() for file in files):
        return None
    every = {file.stem: read_kept(file) for file in files}
    values = {key: seeds for one in every.values() for key, seeds in one.values.items()}
    return Kept({name: one.origin for name, one in every.items()}, values)
