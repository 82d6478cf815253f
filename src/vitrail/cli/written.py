"""Files that commands write, refused before the work where they cannot be."""

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


def write_plain(path: Path, data: dict[str, Any]) -> None:
    from vitrail.hub.files import write_json

    with _writing(path, "--json"):
        write_json(path, data)
    print(f"→ {path}")


@contextmanager
def _writing(path: Path, option: str) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise VitrailError(f"{path} cannot be written: {error.strerror}", f"give another path with {option}") from error
