"""Questions about charts, documents and texts in pictures: ChartQA, DocVQA, OCRBench, OCR-VQA."""

from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from vitrail.data.formats.files import Folder, Id, folder_for, read_json, read_rows
from vitrail.data.formats.questions import Question, numbered, read_by_id
from vitrail.data.formats.sample import Sample, Samples, asked
from vitrail.errors import ConfigError, DataError, nearest


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


# ── OCR-VQA ────────────────────────────────────────────────────────────────────────────────────────────────────

PARTS = {"train": 1, "val": 2, "test": 3}


class Cover(msgspec.Struct, rename={"author": "authorName"}, kw_only=True):
    """A book's cover with the questions about it, as OCR-VQA's own file and the hub's columns have it."""

    questions: list[str]
    answers: list[str]
    title: str | None = None
    author: str | None = None
    genre: str | None = None

    def asked(self, name: str) -> "list[Asked]":
        """The questions one by one."""
        if len(self.questions) != len(self.answers):
            raise DataError(
                f"cover {name:.80} has {len(self.questions)} questions and {len(self.answers)} answers",
                "leave that one out",
            )
        return [Asked(self, name, n) for n in range(len(self.questions))]


class Asked(NamedTuple):
    cover: Cover
    name: str
    number: int

    def sample(self, shown: tuple[Path | bytes, ...]) -> Sample:
        cover, n = self.cover, self.number
        told = {"title": cover.title, "author": cover.author, "genre": cover.genre}
        return Sample(
            id=f"{self.name}/{n}", pictures=shown, turns=asked(cover.questions[n]), answers=(cover.answers[n],),
            notes={key: value for key, value in told.items() if value is not None},
        )  # fmt: skip


class _Listed(Cover, rename={"author": "authorName", "address": "imageURL"}, kw_only=True):
    address: str
    split: Literal[1, 2, 3]

    def picture(self, folder: Folder, name: str) -> Path:
        """Named by the cover's id, with the ending of its address; LLaVA's keepers call them all .jpg."""
        ending = PurePosixPath(urlsplit(self.address).path).suffix
        try:
            return folder.find(name + ending, name)
        except DataError:
            if ending == ".jpg":
                raise
            return folder.find(f"{name}.jpg", name)


def open_ocrvqa(
    path: Path, *, pictures: str | Path | None = None, anywhere: bool = False, part: str = "test"
) -> Samples:
    """OCR-VQA's `dataset.json`: one object, by cover. It holds all parts (train, val, test), of which one is read, or
    "all"."""
    if part not in (*PARTS, "all"):
        raise ConfigError(f"OCR-VQA has no part {part!r}", nearest(part, [*PARTS, "all"]))
    file = read_by_id(path, _Listed)
    meant = {name: cover for name, cover in file.items() if part == "all" or cover.split == PARTS[part]}
    rows = [one for name, cover in meant.items() for one in cover.asked(name)]
    left = sum(len(cover.questions) for cover in file.values()) - len(rows)
    make = partial(_about_cover, folder_for(path, pictures, anywhere))
    return Samples("ocrvqa", path, rows, make, skipped={"questions of other parts": left} if left else None)


def _about_cover(folder: Folder, row: Asked) -> Sample:
    assert isinstance(row.cover, _Listed)
    return row.sample((row.cover.picture(folder, row.name),))
