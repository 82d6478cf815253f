"""A file of results as part of a page: what was measured, what can be had without looking, and what that comes to."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vitrail.errors import ConfigError
from vitrail.evals.shares import Score
from vitrail.show.page import Html, Section, code, fold, heading, marked, table

KINDS = {
    "drawing": {
        "single": "one thing",
        "two": "two things",
        "counting": "a number of things",
        "colours": "a colour",
        "position": "a position",
        "attribution": "two things of two colours",
    },
    "dpg": {"dense": "dense prompts"},
    "questions": {
        "existence_random": "whether a thing is there",
        "existence_popular": "whether a common thing is there",
        "existence_adversarial": "whether a likely thing is there",
        "counting": "how many there are",
        "colour": "a thing's colour",
        "position": "where a thing is",
        "relation": "how two things lie",
        "what": "what lies beside a thing",
        "reading": "reading a word",
        "unanswerable_colour": "the colour of what may be missing",
        "unanswerable_position": "where what may be missing is",
    },
    "naming": {"named": "names given right"},
}
"""What is asked for, suite by suite, in words."""


class Eval(NamedTuple):
    """What one command measured. Suites of `vitrail eval` give shares; what others measure has units of its own."""

    title: str
    command: str
    scores: list[Score]

    @property
    def suite(self) -> str:
        """The suite's name, or "" where the command runs none."""
        return self.command.split()[3] if self.command.startswith("vitrail eval ") else ""

    def told(self, score: Score) -> str:
        return KINDS.get(self.suite, {}).get(score.name, score.name)


class Measured:
    """A file of results: {"evals": {title: {"command": …, "scores": {name: {"value", "interval", "of"}}}}}; scores may
    also be a list, as `vitrail eval --out` writes it."""

    def __init__(self, file: str, found: Mapping[str, Any]):
        self.file = file
        try:
            self.evals = [_eval(title, each["command"], each["scores"]) for title, each in found["evals"].items()]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            problem = f"{file} holds no results as they are shown here: {error!r}"
            raise ConfigError(problem, "give another file") from None

    def first(self, suite: str) -> Eval | None:
        """The first results of a suite: others are the same suite under other settings."""
        return next((one for one in self.evals if one.suite == suite), None)

    def share(self, suite: str, name: str) -> str:
        """What was measured of one kind, in short"""
        scores = [] if (found := self.first(suite)) is None else found.scores
        return next((f"{score.value:.0%}" for score in scores if score.name == name), "not measured")

    def glance(self) -> list[str]:
        """The strongest and the weakest of each suite, and all that is no better than not looking: a line each."""
        return [_strong_and_weak(one) for one in self.evals if one.suite and one is self.first(one.suite)]

    def section(self) -> Section:
        body: list[str] = [
            f"Of many more pictures and prompts than these: {self.file}. In brackets: where the true share lies, at "
            "95 %. A tick is where all of that is above what can be had without looking, a cross where it is not."
        ]
        for one in self.evals:
            rows = [(one.told(score), *_cells(score, bool(one.suite))) for score in one.scores]
            told = [Html(f"<p>{code(one.command)}</p>"), table(("", "measured", "without looking"), rows)]
            again = one.suite and one is not self.first(one.suite)
            body += [fold(one.title, told)] if again else [heading(one.title), *told]
        return Section("Measured", body)


def _eval(title: str, command: str, scores: dict | list) -> Eval:
    named = scores.items() if isinstance(scores, dict) else [(one["name"], one) for one in scores]
    made = []
    for name, one in named:
        more = {key: one[key] for key in ("beside", "rank", "points") if key in one}
        made.append(Score(name, one["value"], tuple(one["interval"]), one["of"], **more))
    found = Eval(title, command, made)
    _ = found.suite, [str(score) for score in made]  # what cannot be said is an error now, and not on half a page
    return found


def _strong_and_weak(one: Eval) -> str:
    # A row that has nothing beside it, where others have, is no share of right answers.
    shares = [s for s in one.scores if s.beside] or [s for s in one.scores if s.name != "all"]
    shares = sorted((s for s in shares if not (s.rank or s.points)), key=lambda s: -s.value)
    said = [f"{s.value:.0%} of {s.of:,} in all" for s in one.scores if s.name == "all"]
    ends = ("best: ", "worst: ") if len(shares) > 1 else ("",)
    said += [f"{end}{one.told(s)}, {s.value:.0%}" for end, s in zip(ends, (shares[:1] + shares[-1:]), strict=False)]
    blind = [one.told(s) for s in shares if s.beside and not _looks(s)]
    said += [f"no better than without looking: {', '.join(blind)}"] if blind else []
    return f"{one.title[:1].upper()}{one.title[1:]} — {'; '.join(said)}."


def _cells(score: Score, share: bool) -> tuple[str, str]:
    if not share:
        return f"{score.value:.4g} of {score.of:,}", ""
    return (marked(_looks(score), str(score)) if score.beside and not score.rank else str(score)), score.baselines


def _looks(score: Score) -> bool:
    return score.interval[0] > max(score.beside.values())
