"""Answers that were kept, laid beside the samples that they are the answers to."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vitrail.data.formats import Sample
from vitrail.errors import ConfigError, DataError, nearest
from vitrail.evals.suites.answered import Row, kept
from vitrail.evals.suites.sheets import key_of


class Kept(NamedTuple):
    model: str
    answers: list[str]


def read(path: Path, samples: Sequence[Sample], model: str | None = None) -> Kept:
    """A model's answers to samples, in their order, from a file of `vitrail eval … --answers`. It is refused where
    one is missing, or was about something else; a file of several models needs the name of one."""
    if not path.is_file():
        raise DataError(f"{path} does not exist", "give a file that --answers wrote")
    rows = [row for row in kept(path)[0].values() if not row.blind]
    models = list(dict.fromkeys(row.model for row in rows))
    if not rows:
        raise DataError(f"{path} holds no answers", "give a file that --answers wrote")
    if model is None and len(models) > 1:
        raise ConfigError(f"{path} holds answers of {', '.join(models)}", "say which with --models")
    if model is not None and model not in models:
        raise ConfigError(f"{path} holds no answers of {model!r}", nearest(model, models))
    name = models[0] if model is None else model
    by_id: dict[str, Row] = {}
    for row in rows:
        if row.model == name and by_id.setdefault(row.id, row) is not row:
            raise DataError(
                f"{path} holds two answers of {name} to {row.id!r}, asked otherwise",
                "keep what is asked otherwise in another file",
            )
    found = [by_id[sample.id] for sample in samples if sample.id in by_id and _about(by_id[sample.id], sample)]
    if not found:
        raise DataError(f"{path} answers none of the {len(samples):,} samples", "it is of other data: give that data")
    if len(found) < len(samples):
        raise DataError(
            f"{path} answers {len(found):,} of the {len(samples):,} samples",
            "let that run end, and say limit and circular as it had them; or it is of other data",
        )
    return Kept(name, [row.answer for row in found])


def _about(row: Row, sample: Sample) -> bool:
    """Whether it is the answer to this. Pictures may lie elsewhere now, and questions be in another prompt."""
    shown = tuple(Path(key).name for key in row.pictures) == tuple(Path(key_of(one)).name for one in sample.shown)
    return shown and (not sample.turns or sample.turns[0].text in row.question)
