"""Loads recorded answers and matches them with their samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vitrail.data.formats import Sample
from vitrail.errors import ConfigError, DataError, suggest_name
from vitrail.evals.metrics.scoring_table import image_key
from vitrail.evals.suites.generation import AnswerRecord, load_answer_records


class RecordedAnswers(NamedTuple):
    """A model's answers, in the order of the samples."""

    model_name: str
    answers: list[str]


def load_recorded_answers(path: Path, samples: Sequence[Sample], model_name: str | None = None) -> RecordedAnswers:
    """Load a model's answers to samples from a file of `vitrail eval … --answers`, in the order of the samples.

    Raises an error if an answer is missing or belongs to another question. For a file with several models, pass
    `model_name`.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist", "use a file written with --answers")
    rows = [row for row in load_answer_records(path)[0].values() if not row.blind]
    models = list(dict.fromkeys(row.model for row in rows))
    if not rows:
        raise DataError(f"{path} contains no answers", "use a file written with --answers")
    if model_name is None and len(models) > 1:
        raise ConfigError(f"{path} contains answers of {', '.join(models)}", "select one with --models")
    if model_name is not None and model_name not in models:
        raise ConfigError(f"{path} contains no answers of {model_name!r}", suggest_name(model_name, models))
    name = models[0] if model_name is None else model_name
    by_id: dict[str, AnswerRecord] = {}
    for row in rows:
        if row.model == name and by_id.setdefault(row.id, row) is not row:
            raise DataError(
                f"{path} contains two answers of {name} to {row.id!r} with different questions or options",
                "use a separate file for each prompt and option",
            )
    matching = [
        by_id[sample.id] for sample in samples if sample.id in by_id and _matches_sample(by_id[sample.id], sample)
    ]
    if not matching:
        raise DataError(f"{path} answers none of the {len(samples):,} samples", "pass the data of the answers")
    if len(matching) < len(samples):
        raise DataError(
            f"{path} answers {len(matching):,} of the {len(samples):,} samples",
            "finish that run, use its limit and circular options, or pass the data of the answers",
        )
    return RecordedAnswers(name, [row.answer for row in matching])


def _matches_sample(record: AnswerRecord, sample: Sample) -> bool:
    """Whether a record answers the sample. Image folders and the prompt around the question may differ."""
    same_media = tuple(Path(key).name for key in record.media) == tuple(
        Path(image_key(one)).name for one in sample.media
    )
    return same_media and (not sample.turns or sample.turns[0].text in record.question)
