"""Yes-or-no questions about pictures: POPE's lines, MME's tables and folders. Labels come in small letters."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from vitrail.data.formats.files import Folder, Id, folder_for, read_rows, read_text
from vitrail.data.formats.folders import PICTURES
from vitrail.data.formats.questions import Question, numbered
from vitrail.data.formats.sample import Sample, Samples, asked, progress
from vitrail.data.formats.tables import Place, Table, read_table
from vitrail.errors import DataError


def yes_or_no(text: str, who: str) -> str:
    """The label in small letters."""
    if text.strip().lower() not in ("yes", "no"):
        raise DataError(f"{who} has the answer {text!r:.80}", "only yes and no are possible here")
    return text.strip().lower()


# ── POPE ───────────────────────────────────────────────────────────────────────────────────────────────────────

SPLITS = ("random", "popular", "adversarial")


class _Pope(msgspec.Struct):
    question_id: Id
    image: str
    text: str
    label: str


def open_pope(path: Path, *, pictures: str | Path | None = None, anywhere: bool = False) -> Samples:
    """One POPE file, or a folder of the three; the split, from the file's name, is in the id and in the notes."""
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix in (".json", ".jsonl") and _split(f))
        if not files:
            raise DataError(f"{path} holds no POPE file", f"names hold one of {', '.join(SPLITS)} and end in .json")
    folder = folder_for(files[0], pictures, anywhere)
    rows = []
    for file in files:
        split = _split(file)
        for row in read_rows(file, _Pope):
            rows.append(
                Question(
                    id=f"{split}/{row.question_id}" if split else str(row.question_id),
                    picture=row.image,
                    question=row.text,
                    answers=(yes_or_no(row.label, f"{file}, question {row.question_id}"),),
                    notes={"split": split},
                )
            )
    return numbered("pope", path, rows, folder)


def _split(file: Path) -> str:
    return next((split for split in SPLITS if split in file.name.lower()), "")


# ── MME ────────────────────────────────────────────────────────────────────────────────────────────────────────


def open_mme(path: Path, *, anywhere: bool = False) -> Samples:
    """MME as a TSV (index, image, question, answer), or as its folders: a category each, with a text file a picture
    whose lines are question, tab, Yes or No."""
    if path.is_dir():
        return _open_mme_folder(path, anywhere)
    table = read_table(path, ("index", "question", "image", "answer"))
    return Samples("mme", path, table.rows, partial(_judged, table))


def _judged(table: Table, row: Place) -> Sample:
    cells = dict(row.cells)
    name, question, answer = cells.pop("index"), cells.pop("question"), cells.pop("answer")
    label = yes_or_no(answer, f"{table.path}, line {row.line}")
    shown = table.pictures(row)
    return Sample(id=name, pictures=shown, turns=asked(question, len(shown)), answers=(label,), notes=cells)


class _Asked(NamedTuple):
    id: str
    picture: str  # below the root
    question: str
    answer: str
    category: str


def _open_mme_folder(path: Path, anywhere: bool) -> Samples:
    rows = []
    categories = sorted(p for p in path.iterdir() if p.is_dir())
    for category in progress(categories, path.name):
        texts = sorted([*category.glob("*.txt"), *category.glob("questions_answers_YN/*.txt")])
        shown = [*category.iterdir(), *category.glob("images/*")]
        by_stem = {p.stem: p for p in sorted(shown) if p.suffix.lower() in PICTURES}
        for text in texts:
            if text.stem not in by_stem:
                raise DataError(f"no picture goes with {text}", f"put {text.stem}.jpg beside it or into images/")
            rows += _pairs(text, category.name, by_stem[text.stem].relative_to(path).as_posix())
    return Samples("mme", path, rows, partial(_from_text, folder_for(path, path, anywhere)))


def _pairs(text: Path, category: str, picture: str) -> Iterator[_Asked]:
    for number, line in enumerate(filter(str.strip, read_text(text).splitlines())):
        question, tab, answer = line.rstrip().rpartition("\t")
        if not tab:
            raise DataError(f"{text}: line {number + 1} has no tab", "write question, tab, Yes or No")
        label = yes_or_no(answer, f"{text}, line {number + 1}")
        yield _Asked(f"{category}/{text.stem}/{number}", picture, question.strip(), label, category)


def _from_text(folder: Folder, row: _Asked) -> Sample:
    return Sample(
        id=row.id,
        pictures=(folder.find(row.picture, row.id),),
        turns=asked(row.question),
        answers=(row.answer,),
        notes={"category": row.category},
    )
