"""Claims of published papers, tested at small scale: the compared variants, the effect over seeds and the verdict.

A claim is a row of data/claims.toml. It states the range of the effect: the score of the first variant minus the score
of the second, per seed.
"""

import math
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Literal, NamedTuple

from experiments.results_files import ScoreTable
from vitrail.config import Config
from vitrail.errors import ConfigError, DataError, suggest_name
from vitrail.lab.student_t import student_t_quantile

MIN_SEEDS = 3
VERDICT_RULE = (
    "The effect is the score of the first variant minus that of the second, per seed. Its interval is Student's 95 % "
    "interval over seeds. A claim states a range for the effect. It holds if the whole interval lies inside the range, "
    "and does not hold if the whole interval lies outside. Otherwise it is undecided, as it is with fewer than "
    f"{MIN_SEEDS} seeds or a non-finite effect. A claim with a baseline (chance level plus a margin) is undecided "
    "unless both variants beat the baseline. A claim that two variants are equal must have a baseline."
)
Verdict = Literal["holds", "does not hold", "undecided"]


class Unit(NamedTuple):
    scale: float
    digits: int
    level_unit: str  # unit of a score; may differ from the unit of a difference
    direction: Literal[1, -1]  # 1: higher is better, -1: lower is better


UNITS = {
    "points": Unit(100, 1, "%", 1),
    "dB": Unit(1, 2, "dB", 1),
    "nats": Unit(1, 4, "nats", -1),
    "FD": Unit(1, 0, "FD", -1),
}


class Claim(Config):
    """One claim about the difference between two variants.

    above, below  ends of the claimed range of the effect, in units of the score; one may be missing
    baseline      both variants' means must beat it for the effect to count; required if both ends are given
    results       names of the results files; default: the name of the sweep
    commands      the commands that produced the results, if no sweep did
    """

    name: str
    description: str
    source: str
    published: str
    first: str
    second: str
    test: str
    score: str
    unit: Literal["points", "dB", "nats", "FD"]
    above: float | None = None
    below: float | None = None
    baseline: float | None = None
    sweep: str | None = None
    results: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.above is None and self.below is None:
            raise ConfigError(f"claim {self.name!r} has no range", "set above, below or both")
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ConfigError(
                f"claim {self.name!r}: above {self.above} is not less than below {self.below}", "swap them"
            )
        if self.above is not None and self.below is not None and self.baseline is None:
            raise ConfigError(
                f"claim {self.name!r} states that two variants are equal, and has no baseline",
                "set baseline: the chance level plus a margin",
            )
        if (self.sweep is None) != bool(self.commands) or not self.result_files:
            raise ConfigError(f"claim {self.name!r} has nothing to run", "set either sweep, or commands and results")

    @property
    def result_files(self) -> tuple[str, ...]:
        return self.results or (() if self.sweep is None else (self.sweep,))

    @property
    def claimed_range(self) -> str:
        parts = ((">", self.above), ("<", self.below))
        return " and ".join(f"{sign} {format_difference(end, self.unit)}" for sign, end in parts if end is not None)


