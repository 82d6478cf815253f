"""Compare the scores of runs over numbers of visual tokens: scaling exponents by question kind, and gains by method.

Each run is tested on several kinds of question. Comparisons are made within a run, so that effects common to all its
scores cancel. Runs that share a seed or a number of tokens are not independent. Exponents are therefore fitted to means
over seeds (one value per number of tokens), and gains to means over tokens (one value per seed). All runs answer the
same questions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import NamedTuple, Self

import numpy as np

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.evals.scores import Proportion
from vitrail.lab.scaling_law import ScalingLaw, fit_law
from vitrail.lab.score_tables import ScoreColumn
from vitrail.lab.student_t import compute_half_width

MIN_TOKEN_COUNTS = 3  # minimum numbers of tokens to fit a law
Z_95 = 1.959964  # normal quantile of a 95 % interval


class ScorePoint(Config):
    """The accuracy of one run on one kind of question.

    method  method that produced the visual tokens
    value   fraction of the `count` questions answered correctly
    blind   accuracy of the best guess from the question alone
    """

    method: str
    tokens: int
    seed: int
    kind: str
    value: float
    count: int
    blind: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.value <= 1 and 0 <= self.blind < 1) or self.tokens < 1 or self.count < 1:  # nor is NaN
            raise ConfigError(
                f"{self.kind}, {self.method}: {self.value:g} of {self.count} questions with {self.tokens} tokens, "
                f"blind score {self.blind:g}",
                "scores are in 0…1, and both questions and tokens are at least 1",
            )

    @property
    def accuracy(self) -> Proportion:
        return Proportion(round(self.value * self.count), self.count)

    @property
    def above_chance(self) -> float:
        """Score rescaled so that 0 is the blind score and 1 is perfect."""
        return (self.value - self.blind) / (1 - self.blind)


class Contrast(Config):
    """A difference with its 95 % interval over `count` independent values of the kind `over`.

    Only a contrast declared before the runs gets a verdict: among many undeclared ones some differ from 0 by chance.
    """

    value: float
    low: float
    high: float
    count: int
    over: str
    declared: bool = False

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.value, self.low, self.high))):
            raise ConfigError(
                f"non-finite difference {self.value} [{self.low}, {self.high}]", "check the scores of the runs"
            )

    @classmethod
    def from_values(cls, values: Sequence[float], over: str) -> Self:
        half = compute_half_width(values)
        return cls(value=mean(values), low=mean(values) - half, high=mean(values) + half, count=len(values), over=over)

    @property
    def sign(self) -> str:
        if not self.declared:
            return ""
        return "below 0" if self.high < 0 else "above 0" if self.low > 0 else "not different from 0"

    @property
    def interval_text(self) -> str:
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"

    def __str__(self) -> str:
        return f"{self.interval_text} of {self.count} {self.over}" + f": {self.sign}" * self.declared


ScoresByRun = dict[tuple[int, int], ScorePoint]
"""(tokens, seed) → score of that run"""


def select_scores(points: Sequence[ScorePoint], method: str, kind: str) -> ScoresByRun:
    found = {(p.tokens, p.seed): p for p in points if (p.method, p.kind) == (method, kind)}
    return dict(sorted(found.items()))


# ---- laws -------------------------------------------------------------------------------------------------------


def mean_scores(points: Sequence[ScorePoint], method: str, kind: str) -> ScoreColumn:
    """Geometric mean scores over seeds. Numbers of tokens with a zero score are skipped."""
    by_run = select_scores(points, method, kind)
    return _geometric_means({run: point.value for run, point in by_run.items()})


def fit_mean_law(points: Sequence[ScorePoint], method: str, kind: str) -> ScalingLaw | None:
    """Fit S = c/n^α to the means over seeds. None with fewer than three numbers of tokens."""
    found = mean_scores(points, method, kind)
    return fit_law(*found) if len(found.n) >= MIN_TOKEN_COUNTS else None


def get_raw_score(point: ScorePoint) -> float:
    return point.value


def get_score_above_chance(point: ScorePoint) -> float:
    return point.above_chance


def compare_exponents(
    points: Sequence[ScorePoint],
    method: str,
    kind: str,
    reference_kind: str,
    score_fn: Callable[[ScorePoint], float] = get_score_above_chance,
) -> Contrast | None:
    """Compute α of one kind of question minus α of another.

    The difference is the exponent of the ratio of their scores in the same runs, averaged over seeds as logarithms.
    `score_fn` maps a point to its score (default: above chance). Numbers of tokens with a non-positive score are
    skipped. Returns None if fewer than three remain.
    """
    ours, theirs = (select_scores(points, method, each) for each in (kind, reference_kind))
    pairs = {run: (score_fn(ours[run]), score_fn(theirs[run])) for run in ours if run in theirs}
    found = _geometric_means({run: a / b if a > 0 and b > 0 else 0.0 for run, (a, b) in pairs.items()})
    if len(found.n) < MIN_TOKEN_COUNTS:
        return None
    ratio = fit_law(*found)
    low, high = ratio.intervals["alpha"]
    return Contrast(value=ratio.alpha, low=low, high=high, count=len(found.n), over="numbers of tokens")


class QuestionHits(NamedTuple):
    """Correctness of each question of one kind at every number of tokens, and the blind score."""

    hits: Mapping[int, Sequence[bool]]
    blind: float

    def is_above_chance(self, num_tokens: int) -> bool:
        """Whether the interval of the score lies above the blind score."""
        return Proportion(sum(self.hits[num_tokens]), len(self.hits[num_tokens])).interval[0] > self.blind


def compare_exponents_by_question(first: QuestionHits, second: QuestionHits) -> Contrast | None:
    """Compute α of one kind minus α of another from scores above chance, with the sampling interval over questions.

    Only numbers of tokens at which both kinds are above chance count. Returns None with fewer than three. The numbers
    of tokens are fixed and need not follow a law. A slope is a sum of logarithms of accuracies: to first order each
    question contributes its own amount, and the variance is the sum of their squares. Questions belong to different
    scenes and are independent.
    """
    tokens = [n for n in first.hits if n in second.hits and first.is_above_chance(n) and second.is_above_chance(n)]
    if len(tokens) < MIN_TOKEN_COUNTS:
        return None
    (a, moves), (b, others) = (_fit_slope(one, tokens) for one in (first, second))
    value, half = b - a, Z_95 * math.sqrt(float(moves @ moves + others @ others))  # α is the slope's negative
    over = f"questions, {', '.join(map(str, tokens))} tokens"
    return Contrast(value=value, low=value - half, high=value + half, count=len(moves) + len(others), over=over)


def _fit_slope(question_hits: QuestionHits, tokens: Sequence[int]) -> tuple[float, np.ndarray]:
    """Fit ln(score above chance) over ln n; return the slope and the influence of each question (Q,)."""
    hits = np.array([question_hits.hits[n] for n in tokens], dtype=float)  # (T, Q)
    share, x = hits.mean(1), np.log(tokens)
    weight = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    moves = (weight / (share - question_hits.blind)) @ (hits - share[:, None]) / hits.shape[1]
    return float(weight @ np.log(share - question_hits.blind)), moves


def _geometric_means(values: dict[tuple[int, int], float]) -> ScoreColumn:
    """Map (tokens, seed) → value to geometric means per number of tokens, where all values are positive."""
    by_tokens: dict[int, list[float]] = {}
    for (n, _), value in values.items():
        by_tokens.setdefault(n, []).append(value)
    means = {n: math.exp(mean(map(math.log, group))) for n, group in sorted(by_tokens.items()) if min(group) > 0}
    return ScoreColumn(tuple(map(float, means)), tuple(means.values()))


# ---- gains ------------------------------------------------------------------------------------------------------


def compute_gain(
    points: Sequence[ScorePoint],
    method: str,
    baseline_method: str,
    kinds: Sequence[str],
    subtracted_kinds: Sequence[str] = (),
) -> Contrast | None:
    """Compute the mean gain of one method over another on some kinds, with Student's interval over seeds.

    The gain on `subtracted_kinds` is subtracted. Only numbers of tokens that every seed has count. Returns None with
    fewer than two seeds or no common number of tokens.
    """
    found = [_compute_run_gains(points, method, baseline_method, kind) for kind in kinds]
    others = [_compute_run_gains(points, method, baseline_method, kind) for kind in subtracted_kinds]
    runs = set.intersection(*(set(each) for each in (*found, *others))) if found else set()
    seeds = sorted({seed for _, seed in runs})
    tokens = [n for n in sorted({n for n, _ in runs}) if all((n, seed) in runs for seed in seeds)]
    if len(seeds) < 2 or not tokens:
        return None

    def one(run: tuple[int, int]) -> float:
        return mean(g[run] for g in found) - (mean(g[run] for g in others) if others else 0.0)

    return Contrast.from_values([mean(one((n, seed)) for n in tokens) for seed in seeds], "seeds")


def _compute_run_gains(
    points: Sequence[ScorePoint], method: str, baseline_method: str, kind: str
) -> dict[tuple[int, int], float]:
    ours, theirs = (select_scores(points, each, kind) for each in (method, baseline_method))
    return {run: ours[run].value - theirs[run].value for run in ours if run in theirs}


# ---- a table ----------------------------------------------------------------------------------------------------


class ScoreSummary(NamedTuple):
    """Scores of one kind of question with one method of making tokens.

    means      tokens → mean over seeds
    law        fitted law; None with too few numbers of tokens
    max_error  largest distance of a score from an end of its interval over questions
    """

    kind: str
    method: str
    means: dict[int, float]
    law: ScalingLaw | None
    blind: float
    max_error: float

    @property
    def alpha_text(self) -> str:
        if self.law is None:
            return "–"
        return "{:+.4f} [{:+.4f}, {:+.4f}]".format(self.law.alpha, *self.law.intervals["alpha"])


def summarize_scores(points: Sequence[ScorePoint]) -> list[ScoreSummary]:
    """Summarize all scores, grouped by kind."""
    kinds, methods = (list(dict.fromkeys(getattr(p, name) for p in points)) for name in ("kind", "method"))
    found = []
    for kind in kinds:
        for method in methods:
            by_run, by_tokens = select_scores(points, method, kind), dict[int, list[float]]()
            for (n, _), point in by_run.items():
                by_tokens.setdefault(n, []).append(point.value)
            if by_tokens:
                means = {n: mean(values) for n, values in by_tokens.items()}
                blind = mean(point.blind for point in by_run.values())
                within = max(abs(end - p.value) for p in by_run.values() for end in p.accuracy.interval)
                found.append(ScoreSummary(kind, method, means, fit_mean_law(points, method, kind), blind, within))
    return found


def group_curves(summaries: Sequence[ScoreSummary]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Group mean scores for plotting: kind → method → [(tokens, score)]."""
    drawn: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for line in summaries:
        drawn.setdefault(line.kind, {})[line.method] = list(line.means.items())
    return drawn
