"""Bars for what takes more than two seconds, on a terminal only."""

from typing import Any

from tqdm import tqdm

PATIENCE = 2.0  # seconds


def bar(what: str, total: float | None, unit: str = "B") -> Any:
    """A bar to be updated as work goes on; nothing is drawn where nobody looks."""
    return tqdm(
        total=total, desc=what, unit=unit, unit_scale=unit == "B", delay=PATIENCE, disable=None, leave=False, miniters=1
    )
