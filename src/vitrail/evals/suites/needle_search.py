"""Needle-in-a-haystack search in videos, as in LongVA's V-NIAH: a question that only one of many frames answers.

N frames of the haystack
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import NamedTuple, TypeVar

from PIL import Image, ImageOps

from vitrail.data.formats import Sample
from vitrail.data.formats.sample import show_progress
from vitrail.errors import ConfigError, DataError
from vitrail.evals.metrics.scoring_table import Subset, find_most_common, score_mean
from vitrail.evals.scores import Score
from vitrail.evals.suites.scene_benchmarks import normalize_answer

T = TypeVar("T")
Frames = Sequence[Image.Image]
Haystack = Callable[[int], Frames]
"""Number of frames → that many frames of one size."""

NEEDLE_SCORE_NAME = "needle found"
_MAX_DENOMINATOR = 1_000_000  # a depth of 0.29 is 29/100, not the nearest binary float


class NeedleTrial(NamedTuple):
    """One question and its response. `depth` is None if the video has no needle."""

    num_frames: int
    depth: Fraction | None
    needle: int
    response: str
    is_correct: bool


class NeedleResult(NamedTuple):
    """Scores and trials of a needle search."""

    scores: list[Score]
    trials: list[NeedleTrial]

    def accuracy(self, num_frames: int, depth: Fraction | None) -> float:
        """Accuracy in one cell of the grid of lengths and depths."""
        cell = [trial.is_correct for trial in self.trials if (trial.num_frames, trial.depth) == (num_frames, depth)]
        return sum(cell) / len(cell)


def spread_depths(count: int) -> list[Fraction]:
    """`count` evenly spaced depths from 0 to 1; a single depth is 1/2."""
    if count < 1:
        raise ConfigError(f"{count} depths", "set at least 1")
    return [Fraction(n, count - 1) for n in range(count)] if count > 1 else [Fraction(1, 2)]


def needle_index(num_frames: int, depth: float | Fraction) -> int:
    """Number of frames before the needle: 0 at depth 0, all at depth 1."""
    if num_frames < 1 or not 0 <= depth <= 1:
        raise ConfigError(
            f"needle at depth {depth} of {num_frames} frames", "set a depth in 0 … 1 and at least one frame"
        )
    return math.floor(Fraction(depth).limit_denominator(_MAX_DENOMINATOR) * num_frames)


def insert_needle(haystack: Sequence[T], needle: T, depth: float | Fraction) -> list[T]:
    """Insert the needle into a haystack of N frames; returns N + 1 frames."""
    position = needle_index(len(haystack), depth)
    return [*haystack[:position], needle, *haystack[position:]]


def answer_starts_with(response: str, answer: str) -> bool:
    """Whether a response starts with the answer, word for word; as in LongVA, the rest is ignored."""
    words = normalize_answer(answer).split()
    return normalize_answer(response).split()[: len(words)] == words


def count_prompt_tokens(
    count_tokens: Callable[[Frames, str], int], haystack: Haystack, needles: Sequence[Sample], lengths: Sequence[int]
) -> dict[int, int]:
    """Number of prompt tokens of the longest question per length.

    `count_tokens` raises an error if the prompt exceeds the capacity of the model.
    """
    tokens = {}
    for length in sorted(set(lengths)):
        frames = haystack(length)
        longest = max(needles, key=lambda needle: len(needle.turns[0].text))
        try:
            tokens[length] = count_tokens(insert_needle(frames, frames[0], 1), longest.turns[0].text)
        except ConfigError as error:
            raise ConfigError(f"a haystack of {length:,} frames: {error.problem}", error.remedy) from error
    return tokens


def run_needle_search(
    ask: Callable[[Frames, str], str],
    haystack: Haystack,
    needles: Sequence[Sample],
    lengths: Sequence[int],
    depths: Sequence[Fraction],
) -> NeedleResult:
    """Ask about every needle at every depth and length, and once per length without the needle as the blind baseline.

    Intervals over several cells are bootstrapped over needles, because each needle occurs in all cells.
    """
    answers = [_needle_answer(needle) for needle in needles]
    if not needles or not lengths or not depths or min(lengths) < 1:
        raise ConfigError(
            f"{len(needles)} needles in {list(lengths)} frames at {len(depths)} depths", "set at least one of each"
        )
    trials: list[NeedleTrial] = []
    cached: tuple[int, Frames, list[Image.Image]] = 0, [], []
    grid = list(product(dict.fromkeys(lengths), (None, *depths), range(len(needles))))
    for length, depth, number in show_progress(grid, "needles"):
        if cached[0] != length:
            frames = haystack(length)
            cached = length, frames, [_fit_to_frame(needle.load_image(), frames[0]) for needle in needles]
        _, frames, needle_images = cached
        response = ask(
            frames if depth is None else insert_needle(frames, needle_images[number], depth),
            needles[number].turns[0].text,
        )
        trials.append(NeedleTrial(length, depth, number, response, answer_starts_with(response, answers[number])))
    return NeedleResult(_score_cells(trials, answers), trials)


def _needle_answer(needle: Sample) -> str:
    if not needle.answers or not normalize_answer(needle.answers[0]):
        raise DataError(f"the needle {needle.id!r} has no text answer", "add one")
    return needle.answers[0]


def _fit_to_frame(picture: Image.Image, frame: Image.Image) -> Image.Image:
    """Resize to the size of a frame, with padding and without distortion."""
    return picture if picture.size == frame.size else ImageOps.pad(picture, frame.size)


def _score_cells(trials: Sequence[NeedleTrial], answers: Sequence[str]) -> list[Score]:
    """Scores of all cells, of each length, and of each cell."""
    majority_answer = find_most_common(map(normalize_answer, answers))
    majority = sum(normalize_answer(answer) == majority_answer for answer in answers) / len(answers)
    lengths = list(dict.fromkeys(trial.num_frames for trial in trials))
    depths = list(dict.fromkeys(trial.depth for trial in trials if trial.depth is not None))

    def score(some_lengths: Sequence[int], some_depths: Sequence[Fraction], part: Subset) -> Score:
        selected = [trial for trial in trials if trial.num_frames in some_lengths and trial.depth in some_depths]
        blind = [trial.is_correct for trial in trials if trial.num_frames in some_lengths and trial.depth is None]
        groups: list[Hashable] = [trial.needle for trial in selected]
        correct = [float(trial.is_correct) for trial in selected]
        baselines = {"no needle": sum(blind) / len(blind), "majority": majority}
        return replace(score_mean(NEEDLE_SCORE_NAME, correct, groups, part, binary=True), baselines=baselines)

    cells = [score([n], [depth], {"frames": n, "depth": f"{float(depth):.0%}"}) for n in lengths for depth in depths]
    return [score(lengths, depths, {}), *(score([n], depths, {"frames": n}) for n in lengths), *cells]
