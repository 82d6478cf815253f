"""Files that commands write, refused before the work where they cannot be."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitrail.errors import VitrailError


def check_written(path: Path | None, option: str = "--json") -> None:
    """Refuse a file that cannot be written, before there is anything to write; what it holds stays."""
    if path is None:
        return
    with _writing(path, option):
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()


def write_plain(path: Path, data: dict[str, Any], device: str = "cpu", *, quiet: bool = False) -> None:
    """Figures as JSON, with their origin: the command, the commit, the device they were computed on, the day. `quiet`
    where it is written again and again."""
    from vitrail.hub.files import write_json
    from vitrail.lab.origin import origin

    with _writing(path, "--json"):
        write_json(path, {"origin": origin(command_line(), device), **data})
    if not quiet:
        print(f"→ {path}")


def command_line() -> str:
    """As it was typed, with the names alone of files that were given by their whole paths."""
    return shlex.join(["vitrail", *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])])


@contextmanager
def _writing(path: Path, option: str) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise VitrailError(f"{path} cannot be written: {error.strerror}", f"give another path with {option}") from error
