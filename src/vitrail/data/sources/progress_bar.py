"""Progress bars for work of more than two seconds, on a terminal only."""

from typing import Any

from tqdm import tqdm

BAR_DELAY_SECONDS = 2.0  # seconds


def progress_bar(description: str, total: float | None, unit: str = "B") -> Any:
    """Make a progress bar to update. Nothing is drawn without a terminal."""
    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        unit_scale=unit == "B",
        delay=BAR_DELAY_SECONDS,
        disable=None,
        leave=False,
        miniters=1,
    )
