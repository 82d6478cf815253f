"""Read results files for the report, and detect their kind by their keys."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from experiments.results_files import read_results_json
from vitrail.errors import DataError, VitrailError

RESULT_KINDS = {
    "speed": (("origin", "figures"),),
    "sweep": (("table",),),
    "training": (("curve",), ("curves",)),
    "rates": (("runs",), ("suite", "rows")),
    "experiment": (("contrasts", "laws", "scores"),),
    "divergence": (("lambda", "columns"),),
    "information": (("bottlenecks", "model"),),
}
"""Kind → sets of keys; a file that has all keys of one set is of that kind."""


class ReportInputs(NamedTuple):
    """The results folder, and kind → file → data."""

    results_folder: Path
    files_by_kind: Mapping[str, Mapping[Path, Any]]


def detect_kind(data: Any) -> str:
    """Detect the kind of a results file by its keys; empty if unknown."""
    keys = data.keys() if isinstance(data, dict) else ()
    for kind, known in RESULT_KINDS.items():
        if any(all(key in keys for key in some) for some in known):
            return kind
    return ""


def read_report_inputs(results_folder: Path, speed_folder: Path) -> ReportInputs:
    """Read all JSON files of both folders, by kind. A missing folder counts as empty."""
    found: dict[str, dict[Path, Any]] = {kind: {} for kind in (*RESULT_KINDS, "")}
    for folder in (results_folder, speed_folder):
        for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            data = read_results_json(file)
            found[detect_kind(data)][file] = data
    return ReportInputs(results_folder, found)


def for_each_file(
    kind: str,
) -> Callable[[Callable[[Path, Any], Sequence[str]]], Callable[[ReportInputs], list[str] | None]]:
    """Decorate a renderer of one file so that it renders all files of a kind. Errors name the file."""

    def wrap(show: Callable[[Path, Any], Sequence[str]]) -> Callable[[ReportInputs], list[str] | None]:
        @wraps(show)
        def every(files: ReportInputs) -> list[str] | None:
            body: list[str] = []
            for file, data in files.files_by_kind[kind].items():
                body += render_checked(file, lambda file=file, data=data: show(file, data))
            return body or None

        return every

    return wrap


def render_checked(file: Path, render: Callable[[], Sequence[str]]) -> Sequence[str]:
    """Render a file, and report malformed data as a DataError that names it."""
    try:
        return render()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, VitrailError) as error:
        why = error.problem if isinstance(error, VitrailError) else repr(error)
        raise DataError(f"{file} has an unexpected format: {why}", "write it again, or move it") from None
