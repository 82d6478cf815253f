"""Progress over steps that are named as they begin."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.tour import Step


@contextmanager
def steps(total: int) -> "Iterator[Step]":
    """A bar over so many steps, each of which may tell how far it is."""
    from tqdm import tqdm

    form = "{percentage:3.0f}% {bar} {elapsed} {desc}"
    with tqdm(total=float(total), file=sys.stderr, disable=None, bar_format=form, leave=False) as bar:
        begun = 0

        def step(what: str) -> Callable[[int, int], Any]:
            nonlocal begun
            first, begun = begun, begun + 1
            bar.set_description_str(what)
            bar.update(first - bar.n)
            return lambda done, of: bar.update(first + done / of - bar.n)

        yield step
