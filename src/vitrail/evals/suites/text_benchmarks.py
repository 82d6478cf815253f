"""Text benchmarks of lm-evaluation-harness: multiple choice by the likelihood of continuations."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vitrail.data.formats import Sample, SampleDataset
from vitrail.data.formats.sample import build_question_turns
from vitrail.errors import DataError
from vitrail.evals.metrics import likelihood_metrics
from vitrail.evals.suites.benchmarks import QUESTION_PROMPT, Benchmark
from vitrail.evals.suites.generation import ImageQuestion, run_questions
from vitrail.registry import TEXT_BENCHMARKS

Continuation = tuple[str, str]
TextLikelihoodFn = Callable[[Sequence[Continuation]], list[float]]
"""(context, continuation) each → log-likelihood."""


class TextBenchmark(NamedTuple):
    """A benchmark and a function that builds one (context, continuation) per option from a sample and its question.

    The question is empty for the blind baseline.
    """

    benchmark: Benchmark
    build_continuations: Callable[[Sample, str], list[Continuation]]


def continue_question(sample: Sample, question: str) -> list[Continuation]:
    """Every option as a continuation of the question."""
    return [(question, f" {option}") for option in sample.choices.values()]


def fill_blank(sample: Sample, question: str) -> list[Continuation]:
    """WinoGrande: options fill the blank, and the rest of the sentence is the continuation.

    For the blind baseline, the context is the option alone.
    """
    before, _, rest = sample.turns[0].text.partition("_")
    return [((before if question else "") + option, f" {rest.strip()}") for option in sample.choices.values()]


def clean_hellaswag(text: str) -> str:
    """Remove WikiHow markup from HellaSwag's texts."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _clean_samples(samples: SampleDataset) -> SampleDataset:
    def make(n: int) -> Sample:
        sample = samples[n]
        metadata = sample.metadata
        question = clean_hellaswag(
            f"{metadata['activity_label']}: {metadata['ctx_a']} {metadata['ctx_b'].capitalize()}"
        )
        options = {letter: clean_hellaswag(text) for letter, text in sample.choices.items()}
        empty = next((letter for letter, text in options.items() if not text), None)
        if empty is not None:
            raise DataError(f"ending {empty} of {sample.id} has only markup", "remove that row")
        return replace(sample, turns=build_question_turns(question, 0), choices=options)

    return SampleDataset(samples.format_name, samples.path, range(len(samples)), make)


def score_continuations(
    loglikelihoods: TextLikelihoodFn,
    text_benchmark: TextBenchmark,
    samples: Sequence[Sample],
    *,
    batch_size: int = 1,
    blind: bool = False,
    answers_file: Path | None = None,
    model_name: str = "",
) -> list[str]:
    """Compute the likelihood of each option of every sample, as answers that the benchmark scores.

    `blind` omits the question. Other arguments are as in `generation.generate_answers`.
    """

    def ask(some: Sequence[ImageQuestion]) -> Iterator[str]:
        continuations = [
            text_benchmark.build_continuations(
                one.sample,
                "" if blind else text_benchmark.benchmark.build_question(one.sample, text_benchmark.benchmark.prompt),
            )
            for one in some
        ]
        values = iter(loglikelihoods([one for row in continuations for one in row]))
        for one in some:
            yield likelihood_metrics.format_likelihoods({letter: next(values) for letter in one.sample.choices})

    def question(sample: Sample) -> str:
        """Question and options, as the key of the record."""
        return text_benchmark.benchmark.build_question(sample, f"{text_benchmark.benchmark.prompt}\n{{choices}}")

    options = {"by": "likelihood"}
    return run_questions(
        ask,
        samples,
        question,
        batch_size=batch_size,
        blind=blind,
        no_images=(),
        answers_file=answers_file,
        model_name=model_name,
        options=options,
    )


def _make_benchmark(
    format_name: str,
    prompt: str,
    *measures: str,
    score_items: Callable[..., list[float]] = likelihood_metrics.choice_correct,
    expand_samples: Callable[..., SampleDataset] | None = None,
    subset_key: str = "",
    build_continuations: Callable[[Sample, str], list[Continuation]] = continue_question,
) -> TextBenchmark:
    """Benchmark of the measures acc, and acc_norm if it is reported too."""
    baselines = {"majority": likelihood_metrics.majority_answers, "longest": likelihood_metrics.longest_answers}
    scorer = likelihood_metrics.make_accuracy_scorer(*measures, part=subset_key)
    benchmark = Benchmark(
        format_name, prompt, scorer, score_items, baselines, expand_samples=expand_samples, subset_key=subset_key
    )
    return TextBenchmark(benchmark, build_continuations)


_QUESTION_ANSWER_PROMPT = "Question: {question}\nAnswer:"

TEXT_BENCHMARKS.register("arc", _make_benchmark("arc", _QUESTION_ANSWER_PROMPT, "acc", "acc_norm", subset_key="set"))
TEXT_BENCHMARKS.register(
    "hellaswag",
    _make_benchmark(
        "hellaswag",
        QUESTION_PROMPT,
        "acc",
        "acc_norm",
        score_items=likelihood_metrics.choice_correct_normalized,
        expand_samples=_clean_samples,
        subset_key="split_type",
    ),
)
TEXT_BENCHMARKS.register("piqa", _make_benchmark("piqa", _QUESTION_ANSWER_PROMPT, "acc", "acc_norm"))
TEXT_BENCHMARKS.register("siqa", _make_benchmark("siqa", "Q: {hint} {question}\nA:", "acc"))
TEXT_BENCHMARKS.register(
    "winogrande", _make_benchmark("winogrande", QUESTION_PROMPT, "acc", build_continuations=fill_blank)
)
