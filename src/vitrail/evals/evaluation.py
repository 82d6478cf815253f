"""Run a suite on a model: the typed options of suites, and the result with scores and settings."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vitrail import __version__
from vitrail.config import Config
from vitrail.errors import ConfigError, suggest_name
from vitrail.evals.scores import Score
from vitrail.registry import BENCHMARKS, SUITES, TEXT_BENCHMARKS

if TYPE_CHECKING:
    from vitrail.evals.context import EvalContext
    from vitrail.evals.examples import Example


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of a model on a suite.

    scores         each with value, unit, direction, 95 % interval, baselines and number of items
    settings       options and facts that the scores depend on
    messages       what the suite reports beside its scores
    warning        what restricts the scores, such as truncated texts; or ""
    load_examples  loads example images with their answers, if the suite has any
    details        intermediate results of the suite, from which `vitrail.plots` draws figures
    """

    scores: Sequence[Score]
    settings: Mapping[str, Any]
    messages: Sequence[str] = ()
    warning: str = ""
    load_examples: "Callable[[], Sequence[Example]]" = field(default=list, repr=False)
    details: Any = field(default=None, repr=False)
    suite: str = ""
    model: str = ""
    device: str = "cpu"

    def __getitem__(self, title: str) -> Score:
        """Return a score by its title, such as "accuracy" or "accuracy, split random"."""
        scores = {score.title.strip(): score for score in self.scores}
        if title not in scores:
            raise ConfigError(f"{self.suite} has no score {title!r}", suggest_name(title, scores))
        return scores[title]

    def __str__(self) -> str:
        """Format the scores as a table, with their intervals and baselines."""
        rows = [(score.title, str(score), score.baselines_text) for score in self.scores]
        titles, values = (max(len(row[column]) for row in rows) for column in (0, 1))
        lines = (f"{title:{titles}}  {value:{values}}  {baselines}" for title, value, baselines in rows)
        return "\n".join(map(str.rstrip, lines))

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON object."""
        origin = {"suite": self.suite, "model": self.model, "vitrail": __version__}
        return {**origin, **self.settings, "scores": [score.as_dict for score in self.scores]}

    def save(self, path: str | Path) -> None:
        """Write the settings and the scores to a JSON file."""
        file, text = Path(path), json.dumps(self.to_dict(), indent=2, ensure_ascii=False, default=str)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}", "give another file") from None


class Suite(Config):
    """Base class of suites: the fields are the options, and `evaluate` measures a model.

    Register a subclass with `@SUITES.register("name")`. Its docstring describes the fields: lines of a name, two spaces
    or more, and a description. Its module imports torch and models inside `evaluate` only, so that help is fast.
    """

    model_description: ClassVar[str] = "A folder or a hub id."
    example: ClassVar[str] = ""
    output_files: ClassVar[Mapping[str, str]] = {}
    """Files that the command can write beside the scores (see `vitrail.plots.eval_files`), and their descriptions."""

    def evaluate(self, context: "EvalContext") -> EvaluationResult:
        """Score the model of a context. Errors in the options are raised before weights are loaded."""
        raise NotImplementedError

    @classmethod
    def has_option(cls, name: str) -> bool:
        """Whether an option applies to the suite. Others are accepted and refused with a reason."""
        return True


class BatchedSuite(Suite):
    """A suite that runs the model in batches.

    batch_size  images or texts a batch
    """

    batch_size: int = 256


def list_suites() -> tuple[str, ...]:
    """List the names of all suites and benchmarks, without importing them."""
    return tuple(dict.fromkeys([*SUITES, *BENCHMARKS, *TEXT_BENCHMARKS]))


def find_suite(name: str, *, has_data: bool = False) -> type[Suite]:
    """Find the suite of a name. A benchmark of the same name as a suite on scenes (`aro`) is meant if data is given."""
    if name in SUITES and not (has_data and name in BENCHMARKS):
        return SUITES[name]
    if name not in BENCHMARKS and name not in TEXT_BENCHMARKS:
        raise ConfigError(f"there is no suite {name!r}", suggest_name(name, list_suites()))
    from vitrail.evals.suites.benchmark_suites import make_benchmark_suite

    return make_benchmark_suite(name)


def run(context: "EvalContext", suite: str, options: Mapping[str, Any]) -> EvaluationResult:
    """Evaluate the model of a context on a suite or benchmark. All evaluations go through this function."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    config = find_suite(suite, has_data="data" in options).from_dict(plain)
    result = config.evaluate(context)
    return replace(result, suite=suite, model=context.name, device=context.device)
