"""Learning rate schedules. Each gives a factor on the peak rate as a pure function of the step.

Steps count from 0; step s is the step about to be taken. Warmup is linear, (s + 1) / (warmup_steps + 1): the first step
has a rate above 0, and step `warmup_steps` has the peak rate. Decaying schedules reach `min_lr_ratio` at step `steps`,
the first step after the run, and stay there.
"""

import math
from collections.abc import Callable
from typing import Literal

from vitrail.config import Config, Fraction, NonNegativeInt
from vitrail.errors import ConfigError

DecayCurve = Literal["linear", "cosine", "sqrt"]

DECAY_CURVES: dict[DecayCurve, Callable[[float], float]] = {
    # from 1 at x = 0 to 0 at x = 1
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "sqrt": lambda x: 1 - math.sqrt(x),  # the best curve for WSD in Hägele et al. 2024
}


class _BaseSchedule(Config, tag_field="kind"):
    """Base class. `lr_factor` is the fraction of the peak rate at a step of a run of `steps` steps.

    warmup_steps  steps over which the rate rises linearly from zero
    """

    warmup_steps: NonNegativeInt = 0

    def check_length(self, steps: int) -> None:
        """Raise if the run is too short for the schedule."""
        if self.warmup_steps > steps:
            raise ConfigError(
                f"{self.warmup_steps} warmup steps do not fit a run of {steps} steps", "reduce warmup_steps"
            )

    def lr_factor(self, step: int, steps: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return self._factor_after_warmup(step, steps)

    def _factor_after_warmup(self, step: int, steps: int) -> float:
        """Return the factor at a step after the warmup."""
        return 1.0


class _DecayingSchedule(_BaseSchedule):
    """Schedule that decays to a fraction of the peak rate.

    min_lr_ratio  last rate as a fraction of the peak rate
    """

    min_lr_ratio: Fraction = 0.0

    def _decay(self, tail: DecayCurve, step: int, first: int, last: int) -> float:
        """Decay from 1 at step `first` to `min_lr_ratio` at step `last`, and stay there."""
        progress = float(step >= last) if step >= last or step <= first else (step - first) / (last - first)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * DECAY_CURVES[tail](progress)


class ConstantSchedule(_BaseSchedule, tag="constant"):
    """Constant rate after the warmup."""


class LinearSchedule(_DecayingSchedule, tag="linear"):
    """Linear decay after the warmup."""

    def _factor_after_warmup(self, step: int, steps: int) -> float:
        return self._decay("linear", step, self.warmup_steps, steps)


class CosineSchedule(_DecayingSchedule, tag="cosine"):
    """Cosine decay after the warmup."""

    def _factor_after_warmup(self, step: int, steps: int) -> float:
        return self._decay("cosine", step, self.warmup_steps, steps)


class WSDSchedule(_DecayingSchedule, tag="wsd", kw_only=True):
    """Warmup-stable-decay: constant until the decay. A longer run can resume before the decay.

    decay_steps  steps of the decay at the end
    decay_curve  shape of the decay
    """

    decay_steps: NonNegativeInt
    decay_curve: DecayCurve = "linear"

    def check_length(self, steps: int) -> None:
        if self.warmup_steps + self.decay_steps > steps:
            raise ConfigError(
                f"{self.warmup_steps} warmup and {self.decay_steps} decay steps do not fit a run of {steps} steps",
                "reduce one of them",
            )

    def _factor_after_warmup(self, step: int, steps: int) -> float:
        return self._decay(self.decay_curve, step, steps - self.decay_steps, steps)


Schedule = ConstantSchedule | LinearSchedule | CosineSchedule | WSDSchedule
