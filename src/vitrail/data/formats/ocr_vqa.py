"""OCR-VQA: questions about book covers."""

from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from vitrail.data.formats.data_files import MediaFolder
from vitrail.data.formats.sample import Sample, SampleDataset, build_question_turns
from vitrail.data.formats.visual_qa import read_by_id
from vitrail.errors import ConfigError, DataError, suggest_name

SPLIT_IDS = {"train": 1, "val": 2, "test": 3}


class BookCover(msgspec.Struct, rename={"author": "authorName"}, kw_only=True):
    """A book cover and its questions, as in OCR-VQA's own file and in the columns of the hub."""

    questions: list[str]
    answers: list[str]
    title: str | None = None
    author: str | None = None
    genre: str | None = None

    def list_questions(self, name: str) -> "list[CoverQuestion]":
        """Return the questions one by one."""
        if len(self.questions) != len(self.answers):
            raise DataError(
                f"cover {name:.80} has {len(self.questions)} questions and {len(self.answers)} answers",
                "remove that cover",
            )
        return [CoverQuestion(self, name, n) for n in range(len(self.questions))]


class CoverQuestion(NamedTuple):
    """One question about a book cover."""

    cover: BookCover
    name: str
    number: int

    def to_sample(self, images: tuple[Path | bytes, ...]) -> Sample:
        cover, n = self.cover, self.number
        metadata = {"title": cover.title, "author": cover.author, "genre": cover.genre}
        return Sample(
            id=f"{self.name}/{n}",
            images=images,
            turns=build_question_turns(cover.questions[n]),
            answers=(cover.answers[n],),
            metadata={key: value for key, value in metadata.items() if value is not None},
        )


class _ListedCover(BookCover, rename={"author": "authorName", "address": "imageURL"}, kw_only=True):
    address: str
    split: Literal[1, 2, 3]

    def find_image(self, folder: MediaFolder, name: str) -> Path:
        """Find the image, named by the cover's id with the suffix of its URL, or with .jpg as in LLaVA's copy."""
        suffix = PurePosixPath(urlsplit(self.address).path).suffix
        try:
            return folder.find_file(name + suffix, name)
        except DataError:
            if suffix == ".jpg":
                raise
            return folder.find_file(f"{name}.jpg", name)


def open_ocrvqa(path: Path, folder: MediaFolder, *, split: str = "test") -> SampleDataset:
    """Open OCR-VQA's `dataset.json`: one object with a book cover for each id.

    `split` is train, val or test, which are all in this file, or "all".
    """
    if split not in (*SPLIT_IDS, "all"):
        raise ConfigError(f"OCR-VQA has no split {split!r}", suggest_name(split, [*SPLIT_IDS, "all"]))
    file = read_by_id(path, _ListedCover)
    selected = {name: cover for name, cover in file.items() if split == "all" or cover.split == SPLIT_IDS[split]}
    rows = [question for name, cover in selected.items() for question in cover.list_questions(name)]
    num_skipped = sum(len(cover.questions) for cover in file.values()) - len(rows)
    make = partial(_to_cover_sample, folder)
    return SampleDataset(
        "ocrvqa", path, rows, make, skipped={"questions of other splits": num_skipped} if num_skipped else None
    )


def _to_cover_sample(folder: MediaFolder, row: CoverQuestion) -> Sample:
    assert isinstance(row.cover, _ListedCover)
    return row.to_sample((row.cover.find_image(folder, row.name),))
