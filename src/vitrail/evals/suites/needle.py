"""A needle in a haystack of frames: one picture among many, and a question that only it answers, as in LongVA's V-NIAH.

N frames of the haystack
"""

import math
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple, TypeVar

from PIL import Image, ImageOps

from vitrail.data.formats import Sample
from vitrail.data.formats.sample import progress
from vitrail.errors import ConfigError, DataError
from vitrail.evals.shares import Score
from vitrail.evals.suites.sheets import Part, commonest, mean
from vitrail.evals.suites.talking import plain

T = TypeVar("T")
Frames = Sequence[Image.Image]
Haystack = Callable[[int], Frames]
"""how many frames → these, all of one size"""

NAME = "needle found"
_FINEST = 1_000_000  # a depth of 0.29 is 29/100, and not what is nearest to it in base two


class Trial(NamedTuple):
    """One question. `depth` is None where no needle was there."""

    frames: int
    depth: Fraction | None
    needle: int
    said: str
    right: bool


class Found(NamedTuple):
    scores: list[Score]
    trials: list[Trial]

    def share(self, frames: int, depth: Fraction | None) -> float:
        """Of right answers in one cell of the grid."""
        cell = [trial.right for trial in self.trials if (trial.frames, trial.depth) == (frames, depth)]
        return sum(cell) / len(cell)


def depths_of(count: int) -> list[Fraction]:
    """So many depths, evenly from the haystack's beginning to its end; one alone is its middle."""
    if count < 1:
        raise ConfigError(f"{count} depths", "give at least 1")
    return [Fraction(n, count - 1) for n in range(count)] if count > 1 else [Fraction(1, 2)]


def place(frames: int, depth: float | Fraction) -> int:
    """How many frames come before the needle: none at depth 0, all of them at 1."""
    if frames < 1 or not 0 <= depth <= 1:
        raise ConfigError(f"a needle at {depth} of {frames} frames", "give a depth of 0 to 1, and at least a frame")
    return math.floor(Fraction(depth).limit_denominator(_FINEST) * frames)


def hidden(haystack: Sequence[T], needle: T, depth: float | Fraction) -> list[T]:
    """The haystack, N, with the needle in it, N + 1."""
    at = place(len(haystack), depth)
    return [*haystack[:at], needle, *haystack[at:]]


def right(said: str, answer: str) -> bool:
    """Whether an answer begins with the true one, word for word; what follows is as LongVA has it not looked at."""
    true = plain(answer).split()
    return plain(said).split()[: len(true)] == true


def fits(
    count: Callable[[Frames, str], int], haystack: Haystack, needles: Sequence[Sample], lengths: Sequence[int]
) -> dict[int, int]:
    """How many tokens the longest question about each length takes; `count` refuses what the model cannot hold."""
    tokens = {}
    for length in sorted(set(lengths)):
        frames = haystack(length)
        longest = max(needles, key=lambda needle: len(needle.turns[0].text))
        try:
            tokens[length] = count(hidden(frames, frames[0], 1), longest.turns[0].text)
        except ConfigError as error:
            raise ConfigError(f"a haystack of {length:,} frames: {error.problem}", error.remedy) from error
    return tokens


def searched(
    ask: Callable[[Frames, str], str],
    haystack: Haystack,
    needles: Sequence[Sample],
    lengths: Sequence[int],
    depths: Sequence[Fraction],
) -> Found:
    """Every needle at every depth of every length; and its question once a length with no needle there: blind. The
    interval of several cells draws needles anew, since one is asked about in all of them."""
    answers = [_answer(needle) for needle in needles]
    if not needles or not lengths or not depths or min(lengths) < 1:
        raise ConfigError(
            f"{len(needles)} needles in {list(lengths)} frames at {len(depths)} depths", "give at least one of each"
        )
    trials: list[Trial] = []
    held: tuple[int, Frames, list[Image.Image]] = 0, [], []
    grid = list(product(dict.fromkeys(lengths), (None, *depths), range(len(needles))))
    for length, depth, number in progress(grid, "needles"):
        if held[0] != length:
            frames = haystack(length)
            held = length, frames, [_fitted(needle.image(), frames[0]) for needle in needles]
        _, frames, pictures = held
        said = ask(frames if depth is None else hidden(frames, pictures[number], depth), needles[number].turns[0].text)
        trials.append(Trial(length, depth, number, said, right(said, answers[number])))
    return Found(_scores(trials, answers), trials)


def _answer(needle: Sample) -> str:
    if not needle.answers or not plain(needle.answers[0]):
        raise DataError(f"the needle {needle.id!r} has no answer in words", "give it one")
    return needle.answers[0]


def _fitted(picture: Image.Image, frame: Image.Image) -> Image.Image:
    """In a frame's size, whole and undistorted."""
    return picture if picture.size == frame.size else ImageOps.pad(picture, frame.size)


def _scores(trials: Sequence[Trial], answers: Sequence[str]) -> list[Score]:
    """Of all cells together, of each length, and of each cell."""
    most = commonest(map(plain, answers))
    majority = sum(plain(answer) == most for answer in answers) / len(answers)
    lengths = list(dict.fromkeys(trial.frames for trial in trials))
    depths = list(dict.fromkeys(trial.depth for trial in trials if trial.depth is not None))

    def score(some: Sequence[int], at: Sequence[Fraction], part: Part) -> Score:
        there = [trial for trial in trials if trial.frames in some and trial.depth in at]
        blind = [trial.right for trial in trials if trial.frames in some and trial.depth is None]
        groups: list[Hashable] = [trial.needle for trial in there]
        found = mean(NAME, [float(trial.right) for trial in there], groups, part, binary=True)
        beside = {"no needle": sum(blind) / len(blind), "majority": majority}
        return Score(found.name, found.value, found.interval, found.of, beside, part=found.part)

    cells = [score([n], [depth], {"frames": n, "depth": f"{float(depth):.0%}"}) for n in lengths for depth in depths]
    return [score(lengths, depths, {}), *(score([n], depths, {"frames": n}) for n in lengths), *cells]
