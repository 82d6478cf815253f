"""Choosing by likelihood: the option that the model would most likely say, and not what it says.

Multiple choice as SEED-Bench has it: the options' texts as answers to the question alone. ARO and Winoground by their
own rules, with the likelihood of a caption given a picture as the score: the true caption above the false one, and for
Winoground also each caption under its own picture above the same under the other. A tie is a miss.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vitrail.data.formats import Sample
from vitrail.errors import ConfigError
from vitrail.evals.metrics.choice import likeliest
from vitrail.evals.suites.answered import Question, asked_of
from vitrail.evals.suites.benchmarks import Benchmark

Asked = tuple[Any, str, Sequence[str]]
Weigh = Callable[[Sequence[Asked]], list[list[float]]]
"""(what is shown, the question, its options) each → how likely each option is; as `Talker.likelihoods`"""


def likely(
    weigh: Weigh,
    row: Benchmark,
    samples: Sequence[Sample],
    *,
    prompt: str | None = None,
    batch: int = 1,
    blind: bool = False,
    nothing: Any = (),
    keep: Path | None = None,
    model: str = "",
) -> list[str]:
    """The letter of the likeliest option of each sample, or nothing where two are alike: answers that a benchmark
    scores as any others. The rest is as in `answered.answers`."""
    if not row.weighed:
        raise ConfigError(f"{row.format} is no choice between options", "have it answered")
    weighing = row._replace(prompt=row.weighed)

    def choose(asked: Sequence[Question]) -> Iterator[str]:
        each = [_options(one, weighing.question(one.sample, prompt)) for one in asked]
        found = iter(weigh([one for some in each for one in some]))
        for one, some in zip(asked, each, strict=True):
            values = [value for _ in some for value in next(found)]
            tie = values.count(max(values)) > 1
            yield "" if tie else list(one.sample.choices)[likeliest(values)]

    # All that a row is kept by is in the usual question, the options too.
    how = {"by": "likelihood", "prompt": row.weighed if prompt is None else prompt}
    more: dict[str, Any] = {"blind": blind, "nothing": nothing, "keep": keep, "model": model}
    return asked_of(choose, samples, row.question, batch=batch, how=how, **more)


def _options(one: Question, text: str) -> list[Asked]:
    """Captions of what is shown or, where pictures are the options, the caption under each."""
    caption = one.sample.notes.get("fits")
    if caption is None:
        return [(one.shown, text, list(one.sample.choices.values()))]
    several = isinstance(one.shown, list) and len(one.shown) > 1  # else they are not to be seen
    return [(shown, text, [caption]) for shown in (one.shown if several else [one.shown] * len(one.sample.choices))]
