"""What runs over numbers of tokens say together: which kinds of question grow faster, and what being told helps.

A run is tested on several kinds and in several ways, so comparisons are made run by run, and what all scores of a run
share drops out. Intervals are Student's over runs, which differ in seed and number of tokens; all are asked the same.
"""

from collections.abc import Sequence
from statistics import mean
from typing import Self

from vitrail.config import Config
from vitrail.errors import DataError
from vitrail.lab.scaling import Law, fit
from vitrail.lab.scores import Column
from vitrail.lab.student import half_width


class Point(Config):
    """The share of `of` questions of a kind that one run answered. `way` is how the tokens were made."""

    way: str
    tokens: int
    seed: int
    kind: str
    value: float
    of: int

    @property
    def positive(self) -> float:
        """The share or, of none, half a hit: laws are of logarithms."""
        return max(self.value, 0.5 / self.of)


class Contrast(Config):
    """A difference, its interval of 95 %, and how many runs or pairs of runs it is from."""

    value: float
    low: float
    high: float
    of: int

    @classmethod
    def mean(cls, values: Sequence[float]) -> Self:
        half = half_width(values)
        return cls(value=mean(values), low=mean(values) - half, high=mean(values) + half, of=len(values))

    @property
    def sign(self) -> str:
        return "below 0" if self.high < 0 else "above 0" if self.low > 0 else "not told from 0"

    def __str__(self) -> str:
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}] of {self.of}: {self.sign}"


Scores = dict[tuple[int, int], Point]
"""(tokens, seed) → the score of that run"""


def scores(points: Sequence[Point], way: str, kind: str) -> Scores:
    found = {(p.tokens, p.seed): p for p in points if (p.way, p.kind) == (way, kind)}
    return dict(sorted(found.items()))


def column(points: Sequence[Point], way: str, kind: str) -> Column:
    """All runs of one way in one kind, for a law."""
    found = scores(points, way, kind)
    return Column(tuple(float(n) for n, _ in found), tuple(p.positive for p in found.values()))


def law(points: Sequence[Point], way: str, kind: str) -> Law | None:
    """S = c/n^α through all runs; None of fewer than three numbers of tokens."""
    found = column(points, way, kind)
    return fit(*found) if len(set(found.n)) > 2 else None


def steeper(points: Sequence[Point], way: str, kind: str, than: str) -> Contrast:
    """α of one kind less α of another: the exponent of the ratio of their scores, run by run."""
    ours, theirs = (scores(points, way, each) for each in (kind, than))
    both = [run for run in ours if run in theirs]
    if len({n for n, _ in both}) < 3:
        raise DataError(f"{way}: {kind} and {than} were not both tested at three numbers of tokens", "test more")
    ratio = fit([float(n) for n, _ in both], [ours[run].positive / theirs[run].positive for run in both])
    low, high = ratio.intervals["alpha"]
    return Contrast(value=ratio.alpha, low=low, high=high, of=len(both))


def gain(points: Sequence[Point], way: str, over: str, kinds: Sequence[str], less: Sequence[str] = ()) -> Contrast:
    """What one way scores over another, mean over kinds and runs; `less` the same of other kinds."""
    found = [_gains(points, way, over, kind) for kind in kinds]
    others = [_gains(points, way, over, kind) for kind in less]
    runs = [run for run in found[0] if all(run in each for each in (*found, *others))]
    if len(runs) < 2:
        raise DataError(f"{way} and {over} have {len(runs)} runs in common", "an interval needs two: test more")
    return Contrast.mean([mean(g[r] for g in found) - (mean(g[r] for g in others) if others else 0.0) for r in runs])


def _gains(points: Sequence[Point], way: str, over: str, kind: str) -> dict[tuple[int, int], float]:
    ours, theirs = (scores(points, each, kind) for each in (way, over))
    return {run: ours[run].value - theirs[run].value for run in ours if run in theirs}
