"""MME's yes-no questions, from a TSV table or from folders."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from vitrail.data.formats.data_files import MediaFolder, read_text
from vitrail.data.formats.media_folders import IMAGE_SUFFIXES
from vitrail.data.formats.sample import Sample, SampleDataset, build_question_turns, show_progress
from vitrail.data.formats.tsv_table import TableRow, TsvTable, read_table
from vitrail.data.formats.visual_qa import ImageQuestion, build_dataset, parse_yes_no
from vitrail.errors import DataError


def open_mme(path: Path, *, allow_outside: bool = False) -> SampleDataset:
    """Open MME as a TSV (index, image, question, answer), or as folders.

    Each category is a folder with one text file for each image, whose lines are question, tab, Yes or No.
    """
    if path.is_dir():
        return _open_mme_folder(path, allow_outside)
    table = read_table(path, ("index", "question", "image", "answer"))
    return SampleDataset("mme", path, table.rows, partial(_to_table_sample, table))


def _to_table_sample(table: TsvTable, row: TableRow) -> Sample:
    cells = dict(row.cells)
    name, question, answer = cells.pop("index"), cells.pop("question"), cells.pop("answer")
    label = parse_yes_no(answer, f"{table.path}, line {row.line}")
    images = table.read_images(row)
    return Sample(
        id=name, images=images, turns=build_question_turns(question, len(images)), answers=(label,), metadata=cells
    )


def _open_mme_folder(path: Path, allow_outside: bool) -> SampleDataset:
    questions = []
    categories = sorted(p for p in path.iterdir() if p.is_dir())
    for category in show_progress(categories, path.name):
        texts = sorted([*category.glob("*.txt"), *category.glob("questions_answers_YN/*.txt")])
        files = [*category.iterdir(), *category.glob("images/*")]
        by_stem = {p.stem: p for p in sorted(files) if p.suffix.lower() in IMAGE_SUFFIXES}
        for text in texts:
            if text.stem not in by_stem:
                raise DataError(f"no image belongs to {text}", f"put {text.stem}.jpg next to it or into images/")
            questions += _read_questions(text, category.name, by_stem[text.stem].relative_to(path).as_posix())
    return build_dataset("mme", path, questions, MediaFolder(path, allow_outside))


def _read_questions(text: Path, category: str, image: str) -> Iterator[ImageQuestion]:
    for number, line in enumerate(filter(str.strip, read_text(text).splitlines())):
        question, tab, answer = line.rstrip().rpartition("\t")
        if not tab:
            raise DataError(f"{text}: line {number + 1} has no tab", "write question, tab, Yes or No")
        label = parse_yes_no(answer, f"{text}, line {number + 1}")
        yield ImageQuestion(
            f"{category}/{text.stem}/{number}", question.strip(), (label,), {"category": category}, image
        )
