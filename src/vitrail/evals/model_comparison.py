"""Compare two models by their saved answers to the samples of a benchmark."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.evals.suites.benchmarks import ModelComparison, get_benchmark
from vitrail.evals.suites.recorded_answers import load_recorded_answers


class AnswerComparison(NamedTuple):
    """Differences of two models, on all samples and on each subset."""

    models: tuple[str, str]
    subsets: list[ModelComparison]

    def __str__(self) -> str:
        width = max(len(part.title) for part in self.subsets)
        rows = (f"{x.title:{width}}  {x.first:6.1%}  {x.second:6.1%}  {x.difference}" for x in self.subsets)
        return "\n".join(rows)

    def to_dict(self) -> dict[str, Any]:
        return {"models": list(self.models), "subsets": [_subset_to_dict(part) for part in self.subsets]}


def compare_answers(
    name: str,
    first: Path,
    second: Path,
    data: Path,
    *,
    limit: int | None = None,
    circular: bool = False,
    models: tuple[str, str] | None = None,
    format_options: Mapping[str, Any],
    scorer_options: Mapping[str, Any],
) -> AnswerComparison:
    """Compare the answers of two files, which `vitrail eval … --answers` saved, on a benchmark. No model is loaded.

    models  names of the two models, if a file contains answers of several
    """
    benchmark = get_benchmark(name)
    benchmark.check_options(scorer_options)
    samples = benchmark.load_samples(data, limit=limit, circular=circular, **format_options)
    one = load_recorded_answers(first, samples, None if models is None else models[0])
    other = load_recorded_answers(second, samples, None if models is None else models[1])
    subsets = benchmark.compare_subsets(samples, one.answers, other.answers, **scorer_options)
    return AnswerComparison((one.model_name, other.model_name), subsets)


def _subset_to_dict(part: ModelComparison) -> dict[str, Any]:
    found = part.difference
    exact = {} if found.only_one_correct is None else {"only": list(found.only_one_correct), "p": found.p_value}
    return {
        "name": part.title,
        "first": part.first,
        "second": part.second,
        "difference": found.difference,
        "interval": [end if math.isfinite(end) else None for end in found.interval],
        "count": found.count,
        **exact,
    }
