"""Multiple choice by likelihood: picks the option with the highest likelihood instead of parsing an answer.

As in SEED-Bench, the option texts are scored as answers to the question. ARO and Winoground use the likelihood of a
caption given an image: the true caption must score above the false one. For Winoground, each caption must also score
higher with its own image than with the other. A tie is wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vitrail.data.formats import Sample
from vitrail.errors import ConfigError
from vitrail.evals.metrics.choice_metrics import find_most_likely_choice
from vitrail.evals.suites.benchmarks import Benchmark
from vitrail.evals.suites.generation import ImageQuestion, run_questions

ChoiceQuery = tuple[Any, str, Sequence[str]]
ChoiceLikelihoodFn = Callable[[Sequence[ChoiceQuery]], list[list[float]]]
"""(media, question, options) each → log-likelihood of each option; as `ChatPipeline.loglikelihoods`."""


def choose_by_likelihood(
    loglikelihoods: ChoiceLikelihoodFn,
    benchmark: Benchmark,
    samples: Sequence[Sample],
    *,
    prompt: str | None = None,
    batch_size: int = 1,
    blind: bool = False,
    no_images: Any = (),
    answers_file: Path | None = None,
    model_name: str = "",
) -> list[str]:
    """Choose the letter of the most likely option of each sample, or "" for a tie.

    The result is scored like generated answers. Other arguments are as in `generation.generate_answers`.
    """
    if not benchmark.likelihood_prompt:
        raise ConfigError(f"{benchmark.format} is not a multiple-choice benchmark", "generate answers instead")
    likelihood_benchmark = benchmark._replace(prompt=benchmark.likelihood_prompt)

    def choose(questions: Sequence[ImageQuestion]) -> Iterator[str]:
        queries = [_choice_queries(one, likelihood_benchmark.build_question(one.sample, prompt)) for one in questions]
        results = iter(loglikelihoods([one for own_queries in queries for one in own_queries]))
        for one, own_queries in zip(questions, queries, strict=True):
            values = [value for _ in own_queries for value in next(results)]
            tie = values.count(max(values)) > 1
            yield "" if tie else list(one.sample.choices)[find_most_likely_choice(values)]

    # Records are keyed by the usual question, which contains the options.
    options = {"by": "likelihood", "prompt": benchmark.likelihood_prompt if prompt is None else prompt}
    return run_questions(
        choose,
        samples,
        benchmark.build_question,
        batch_size=batch_size,
        blind=blind,
        no_images=no_images,
        answers_file=answers_file,
        model_name=model_name,
        options=options,
    )


def _choice_queries(question: ImageQuestion, text: str) -> list[ChoiceQuery]:
    """Queries of a question: its options as captions or, if images are the options, the caption with each image."""
    caption = question.sample.metadata.get("fits")
    if caption is None:
        return [(question.media, text, list(question.sample.choices.values()))]
    has_choice_images = isinstance(question.media, list) and len(question.media) > 1  # blind queries have no images
    return [
        (image, text, [caption])
        for image in (question.media if has_choice_images else [question.media] * len(question.sample.choices))
    ]
