"""Questions about pictures with known answers: VQA, GQA, TextVQA."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from vitrail.data.formats.files import Folder, Id, folder_for, read_json
from vitrail.data.formats.sample import Sample, Samples, asked, refuse_twins
from vitrail.errors import ConfigError, DataError

_T = TypeVar("_T")


class Question(NamedTuple):
    """A question of any of them, its picture by name."""

    id: str
    picture: str
    question: str
    answers: tuple[str, ...]
    notes: Mapping[str, Any]
    size: tuple[int, int] | None = None


def _sample(folder: Folder, row: Question) -> Sample:
    return Sample(
        id=row.id,
        pictures=(folder.find(row.picture, row.id),),
        turns=asked(row.question),
        answers=row.answers,
        size=row.size,
        notes=row.notes,
    )


def numbered(kind: str, path: Path, rows: list[Question], folder: Folder) -> Samples:
    refuse_twins([row.id for row in rows], path)
    return Samples(kind, path, rows, partial(_sample, folder))


def _named(pattern: str, **about: Any) -> str:
    try:
        return pattern.format(**about)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"picture={pattern!r} does not name pictures: {error!r}",
            f"it may use {', '.join(f'{{{k}}}' for k in about)}",
        ) from error


# ── VQA ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _VqaQuestion(msgspec.Struct):
    question_id: Id
    image_id: int
    question: str


class _VqaQuestions(msgspec.Struct):
    questions: list[_VqaQuestion]
    data_subtype: str = "val2014"


class _Answer(msgspec.Struct):
    answer: str


class _VqaAnswers(msgspec.Struct):
    question_id: Id
    image_id: int
    answers: list[_Answer]
    question_type: str = ""
    answer_type: str = ""


class _VqaAnnotations(msgspec.Struct):
    annotations: list[_VqaAnswers]


def open_vqa(
    path: Path,
    *,
    pictures: str | Path | None = None,
    anywhere: bool = False,
    annotations: str | Path | None = None,
    picture: str = "COCO_{subset}_{id:012d}.jpg",
) -> Samples:
    """VQA's questions, with the people's answers if their file is given (`annotations`)."""
    folder = folder_for(path, pictures, anywhere)
    file = read_json(path, _VqaQuestions)
    subset = file.data_subtype.replace("test-dev", "test")  # they share their pictures
    known: dict[Id, _VqaAnswers] | None = None
    if annotations is not None:
        said = read_json(Path(annotations), _VqaAnnotations).annotations
        refuse_twins([str(answer.question_id) for answer in said], Path(annotations))
        known = {answer.question_id: answer for answer in said}
        _match({question.question_id: question.image_id for question in file.questions}, known, path, annotations)
    rows = []
    for question in file.questions:
        answer = known[question.question_id] if known else None
        rows.append(
            Question(
                id=str(question.question_id),
                picture=_named(picture, subset=subset, id=question.image_id),
                question=question.question,
                answers=tuple(a.answer for a in answer.answers) if answer else (),
                notes={"question_type": answer.question_type, "answer_type": answer.answer_type} if answer else {},
            )
        )
    return numbered("vqa", path, rows, folder)


def _match(questions: Mapping[Id, int], answers: Mapping[Id, _VqaAnswers], path: Path, other: str | Path) -> None:
    """Both files must be of the same questions."""
    remedy = "give the two files of the same split"
    for name in questions:
        if name not in answers:
            raise DataError(f"question {name} of {path} has no answer in {other}", remedy)
    for name, answer in answers.items():
        if name not in questions:
            raise DataError(f"{other} answers question {name}, which is not in {path}", remedy)
        if questions[name] != answer.image_id:
            raise DataError(f"question {name} is of picture {questions[name]}, its answer of {answer.image_id}", remedy)


# ── GQA ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Gqa(msgspec.Struct, rename={"picture": "imageId", "full": "fullAnswer", "balanced": "isBalanced"}):
    question: str
    picture: str
    answer: str | None = None
    full: str | None = None
    balanced: bool | None = None
    types: dict[str, str | None] = {}


class _Key(str):
    """Read through a hook, so that a key that comes twice is noticed."""


def read_by_id(path: Path, kind: type[_T]) -> dict[str, _T]:
    """One object with a row for every id."""
    keys: list[str] = []

    def note(kind: type, key: Any) -> Any:
        keys.append(key)
        return kind(key)

    file: dict[str, _T] = read_json(path, dict[_Key, kind], dec_hook=note)
    refuse_twins(keys, path)
    return {str(name): row for name, row in file.items()}


def open_gqa(
    path: Path, *, pictures: str | Path | None = None, anywhere: bool = False, picture: str = "{id}.jpg"
) -> Samples:
    """GQA's questions: one object, by question id."""
    folder = folder_for(path, pictures, anywhere)
    rows = [
        Question(
            id=name,
            picture=_named(picture, id=row.picture),
            question=row.question,
            answers=() if row.answer is None else (row.answer,),
            notes={"full_answer": row.full, "balanced": row.balanced, "types": row.types},
        )
        for name, row in read_by_id(path, _Gqa).items()
    ]
    return numbered("gqa", path, rows, folder)


# ── TextVQA ────────────────────────────────────────────────────────────────────────────────────────────────────


class _Read(msgspec.Struct):
    image_id: str
    ocr_tokens: list[str]


class _TextVqa(msgspec.Struct):
    question_id: Id
    image_id: str
    question: str
    answers: list[str] = []
    image_height: int | None = None
    image_width: int | None = None
    image_classes: list[str] = []
    ocr_tokens: list[str] | None = None


class _TextVqaFile(msgspec.Struct):
    data: list[_TextVqa]


class _ReadFile(msgspec.Struct):
    data: list[_Read]


def open_textvqa(
    path: Path,
    *,
    pictures: str | Path | None = None,
    anywhere: bool = False,
    ocr: str | Path | None = None,
    picture: str = "{id}.jpg",
) -> Samples:
    """TextVQA's questions; words that a reader found in the picture are in `notes["ocr_tokens"]`, from the file itself
    or from the OCR file beside it (`ocr`)."""
    folder = folder_for(path, pictures, anywhere)
    read = {} if ocr is None else {row.image_id: row.ocr_tokens for row in read_json(Path(ocr), _ReadFile).data}
    rows = []
    for row in read_json(path, _TextVqaFile).data:
        if ocr is not None and row.image_id not in read:
            raise DataError(f"picture {row.image_id} of {path} is not in {ocr}", "give the OCR file of the same split")
        height, width = row.image_height, row.image_width
        rows.append(
            Question(
                id=str(row.question_id),
                picture=_named(picture, id=row.image_id),
                question=row.question,
                answers=tuple(row.answers),
                size=None if height is None or width is None else (height, width),
                notes={"ocr_tokens": read.get(row.image_id, row.ocr_tokens or []), "classes": row.image_classes},
            )
        )
    return numbered("textvqa", path, rows, folder)
