"""What runs over numbers of tokens say together: which kinds of question grow faster, and what being told helps.

A run is tested on several kinds and in several ways, so comparisons are made run by run, and what all scores of a run
share drops out. Runs of one seed, or of one number of tokens, are not independent of each other, so that an interval
counts neither twice: exponents are of means over seeds, a number of tokens each, and gains of means over tokens, a seed
each. All runs are asked the same.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import NamedTuple, Self

import numpy as np

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.evals.shares import Share
from vitrail.lab.scaling import Law, fit
from vitrail.lab.scores import Column
from vitrail.lab.student import half_width

LEAST = 3  # numbers of tokens that a law needs
Z = 1.959964  # an interval of 95 %, where values are many


class Point(Config):
    """The share of `of` questions of a kind that one run answered. `way` is how the tokens were made, `blind` what
    reading the questions alone would have answered."""

    way: str
    tokens: int
    seed: int
    kind: str
    value: float
    of: int
    blind: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.value <= 1 and 0 <= self.blind < 1) or self.tokens < 1 or self.of < 1:  # nor is NaN
            raise ConfigError(
                f"{self.kind}, {self.way}: {self.value:g} of {self.of} questions with {self.tokens} tokens, "
                f"{self.blind:g} blindly",
                "a score is a share of a question or more, with a token or more",
            )

    @property
    def share(self) -> Share:
        return Share(round(self.value * self.of), self.of)

    @property
    def above(self) -> float:
        """The share of what cannot be guessed."""
        return (self.value - self.blind) / (1 - self.blind)


class Contrast(Config):
    """A difference, its interval of 95 %, and how many independent values it is from. `over` says what these are. One
    that was declared before the runs has a verdict; of many others some would be told from 0 by chance."""

    value: float
    low: float
    high: float
    of: int
    over: str
    declared: bool = False

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.value, self.low, self.high))):
            raise ConfigError(f"a difference of {self.value} in [{self.low}, {self.high}]", "give finite ones")

    @classmethod
    def mean(cls, values: Sequence[float], over: str) -> Self:
        half = half_width(values)
        return cls(value=mean(values), low=mean(values) - half, high=mean(values) + half, of=len(values), over=over)

    @property
    def sign(self) -> str:
        if not self.declared:
            return ""
        return "below 0" if self.high < 0 else "above 0" if self.low > 0 else "not told from 0"

    @property
    def told(self) -> str:
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"

    def __str__(self) -> str:
        return f"{self.told} of {self.of} {self.over}" + f": {self.sign}" * self.declared


Scores = dict[tuple[int, int], Point]
"""(tokens, seed) → the score of that run"""


def scores(points: Sequence[Point], way: str, kind: str) -> Scores:
    found = {(p.tokens, p.seed): p for p in points if (p.way, p.kind) == (way, kind)}
    return dict(sorted(found.items()))


# ---- laws -------------------------------------------------------------------------------------------------------


def column(points: Sequence[Point], way: str, kind: str) -> Column:
    """Geometric means over seeds. A number of tokens at which a run had no hit has no logarithm, and is left out."""
    found = scores(points, way, kind)
    return _means({run: point.value for run, point in found.items()})


def law(points: Sequence[Point], way: str, kind: str) -> Law | None:
    """S = c/n^α through means over seeds; None of fewer than three numbers of tokens."""
    found = column(points, way, kind)
    return fit(*found) if len(found.n) >= LEAST else None


def as_scored(point: Point) -> float:
    return point.value


def above_chance(point: Point) -> float:
    return point.above


def steeper(
    points: Sequence[Point], way: str, kind: str, than: str, by: Callable[[Point], float] = above_chance
) -> Contrast | None:
    """α of one kind less α of another: the exponent of the ratio of their scores in the same runs, whose logarithms are
    averaged over seeds. Numbers of tokens at which a run scores nothing, above what is guessed unless said otherwise,
    are left out; None where fewer than three remain."""
    ours, theirs = (scores(points, way, each) for each in (kind, than))
    pairs = {run: (by(ours[run]), by(theirs[run])) for run in ours if run in theirs}
    found = _means({run: a / b if a > 0 and b > 0 else 0.0 for run, (a, b) in pairs.items()})
    if len(found.n) < LEAST:
        return None
    ratio = fit(*found)
    low, high = ratio.intervals["alpha"]
    return Contrast(value=ratio.alpha, low=low, high=high, of=len(found.n), over="numbers of tokens")


class Asked(NamedTuple):
    """One kind's questions, each asked with every number of tokens, and what reading them alone would have."""

    hits: Mapping[int, Sequence[bool]]
    blind: float

    def told(self, tokens: int) -> bool:
        """Whether the score is above the guess by its interval."""
        return Share(sum(self.hits[tokens]), len(self.hits[tokens])).interval[0] > self.blind


