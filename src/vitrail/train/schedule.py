"""How the learning rate moves over a run: a row a shape, each a pure function of the step.

Steps count from 0; step s is the one about to be taken. Warm-up rises in a straight line, (s + 1) / (warmup + 1), so
that the first step already learns and the peak falls on step `warmup`, where what follows begins. Shapes that decay
reach `end` at step `steps`, which is the first that is not taken; beyond it they stay there.
"""

import math
from collections.abc import Callable
from typing import Literal

from vitrail.config import Config
from vitrail.errors import ConfigError

Tail = Literal["linear", "cosine", "sqrt"]

TAILS: dict[Tail, Callable[[float], float]] = {
    # 1 at 0, 0 at 1
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "sqrt": lambda x: 1 - math.sqrt(x),  # the best tail for WSD in Hägele et al. 2024
}


class _Schedule(Config, tag_field="kind"):
    """`warmup` steps to the peak; `scale` is the fraction of the peak rate at a step of a run of `steps`."""

    warmup: int = 0

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ConfigError(f"a warm-up of {self.warmup} steps cannot be", "use 0 for none")

    def check(self, steps: int) -> None:
        """Refuse a run too short for the schedule."""
        if self.warmup > steps:
            raise ConfigError(f"a warm-up of {self.warmup} steps does not fit a run of {steps}", "shorten the warm-up")

    def scale(self, step: int, steps: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        return self._after(step, steps)

    def _after(self, step: int, steps: int) -> float:
        """From the end of the warm-up on."""
        return 1.0


class _Decaying(_Schedule):
    """`end` is the fraction of the peak that is left at the end."""

    end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.end <= 1:
            raise ConfigError(f"a schedule cannot end at {self.end} of its peak", "use a fraction, 0 … 1")

    def _fall(self, tail: Tail, step: int, first: int, last: int) -> float:
        """From 1 at step `first` down to `end` at step `last`, and on."""
        done = float(step >= last) if step >= last or step <= first else (step - first) / (last - first)
        return self.end + (1 - self.end) * TAILS[tail](done)


class Constant(_Schedule, tag="constant"):
    """Warm-up, then level."""


class Linear(_Decaying, tag="linear"):
    """Warm-up, then down a straight line."""

    def _after(self, step: int, steps: int) -> float:
        return self._fall("linear", step, self.warmup, steps)


class Cosine(_Decaying, tag="cosine"):
    """Warm-up, then half a cosine."""

    def _after(self, step: int, steps: int) -> float:
        return self._fall("cosine", step, self.warmup, steps)


class WSD(_Decaying, tag="wsd", kw_only=True):
    """Warm-up, stable, decay: level until the last `decay` steps, so that a run can be prolonged from before them."""

    decay: int
    tail: Tail = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay < 0:
            raise ConfigError(f"a decay of {self.decay} steps cannot be", "use 0 for none")

    def check(self, steps: int) -> None:
        if self.warmup + self.decay > steps:
            raise ConfigError(
                f"{self.warmup} steps of warm-up and {self.decay} of decay do not fit a run of {steps}",
                "shorten one of them",
            )

    def _after(self, step: int, steps: int) -> float:
        return self._fall(self.tail, step, steps - self.decay, steps)


Schedule = Constant | Linear | Cosine | WSD
