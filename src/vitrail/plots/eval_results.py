"""Render evaluation results of a file as a page section: scores, baselines and a summary."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vitrail.errors import ConfigError
from vitrail.evals.scores import Score
from vitrail.plots.html_page import (
    Html,
    Section,
    render_code,
    render_details,
    render_heading,
    render_table,
    render_verdict,
)

SCORE_LABELS = {
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
        "relation": "how two things relate",
        "what": "what is next to a thing",
        "reading": "reading a word",
        "unanswerable_colour": "the colour of a thing that may be absent",
        "unanswerable_position": "the position of a thing that may be absent",
        "unanswerable_relation": "how two things relate, of which one may be absent",
    },
    "naming": {"named": "correct names"},
}
"""Suite → score name → description."""


class EvalRun(NamedTuple):
    """Scores of one command. Suites of `vitrail eval` yield fractions; other commands may have units."""

    title: str
    command: str
    scores: list[Score]

    @property
    def suite(self) -> str:
        """Name of the suite, or "" for other commands."""
        return self.command.split()[3] if self.command.startswith("vitrail eval ") else ""

    def get_label(self, score: Score) -> str:
        return SCORE_LABELS.get(self.suite, {}).get(score.name, score.name)


class EvalResults:
    """Evaluation results of a file.

    The format is {"evals": {title: {"command": …, "scores": {name: {"value", "interval", "count"}}}}}. Scores may also
    be a list, as `vitrail eval --out` writes it.
    """

    def __init__(self, file: str, data: Mapping[str, Any]):
        self.file = file
        try:
            self.runs = [_parse_run(title, each["command"], each["scores"]) for title, each in data["evals"].items()]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            problem = f"{file} is not an evaluation results file: {error!r}"
            raise ConfigError(problem, "give another file") from None

    def find_run(self, suite: str) -> EvalRun | None:
        """Return the first run of a suite; later ones use other settings."""
        return next((one for one in self.runs if one.suite == suite), None)

    def format_score(self, suite: str, name: str) -> str:
        """Format one score as a percentage."""
        scores = [] if (found := self.find_run(suite)) is None else found.scores
        return next((f"{score.value:.0%}" for score in scores if score.name == name), "not measured")

    def summarize(self) -> list[str]:
        """Summarize each suite in one line: best and worst score, and scores that do not beat their baseline."""
        return [_summarize_run(one) for one in self.runs if one.suite and one is self.find_run(one.suite)]

    def to_section(self) -> Section:
        body: list[str] = [
            f"Scores over many more images and prompts, from {self.file}. Brackets: 95 % interval. A tick means that "
            "the whole interval is better than the baselines."
        ]
        for one in self.runs:
            rows = [(one.get_label(score), *_format_cells(score, bool(one.suite))) for score in one.scores]
            parts = [
                Html(f"<p>{render_code(one.command)}</p>"),
                render_table(("", "measured", "without the image"), rows),
            ]
            again = one.suite and one is not self.find_run(one.suite)
            body += [render_details(one.title, parts)] if again else [render_heading(one.title), *parts]
        return Section("Measured scores", body)


def _parse_run(title: str, command: str, scores: dict | list) -> EvalRun:
    named = scores.items() if isinstance(scores, dict) else [(one["name"], one) for one in scores]
    run = EvalRun(title, command, [Score.from_dict(name, one) for name, one in named])
    _ = run.suite, [str(score) for score in run.scores]  # raise formatting errors now, not in the middle of a page
    return run


def _summarize_run(run: EvalRun) -> str:
    # If other scores have baselines, a score without one is not an accuracy.
    shares = [s for s in run.scores if s.baselines] or [s for s in run.scores if s.name != "all"]
    shares = sorted((s for s in shares if s.unit == "fraction"), key=lambda s: -s.value)
    parts = [f"{s.value:.0%} of {s.count:,} in all" for s in run.scores if s.name == "all"]
    ends = ("best: ", "worst: ") if len(shares) > 1 else ("",)
    parts += [
        f"{end}{run.get_label(s)}, {s.value:.0%}" for end, s in zip(ends, (shares[:1] + shares[-1:]), strict=False)
    ]
    blind = [run.get_label(s) for s in shares if s.baselines and not s.beats_baselines]
    parts += [f"not better than without the image: {', '.join(blind)}"] if blind else []
    others = [s for s in run.scores if s.unit != "fraction"]
    parts += [f"{run.get_label(s)} {s.value:.4g}" + f" ({s.baselines_text})" * bool(s.baselines) for s in others]
    return f"{run.title[:1].upper()}{run.title[1:]} — {'; '.join(parts)}."


def _format_cells(score: Score, is_fraction: bool) -> tuple[str, str]:
    if not is_fraction:
        return f"{score.value:.4g} of {score.count:,}", ""
    return render_verdict(score.beats_baselines, str(score)) if score.baselines else str(score), score.baselines_text
