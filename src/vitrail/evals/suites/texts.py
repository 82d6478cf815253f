"""Benchmarks of words alone, as lm-evaluation-harness has them: which option is the likeliest continuation."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vitrail.data.formats import Sample, Samples
from vitrail.data.formats.sample import asked
from vitrail.errors import ConfigError, DataError, nearest
from vitrail.evals.suites.answered import Question, asked_of
from vitrail.evals.suites.benchmarks import ALONE, BENCHMARKS, Benchmark
from vitrail.evals.suites.scored import continued

Text = tuple[str, str]
Weigh = Callable[[Sequence[Text]], list[float]]
"""(a context, its continuation) each → how likely that is; as `Continuations.likelihoods`"""


class TextBenchmark(NamedTuple):
    """How samples are read and scored, and the texts that a sample's options are weighed as: each a context and its
    continuation, from the sample and its question in the benchmark's prompt. An empty question is the blind one."""

    row: Benchmark
    texts: Callable[[Sample, str], list[Text]]


def behind(sample: Sample, question: str) -> list[Text]:
    """Every option behind the question."""
    return [(question, f" {option}") for option in sample.choices.values()]


def filled(sample: Sample, question: str) -> list[Text]:
    """WinoGrande: the options fill the blank, and the likelihood is that of the rest of the sentence, which is the same
    behind both. Blind, nothing stands before the options."""
    before, _, rest = sample.turns[0].text.partition("_")
    return [((before if question else "") + option, f" {rest.strip()}") for option in sample.choices.values()]


def clean(text: str) -> str:
    """HellaSwag's texts from WikiHow without their marks."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _cleaned(samples: Samples) -> Samples:
    def make(n: int) -> Sample:
        sample = samples[n]
        about = sample.notes
        question = clean(f"{about['activity_label']}: {about['ctx_a']} {about['ctx_b'].capitalize()}")
        options = {letter: clean(text) for letter, text in sample.choices.items()}
        empty = next((letter for letter, text in options.items() if not text), None)
        if empty is not None:
            raise DataError(f"ending {empty} of {sample.id} is nothing but marks", "leave that row out")
        return replace(sample, turns=asked(question, 0), choices=options)

    return Samples(samples.kind, samples.path, range(len(samples)), make)


def weighed(
    weigh: Weigh,
    text: TextBenchmark,
    samples: Sequence[Sample],
    *,
    batch: int = 1,
    blind: bool = False,
    keep: Path | None = None,
    model: str = "",
) -> list[str]:
    """How likely each option of every sample is, as answers that the benchmark scores; `batch` samples at a time.
    `blind` weighs the options without their question. The rest is as in `answered.answers`."""

    def ask(some: Sequence[Question]) -> Iterator[str]:
        each = [text.texts(one.sample, "" if blind else text.row.question(one.sample, text.row.prompt)) for one in some]
        found = iter(weigh([one for own in each for one in own]))
        for one in some:
            yield continued.told({letter: next(found) for letter in one.sample.choices})

    def question(sample: Sample) -> str:
        """All that an answer is kept by, the options too."""
        return text.row.question(sample, f"{text.row.prompt}\n{{choices}}")

    how = {"by": "likelihood"}
    return asked_of(ask, samples, question, batch=batch, blind=blind, nothing=(), keep=keep, model=model, how=how)


def any_benchmark(name: str) -> Benchmark:
    """The row of a benchmark of pictures or of words."""
    if name in TEXTS:
        return TEXTS[name].row
    if name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {name!r}", nearest(name, [*BENCHMARKS, *TEXTS]))
    return BENCHMARKS[name]


_GUESSES = {"majority": continued.majority, "longest": continued.longest}
_QUESTION = "Question: {question}\nAnswer:"

TEXTS: dict[str, TextBenchmark] = {
    "arc": TextBenchmark(
        Benchmark(
            "arc", _QUESTION, continued.accuracy("acc", "acc_norm", part="set"), continued.right, _GUESSES,
            parts="set",
        ),
        behind,
    ),
    "hellaswag": TextBenchmark(
        Benchmark(
            "hellaswag", ALONE, continued.accuracy("acc", "acc_norm", part="split_type"),
            continued.normed, _GUESSES, unfold=_cleaned, parts="split_type",
        ),
        behind,
    ),
    "piqa": TextBenchmark(
        Benchmark("piqa", _QUESTION, continued.accuracy("acc", "acc_norm"), continued.right, _GUESSES), behind
    ),
    "siqa": TextBenchmark(
        Benchmark("siqa", "Q: {hint} {question}\nA:", continued.accuracy("acc"), continued.right, _GUESSES), behind
    ),
    "winogrande": TextBenchmark(
        Benchmark("winogrande", ALONE, continued.accuracy("acc"), continued.right, _GUESSES), filled
    ),
}  # fmt: skip
