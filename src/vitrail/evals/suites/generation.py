"""Generates a model's answers to samples, in batches, and saves each answer to a file as it comes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from vitrail.data.formats import Sample
from vitrail.data.formats.data_files import decode_json, read_bytes
from vitrail.data.formats.sample import show_progress
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.evals.metrics.scoring_table import image_key

_LINE_START = b'{"model":'  # start of every line of an answers file


class ImageQuestionModel(Protocol):
    """A model that answers questions about images, such as `vitrail.load(folder)`."""

    def ask(self, images: Any, question: str, /, **options: Any) -> str: ...


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A saved answer with its model, question, image keys and options: one JSON line of an answers file."""

    model: str
    id: str
    question: str
    media: tuple[str, ...] = ()
    blind: bool
    options: dict[str, Any]
    answer: str


class ImageQuestion(NamedTuple):
    """A question about a sample, with its images and videos."""

    sample: Sample
    text: str
    media: Any


BatchAnswerFn = Callable[..., list[str]]
"""(media of each question, questions) → answers, equal to those of single questions; as `ChatPipeline.ask_batch`."""


def generate_answers(
    model: ImageQuestionModel,
    samples: Sequence[Sample],
    build_question: Callable[[Sample], str],
    *,
    answer_batch: BatchAnswerFn | None = None,
    batch_size: int = 1,
    blind: bool = False,
    no_images: Any = (),
    answers_file: Path | None = None,
    model_name: str = "",
    **options: Any,
) -> list[str]:
    """Generate one answer per sample.

    answer_batch  answers several questions at once; if it is None or fails, questions are asked one by one
    blind         ask without images and videos
    no_images     media of questions without images: (), or a blank image for models that need one
    answers_file  file of JSON lines to which answers are appended. Questions that it already answers, with the same
                  model, media and options, are not asked again
    options       generation options for the model
    """

    def ask(questions: Sequence[ImageQuestion]) -> Iterator[str]:
        if answer_batch is not None and len(questions) > 1:
            try:
                texts = answer_batch([item.media for item in questions], [item.text for item in questions], **options)
            except VitrailError:
                pass  # for example videos: asked one by one, each is answered or raises its own error
            else:
                yield from texts
                return
        for item in questions:
            texts = model.ask(item.media, item.text, **options)
            if not isinstance(texts, str):
                raise ConfigError(
                    f"sample {item.sample.id} has {len(item.media)} images, but the model supports one image per "
                    "question",
                    "use a model that supports several images",
                )
            yield texts

    return run_questions(
        ask,
        samples,
        build_question,
        batch_size=batch_size,
        blind=blind,
        no_images=no_images,
        answers_file=answers_file,
        model_name=model_name,
        options=options,
    )


def run_questions(
    answer_questions: Callable[[Sequence[ImageQuestion]], Iterator[str]],
    samples: Sequence[Sample],
    build_question: Callable[[Sample], str],
    *,
    batch_size: int,
    blind: bool,
    no_images: Any,
    answers_file: Path | None,
    model_name: str,
    options: dict[str, Any],
) -> list[str]:
    """Answer questions in batches with `answer_questions`, except those that the answers file already answers."""
    if batch_size < 1:
        raise ConfigError(f"batch size {batch_size}", "set at least 1")
    saved, partial_bytes = load_answer_records(answers_file)
    answer_of: dict[int, str] = {}
    pending: dict[bool, list[tuple[int, AnswerRecord, ImageQuestion]]] = {False: [], True: []}
    with _open_answers_file(answers_file, partial_bytes) as add:

        def run_batch(group: list[tuple[int, AnswerRecord, ImageQuestion]]) -> None:
            try:
                for (n, saved_record, _), answer in zip(
                    group, answer_questions([item for *_, item in group]), strict=True
                ):
                    add(msgspec.structs.replace(saved_record, answer=answer))
                    answer_of[n] = answer
            except torch.OutOfMemoryError:
                raise ConfigError(
                    f"out of memory with a batch of {len(group)} questions", "use a smaller batch"
                ) from None
            group.clear()

        for n, sample in enumerate(show_progress(samples, "blind" if blind else "answers")):
            text, media = build_question(sample), () if blind else sample.media
            key = tuple(map(image_key, media))
            record = AnswerRecord(
                model=model_name, id=sample.id, question=text, media=key, blind=blind, options=options, answer=""
            )
            if (saved_record := saved.get(_record_key(record))) is not None:
                answer_of[n] = saved_record.answer
                continue
            # Batches never mix questions with and without images: the vision tower runs for all of them or for none.
            group = pending[bool(media)]
            item = media[0] if len(media) == 1 else list(media) if media else no_images
            group.append((n, record, ImageQuestion(sample, text, item)))
            if len(group) == batch_size:
                run_batch(group)
        for group in filter(None, pending.values()):
            run_batch(group)
    return [answer_of[n] for n in range(len(answer_of))]


def load_answer_records(answers_file: Path | None) -> tuple[dict[bytes, AnswerRecord], int]:
    """Load the records of an answers file, and the number of bytes of an incomplete last line."""
    if answers_file is None or not answers_file.exists() or not answers_file.stat().st_size:
        return {}, 0
    data = read_bytes(answers_file)
    complete, partial = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
    lines = enumerate(complete.splitlines(), start=1)
    rows = [decode_json(line, AnswerRecord, f"{answers_file}, line {number}") for number, line in lines if line.strip()]
    if not _LINE_START.startswith(partial[: len(_LINE_START)]):
        raise DataError(f"{answers_file} does not end with an answer: {partial[:40]!r}", "use another file")
    return {_record_key(row): row for row in rows}, len(partial)


def _record_key(record: AnswerRecord) -> bytes:
    """The record without its answer, as a dictionary key."""
    return msgspec.json.encode(msgspec.structs.replace(record, answer=""), order="sorted")


@contextmanager
def _open_answers_file(answers_file: Path | None, partial_bytes: int) -> Iterator[Callable[[AnswerRecord], None]]:
    """Open the answers file for appending, without the incomplete last line."""
    if answers_file is None:
        yield lambda _row: None
        return
    try:
        answers_file.parent.mkdir(parents=True, exist_ok=True)
        file = answers_file.open("ab")
        file.truncate(file.tell() - partial_bytes)
    except OSError as error:
        raise DataError(f"{answers_file} cannot be written: {error.strerror}", "use another file") from None
    with file:

        def add(row: AnswerRecord) -> None:
            file.write(msgspec.json.encode(row) + b"\n")
            file.flush()

        yield add
