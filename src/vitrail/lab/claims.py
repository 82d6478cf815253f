"""Claims of the texts, re-tested in miniature: what is compared, the effect over seeds, and the verdict.

A claim is a row of data/claims.toml. It says in which range the effect lies, which is one variant's score less
another's, seed by seed.

n seeds
"""

import math
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from statistics import mean, stdev
from typing import Literal, NamedTuple

from vitrail.config import Config
from vitrail.errors import ConfigError, DataError, nearest
from vitrail.lab.kept import Values
from vitrail.lab.student import student

SEEDS = 3
RULE = (
    "The effect is the first variant's score less the second's, seed by seed; its interval is Student's of 95 % over "
    "seeds. A claim names the range that the effect lies in. It holds if the whole interval is inside that range, it "
    f"does not hold if the whole interval is outside, and it is undecided otherwise, with fewer than {SEEDS} seeds, "
    "or where a seed's effect is no finite number. A claim with a floor, by a margin better than a blind guess, is "
    "undecided unless both variants are better than that: two that have learnt nothing tell nothing. One that two are "
    "alike must have a floor."
)
Verdict = Literal["holds", "does not hold", "undecided"]


class Unit(NamedTuple):
    scale: float
    digits: int
    level: str  # what a score is told in, where that differs from what a difference is
    better: Literal[1, -1]  # upwards or downwards


UNITS = {
    "points": Unit(100, 1, "%", 1),
    "dB": Unit(1, 2, "dB", 1),
    "nats": Unit(1, 4, "nats", -1),
    "FD": Unit(1, 0, "FD", -1),
}


class Claim(Config):
    """`above` and `below` are the ends of the range that the effect is claimed to lie in, in the score's own
    numbers; one may be missing. `floor` is what both variants' means must be better than for the effect to say
    anything; a claim with two ends, that they are alike, must have one. `results` are the files that keep what was
    measured, by default one of the sweep's name; where several commands and no sweep made them, `commands` are
    these."""

    name: str
    says: str
    source: str
    published: str
    first: str
    second: str
    test: str
    score: str
    unit: Literal["points", "dB", "nats", "FD"]
    above: float | None = None
    below: float | None = None
    floor: float | None = None
    sweep: str | None = None
    results: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.above is None and self.below is None:
            raise ConfigError(f"claim {self.name!r} claims nothing", "give above, below or both")
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ConfigError(f"claim {self.name!r}: nothing is above {self.above} and below {self.below}", "swap them")
        if self.above is not None and self.below is not None and self.floor is None:
            raise ConfigError(
                f"claim {self.name!r} says that two are alike, as two that have learnt nothing are",
                "give a floor: what a blind guess reaches, and a margin",
            )
        if (self.sweep is None) != bool(self.commands) or not self.files:
            raise ConfigError(f"claim {self.name!r} can not be run", "give a sweep, or commands and results")

    @property
    def files(self) -> tuple[str, ...]:
        return self.results or (() if self.sweep is None else (self.sweep,))

    @property
    def range(self) -> str:
        parts = ((">", self.above), ("<", self.below))
        return " and ".join(f"{sign} {told(end, self.unit)}" for sign, end in parts if end is not None)


class Found(NamedTuple):
    """A claim held against what was measured; the interval is None with a single seed or with a broken one."""

    claim: Claim
    first: float  # means
    second: float
    effects: dict[int, float]  # seed → difference

    @property
    def effect(self) -> float:
        return mean(self.effects.values())

    @property
    def broken(self) -> list[int]:
        """Seeds whose effect is no finite number, as of a run that diverged."""
        return [seed for seed, effect in self.effects.items() if not math.isfinite(effect)]

    @property
    def seeds(self) -> str:
        """How many there are, and which of them are broken, in words."""
        n = len(self.effects)
        named = f", not finite: seed {', '.join(map(str, self.broken))}" if self.broken else ""
        return f"{n} seed{'s' if n > 1 else ''}{named}"

    @property
    def interval(self) -> tuple[float, float] | None:
        n = len(self.effects)
        if n < 2 or self.broken:
            return None
        half = student(0.975, n - 1) * stdev(self.effects.values()) / math.sqrt(n)
        return self.effect - half, self.effect + half

    @property
    def blind(self) -> list[str]:
        """The variants that are no better than the floor."""
        claim, better = self.claim, UNITS[self.claim.unit].better
        sides = {claim.first: self.first, claim.second: self.second}
        return [name for name, side in sides.items() if claim.floor is not None and better * (side - claim.floor) <= 0]

    @property
    def verdict(self) -> Verdict:
        if len(self.effects) < SEEDS or self.interval is None or self.blind:
            return "undecided"
        low, high = self.interval
        above = -math.inf if self.claim.above is None else self.claim.above
        below = math.inf if self.claim.below is None else self.claim.below
        if above < low and high < below:
            return "holds"
        return "does not hold" if high <= above or below <= low else "undecided"

    def __str__(self) -> str:
        unit = self.claim.unit
        few = f" ({self.seeds})" if len(self.effects) < SEEDS or self.broken else ""
        return f"{told(self.effect, unit, sign=True)} {between(self.interval, unit)}: {self.verdict}{few}{self.floored}"

    @property
    def floored(self) -> str:
        """Who is no better than the floor, in words."""
        if not self.blind or self.claim.floor is None:
            return ""
        return f", no better than {level(self.claim.floor, self.claim.unit)}: {', '.join(self.blind)}"


def told(value: float, unit: str, *, sign: bool = False) -> str:
    """A difference in its unit, as a person reads it."""
    scale, digits, *_ = UNITS[unit]
    return f"{value * scale:{'+' if sign else ''}.{digits}f} {unit}".replace("-", "−")


def level(value: float, unit: str) -> str:
    """A score in its unit."""
    return told(value, unit).removesuffix(unit) + UNITS[unit].level


def between(interval: tuple[float, float] | None, unit: str) -> str:
    if interval is None:
        return "[no interval]"
    scale, digits, *_ = UNITS[unit]
    return "[{:+.{d}f}, {:+.{d}f}]".format(*(x * scale for x in interval), d=digits).replace("-", "−")


@cache
def claims() -> dict[str, Claim]:
    """All of them, by name."""
    text = resources.files("vitrail.lab").joinpath("data", "claims.toml").read_text(encoding="utf-8")
    found = [Claim.read(row) for row in tomllib.loads(text)["claims"]]
    named = {claim.name: claim for claim in found}
    if len(named) < len(found):
        raise ConfigError("two claims have one name", "give each its own")
    return named


def claim(name: str) -> Claim:
    if name not in claims():
        raise ConfigError(f"there is no claim {name!r}", nearest(name, claims()))
    return claims()[name]


def judge(claim: Claim, values: Values) -> Found:
    """Hold a claim against what was measured; seeds that only one of the two variants has are left out."""
    sides = []
    for variant in (claim.first, claim.second):
        if not (side := values.get((variant, claim.test, claim.score))):
            raise DataError(
                f"claim {claim.name!r}: the results have no {claim.score!r} of {claim.test!r} for {variant!r}",
                f"they have: {_some(sorted({name for name, test, score in values})) or 'nothing'}",
            )
        sides.append(side)
    first, second = sides
    seeds = sorted(set(first) & set(second))
    if not seeds:
        raise DataError(f"claim {claim.name!r}: its two variants share no seed", "run both from the same seeds")
    effects = {seed: first[seed] - second[seed] for seed in seeds}
    return Found(claim, mean(first[seed] for seed in seeds), mean(second[seed] for seed in seeds), effects)


def _some(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
