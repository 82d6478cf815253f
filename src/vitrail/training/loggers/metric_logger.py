"""Interface of loggers, and their selection for a run."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Protocol

from vitrail.errors import ConfigError
from vitrail.registry import LOGGERS


class MetricLogger(Protocol):
    """Destination of metrics. `@LOGGERS.register("name")` registers a class.

    package  package that must be installed; None if there is none
    """

    package: ClassVar[str | None]

    def __init__(self, folder: Path, name: str, start_step: int):
        """Open the log of stage `name` in the run `folder`. A resumed stage writes all steps after `start_step`."""
        ...

    def write_row(self, step: int, values: dict[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def select_loggers(names: Sequence[str] | None = None) -> dict[str, type[MetricLogger]]:
    """Return loggers by name. Default: all whose package is installed."""
    chosen: dict[str, type[MetricLogger]] = {name: LOGGERS[name] for name in (LOGGERS if names is None else names)}
    missing = {name: kind.package for name, kind in chosen.items() if kind.package and find_spec(kind.package) is None}
    if names is not None and missing:
        name, package = next(iter(missing.items()))
        raise ConfigError(f"the logger {name} needs the package {package}", f"pip install {package}")
    return {name: kind for name, kind in chosen.items() if name not in missing}