class ClaimResult(NamedTuple):
    """A claim with its measured scores. `interval` is None with a single seed or a non-finite effect."""

    claim: Claim
    first_mean: float  # means
    second_mean: float
    effects: dict[int, float]  # seed → difference

    @property
    def effect(self) -> float:
        return mean(self.effects.values())

    @property
    def nonfinite_seeds(self) -> list[int]:
        """Seeds with a non-finite effect, such as those of a diverged run."""
        return [seed for seed, effect in self.effects.items() if not math.isfinite(effect)]

    @property
    def seed_summary(self) -> str:
        """Number of seeds and the non-finite ones, as text."""
        n = len(self.effects)
        named = f", not finite: seed {', '.join(map(str, self.nonfinite_seeds))}" if self.nonfinite_seeds else ""
        return f"{n} seed{'s' if n > 1 else ''}{named}"

    @property
    def interval(self) -> tuple[float, float] | None:
        n = len(self.effects)
        if n < 2 or self.nonfinite_seeds:
            return None
        half = student_t_quantile(0.975, n - 1) * stdev(self.effects.values()) / math.sqrt(n)
        return self.effect - half, self.effect + half

    @property
    def variants_below_baseline(self) -> list[str]:
        """Variants that do not beat the baseline."""
        claim, better = self.claim, UNITS[self.claim.unit].direction
        sides = {claim.first: self.first_mean, claim.second: self.second_mean}
        return [
            name for name, side in sides.items() if claim.baseline is not None and better * (side - claim.baseline) <= 0
        ]

    @property
    def verdict(self) -> Verdict:
        if len(self.effects) < MIN_SEEDS or self.interval is None or self.variants_below_baseline:
            return "undecided"
        low, high = self.interval
        above = -math.inf if self.claim.above is None else self.claim.above
        below = math.inf if self.claim.below is None else self.claim.below
        if above < low and high < below:
            return "holds"
        return "does not hold" if high <= above or below <= low else "undecided"

    def __str__(self) -> str:
        unit = self.claim.unit
        few = f" ({self.seed_summary})" if len(self.effects) < MIN_SEEDS or self.nonfinite_seeds else ""
        effect = f"{format_difference(self.effect, unit, show_sign=True)} {format_interval(self.interval, unit)}"
        return f"{effect}: {self.verdict}{few}{self.baseline_note}"

    @property
    def baseline_note(self) -> str:
        """Variants that do not beat the baseline, as text."""
        if not self.variants_below_baseline or self.claim.baseline is None:
            return ""
        names = ", ".join(self.variants_below_baseline)
        return f", not better than {format_score(self.claim.baseline, self.claim.unit)}: {names}"

    @property
    def mean_scores(self) -> str:
        """Mean scores of both variants, as text."""
        claim = self.claim
        means = ((claim.first, self.first_mean), (claim.second, self.second_mean))
        return "; ".join(f"{variant}: {format_score(mean, claim.unit)}" for variant, mean in means)


def format_difference(value: float, unit: str, *, show_sign: bool = False) -> str:
    """Format a difference with its unit."""
    scale, digits, *_ = UNITS[unit]
    return f"{value * scale:{'+' if show_sign else ''}.{digits}f} {unit}".replace("-", "−")


def format_score(value: float, unit: str) -> str:
    """Format a score with its unit."""
    return format_difference(value, unit).removesuffix(unit) + UNITS[unit].level_unit


def format_interval(interval: tuple[float, float] | None, unit: str) -> str:
    if interval is None:
        return "[no interval]"
    scale, digits, *_ = UNITS[unit]
    return "[{:+.{d}f}, {:+.{d}f}]".format(*(x * scale for x in interval), d=digits).replace("-", "−")


@cache
def load_claims() -> dict[str, Claim]:
    """Load all claims, by name."""
    text = Path(__file__).with_name("claims.toml").read_text(encoding="utf-8")
    found = [Claim.from_dict(row) for row in tomllib.loads(text)["claims"]]
    named = {claim.name: claim for claim in found}
    if len(named) < len(found):
        raise ConfigError("claims.toml has two claims of the same name", "rename one")
    return named


def get_claim(name: str) -> Claim:
    if name not in load_claims():
        raise ConfigError(f"no claim is named {name!r}", suggest_name(name, load_claims()))
    return load_claims()[name]


def evaluate_claim(claim: Claim, scores: ScoreTable) -> ClaimResult:
    """Compare a claim with measured scores. Seeds that only one variant has are ignored."""
    sides = []
    for variant in (claim.first, claim.second):
        if not (side := scores.get((variant, claim.test, claim.score))):
            raise DataError(
                f"claim {claim.name!r}: results lack score {claim.score!r} of test {claim.test!r} for {variant!r}",
                f"available variants: {_join_names(sorted({name for name, test, score in scores})) or 'nothing'}",
            )
        sides.append(side)
    first, second = sides
    seeds = sorted(set(first) & set(second))
    if not seeds:
        raise DataError(f"claim {claim.name!r}: the two variants have no common seed", "run both with the same seeds")
    effects = {seed: first[seed] - second[seed] for seed in seeds}
    return ClaimResult(claim, mean(first[seed] for seed in seeds), mean(second[seed] for seed in seeds), effects)


def _join_names(names: Sequence[str], max_names: int = 12) -> str:
    return ", ".join(names[:max_names]) + (", …" if len(names) > max_names else "")