def steeper_by_questions(ours: Asked, theirs: Asked) -> Contrast | None:
    """α of one kind less α of another, both of scores above chance, with the interval that other questions would give.

    The numbers of tokens are as they are, and need lie on no law. Those at which both kinds are told from a guess are
    taken; None of fewer than three. A slope is a sum of logarithms of shares: to first order each question moves it by
    an amount of its own, and its variance is the sum of their squares. No two questions are of one scene."""
    tokens = [n for n in ours.hits if n in theirs.hits and ours.told(n) and theirs.told(n)]
    if len(tokens) < LEAST:
        return None
    (a, moves), (b, others) = (_slope(one, tokens) for one in (ours, theirs))
    value, half = b - a, Z * math.sqrt(float(moves @ moves + others @ others))  # α is the slope's negative
    over = f"questions, {', '.join(map(str, tokens))} tokens"
    return Contrast(value=value, low=value - half, high=value + half, of=len(moves) + len(others), over=over)


def _slope(asked: Asked, tokens: Sequence[int]) -> tuple[float, np.ndarray]:
    """Of ln(score above chance) over ln n, by least squares; and by how much each question (Q,) moves it."""
    hits = np.array([asked.hits[n] for n in tokens], dtype=float)  # (T, Q)
    share, x = hits.mean(1), np.log(tokens)
    weight = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    moves = (weight / (share - asked.blind)) @ (hits - share[:, None]) / hits.shape[1]
    return float(weight @ np.log(share - asked.blind)), moves


def _means(values: dict[tuple[int, int], float]) -> Column:
    """(tokens, seed) → a value; geometric means by tokens, of those where all are positive"""
    by: dict[int, list[float]] = {}
    for (n, _), value in values.items():
        by.setdefault(n, []).append(value)
    kept = {n: math.exp(mean(map(math.log, some))) for n, some in sorted(by.items()) if min(some) > 0}
    return Column(tuple(map(float, kept)), tuple(kept.values()))


# ---- gains ------------------------------------------------------------------------------------------------------


def gain(
    points: Sequence[Point], way: str, over: str, kinds: Sequence[str], less: Sequence[str] = ()
) -> Contrast | None:
    """What one way scores over another, mean over kinds and tokens, Student's over seeds; `less` the same of other
    kinds. Of numbers of tokens that every seed has; None of fewer than two seeds, or no such number."""
    found = [_gains(points, way, over, kind) for kind in kinds]
    others = [_gains(points, way, over, kind) for kind in less]
    runs = set.intersection(*(set(each) for each in (*found, *others))) if found else set()
    seeds = sorted({seed for _, seed in runs})
    tokens = [n for n in sorted({n for n, _ in runs}) if all((n, seed) in runs for seed in seeds)]
    if len(seeds) < 2 or not tokens:
        return None

    def one(run: tuple[int, int]) -> float:
        return mean(g[run] for g in found) - (mean(g[run] for g in others) if others else 0.0)

    return Contrast.mean([mean(one((n, seed)) for n in tokens) for seed in seeds], "seeds")


def _gains(points: Sequence[Point], way: str, over: str, kind: str) -> dict[tuple[int, int], float]:
    ours, theirs = (scores(points, each, kind) for each in (way, over))
    return {run: ours[run].value - theirs[run].value for run in ours if run in theirs}


# ---- a table ----------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A kind of question in one way: tokens → the mean over seeds, and its law where there is one. `within` is the most
    that a run's share lies from an end of its interval over questions."""

    kind: str
    way: str
    means: dict[int, float]
    law: Law | None
    blind: float
    within: float

    @property
    def alpha(self) -> str:
        if self.law is None:
            return "–"
        return "{:+.4f} [{:+.4f}, {:+.4f}]".format(self.law.alpha, *self.law.intervals["alpha"])


def lines(points: Sequence[Point]) -> list[Line]:
    """All of them, kind by kind."""
    kinds, ways = (list(dict.fromkeys(getattr(p, name) for p in points)) for name in ("kind", "way"))
    found = []
    for kind in kinds:
        for way in ways:
            there, by = scores(points, way, kind), dict[int, list[float]]()
            for (n, _), point in there.items():
                by.setdefault(n, []).append(point.value)
            if by:
                means = {n: mean(some) for n, some in by.items()}
                blind = mean(point.blind for point in there.values())
                within = max(abs(end - p.value) for p in there.values() for end in p.share.interval)
                found.append(Line(kind, way, means, law(points, way, kind), blind, within))
    return found


def panels(found: Sequence[Line]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Kind → way → (tokens, share), to draw."""
    drawn: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for line in found:
        drawn.setdefault(line.kind, {})[line.way] = list(line.means.items())
    return drawn
