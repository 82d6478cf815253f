"""Files of results for the report: known by their keys, read before anything is shown, named where they are broken."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.errors import DataError, VitrailError
from vitrail.lab.kept import read_data

KINDS = {
    "speed": (("origin", "figures"),),
    "sweep": (("table",),),
    "training": (("curve",), ("curves",)),
    "rates": (("runs",), ("suite", "rows")),
    "experiment": (("contrasts", "laws", "scores"),),
    "divergence": (("lambda", "columns"),),
    "information": (("lines", "model"),),
}
"""Kind → the keys that tell it, any of several sets."""


class Files(NamedTuple):
    """The folder of results, and kind → file → what it holds."""

    results: Path
    found: Mapping[str, Mapping[Path, Any]]


def kind_of(data: Any) -> str:
    """What a file of results holds, by its own keys."""
    keys = data.keys() if isinstance(data, dict) else ()
    for kind, known in KINDS.items():
        if any(all(key in keys for key in some) for some in known):
            return kind
    return ""


def read_files(results: Path, speed: Path) -> Files:
    """Every file of both folders, by kind; a folder that is not there has none."""
    found: dict[str, dict[Path, Any]] = {kind: {} for kind in (*KINDS, "")}
    for folder in (results, speed):
        for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            data = read_data(file)
            found[kind_of(data)][file] = data
    return Files(results, found)


def each(kind: str) -> Callable[[Callable[[Path, Any], Sequence[str]]], Callable[[Files], list[str] | None]]:
    """Show every file of a kind, one after another; one that is not as it should be is named."""

    def wrap(show: Callable[[Path, Any], Sequence[str]]) -> Callable[[Files], list[str] | None]:
        @wraps(show)
        def every(files: Files) -> list[str] | None:
            body: list[str] = []
            for file, data in files.found[kind].items():
                body += checked(file, lambda file=file, data=data: show(file, data))
            return body or None

        return every

    return wrap


def checked(file: Path, show: Callable[[], Sequence[str]]) -> Sequence[str]:
    try:
        return show()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, VitrailError) as error:
        why = error.problem if isinstance(error, VitrailError) else repr(error)
        raise DataError(f"{file} is no file of results as they are kept: {why}", "write it again, or move it") from None
