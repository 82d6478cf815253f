"""A progress bar over named steps."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.demo import StepLogger


@contextmanager
def progress_over_steps(count: int) -> "Iterator[StepLogger]":
    """Show a progress bar over steps; yields a function that starts a step and returns its progress callback."""
    from tqdm import tqdm

    form = "{percentage:3.0f}% {bar} {elapsed} {desc}"
    with tqdm(total=float(count), file=sys.stderr, disable=None, bar_format=form, leave=False) as bar:
        num_started = 0

        def step(description: str) -> Callable[[int, int], Any]:
            nonlocal num_started
            first, num_started = num_started, num_started + 1
            bar.set_description_str(description)
            bar.update(first - bar.n)
            return lambda done, total: bar.update(first + done / total - bar.n)

        yield step
