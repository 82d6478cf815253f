"""Questions about charts, documents and texts in pictures: ChartQA, DocVQA, OCRBench."""

from pathlib import Path

import msgspec

from vitrail.data.formats.files import Id, folder_for, read_json, read_rows
from vitrail.data.formats.questions import Question, numbered
from vitrail.data.formats.sample import Samples


class _Chart(msgspec.Struct):
    imgname: str
    query: str
    label: str


class _Document(msgspec.Struct, rename={"id": "questionId"}):
    id: Id
    question: str
    image: str
    answers: list[str] = []
    question_types: list[str] | None = None


class _Documents(msgspec.Struct):
    data: list[_Document]


class _Read(msgspec.Struct):
    image_path: str
    question: str
    answers: str | int | float | list[str]
    dataset_name: str = ""
    type: str = ""
    id: Id | None = None


def open_chartqa(path: Path, *, pictures: str | Path | None = None, anywhere: bool = False) -> Samples:
    """ChartQA's `test_human.json` or `test_augmented.json`. Its questions have no ids: they are numbered."""
    rows = [
        Question(str(n), row.imgname, row.query, (row.label,), {"file": path.stem})
        for n, row in enumerate(read_rows(path, _Chart))
    ]
    return numbered("chartqa", path, rows, folder_for(path, pictures, anywhere))


def open_docvqa(path: Path, *, pictures: str | Path | None = None, anywhere: bool = False) -> Samples:
    """DocVQA and what shares its form (InfographicVQA); of the test part the answers are not known."""
    rows = [
        Question(str(row.id), row.image, row.question, tuple(row.answers), {"types": row.question_types or []})
        for row in read_json(path, _Documents).data
    ]
    return numbered("docvqa", path, rows, folder_for(path, pictures, anywhere))


def open_ocrbench(path: Path, *, pictures: str | Path | None = None, anywhere: bool = False) -> Samples:
    """OCRBench's questions, numbered where they have no ids; `notes` say which task each is of."""
    rows = []
    for n, row in enumerate(read_rows(path, _Read)):
        answers = tuple(row.answers) if isinstance(row.answers, list) else (str(row.answers),)
        name = str(n if row.id is None else row.id)
        about = {"dataset": row.dataset_name, "type": row.type}
        rows.append(Question(name, row.image_path, row.question, answers, about))
    return numbered("ocrbench", path, rows, folder_for(path, pictures, anywhere))
