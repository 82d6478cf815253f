"""Signals that stop a run: it finishes its step and saves it."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


class StopSignals:
    """SIGTERM and SIGINT of a run.

    received   number of the signal that arrived; 0 for none
    interrupt  whether a signal stops the run at once, as during compilation, which may take minutes
    """

    def __init__(self) -> None:
        self.received, self.interrupt = 0, False

    @contextlib.contextmanager
    def handle(self) -> Iterator[None]:
        """Note the first signal. A second one gets the default handling."""

        def note(number: int, _frame: Any) -> None:
            if self.interrupt:
                raise KeyboardInterrupt
            self.received = number
            signal.signal(number, old[number])

        old: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for number in old:
                signal.signal(number, note)
        except ValueError:  # not the main thread: handlers cannot be set and signals do not arrive
            old = {}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
