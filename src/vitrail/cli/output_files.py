"""Output files of commands."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitrail.errors import VitrailError


def check_writable(path: Path | None, option: str = "--json") -> None:
    """Refuse a file that cannot be written, before the computation starts. Existing content is not changed."""
    if path is None:
        return
    with _handle_write_errors(path, option):
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()


def write_json_with_origin(path: Path, data: dict[str, Any], device: str = "cpu", *, quiet: bool = False) -> None:
    """Write data as JSON with its origin: command, commit, device and date. `quiet` does not print the path."""
    from vitrail.hub.safetensors_files import write_json
    from vitrail.lab.origin import collect_origin

    with _handle_write_errors(path, "--json"):
        write_json(path, {"origin": collect_origin(command_line(), device), **data})
    if not quiet:
        print(f"→ {path}")


def command_line() -> str:
    """Return the command line, with absolute paths shortened to file names."""
    program = Path(sys.argv[0])
    is_experiment = program.name == "__main__.py" and program.parent.parent.name == "experiments"
    start = ["python", "-m", f"experiments.{program.parent.name}"] if is_experiment else ["vitrail"]
    return shlex.join([*start, *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])])


@contextmanager
def _handle_write_errors(path: Path, option: str) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise VitrailError(f"{path} cannot be written: {error.strerror}", f"give another path with {option}") from error
