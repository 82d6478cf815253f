"""Benchmarks in the parquet columns of the hubs, as the same samples as from their own files."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

import msgspec

from vitrail.data.formats import hallusion_bench
from vitrail.data.formats.chat_messages import ConversationsRow, MessagesRow
from vitrail.data.formats.choice_options import letter_options, parse_option_list, split_inline_options
from vitrail.data.formats.compositional_captions import WinogroundRow
from vitrail.data.formats.data_files import Id, open_media_folder
from vitrail.data.formats.masks import Instance
from vitrail.data.formats.ocr_vqa import BookCover
from vitrail.data.formats.parquet_table import ParquetTable, is_parquet
from vitrail.data.formats.sample import Sample, SampleDataset, build_question_turns
from vitrail.data.formats.text_choices import ArcRow, HellaSwagRow, PiqaRow, SiqaRow, WinoGrandeRow
from vitrail.data.formats.visual_qa import QUESTION_COLUMNS, ImageQuestion, QuestionFields
from vitrail.errors import ConfigError, DataError

ImageFiles = tuple[bytes | Path, ...]


class _OcrVqa(BookCover, rename={"author": "authorName"}):
    """A cover with several questions."""

    image_id: Id

    def each(self) -> list[Any]:
        return self.list_questions(str(self.image_id))


class _Hallusion(hallusion_bench.HallusionRow):
    def to_sample(self, images: ImageFiles) -> Sample:
        return super().to_sample(() if self.visual_input == "0" else images)


class _RefCocoRow(msgspec.Struct):
    """A referring expression. Of several wordings by people, the first is used."""

    question_id: Id
    answer: list[str]
    bbox: tuple[float, float, float, float]

    def to_sample(self, images: ImageFiles) -> Sample:
        if not self.answer or min(self.bbox[2:]) < 0:
            raise DataError(f"expression {self.question_id} is empty, or its box has no area", "remove that row")
        x, y, w, h = self.bbox
        expression = self.answer[0]
        instances = (Instance(expression, (x, y, x + w, y + h)),)
        return Sample(
            id=str(self.question_id),
            images=images,
            turns=build_question_turns(expression, len(images)),
            instances=instances,
        )


class _CaptionRow(msgspec.Struct):
    """Captions: COCO's `answer`, Flickr30k's `caption` or NoCaps' `annotations_captions`."""

    answer: list[str] | None = None
    caption: list[str] | None = None
    annotations_captions: list[str] | None = None
    question_id: Id = ""
    img_id: Id = ""
    image_id: Id = ""

    def to_sample(self, images: ImageFiles) -> Sample:
        captions = self.answer or self.caption or self.annotations_captions or []
        name = next((str(id_) for id_ in (self.question_id, self.img_id, self.image_id) if id_ != ""), "")
        return Sample(id=name, images=images, captions=tuple(captions))


class _Mmmu(msgspec.Struct):
    """An MMMU question. Images come first, and the text refers to them as <image 1>, as in lmms-eval."""

    id: Id
    question: str
    options: list[str] | str
    answer: str | list[str] = ""
    question_type: str = ""
    subfield: str = ""
    topic_difficulty: str = ""

    @property
    def image_columns(self) -> list[str]:
        """Columns of the images that the text refers to."""
        numbers = re.findall(r"<image (\d)>", f"{self.question} {self.options}")
        return [f"image_{n}" for n in sorted(set(numbers))] or ["image_1"]

    def to_sample(self, images: ImageFiles) -> Sample:
        choices = {} if self.question_type == "open" else letter_options(parse_option_list(self.options))
        listed_answers = parse_option_list(self.answer) if str(self.answer).startswith("[") else [str(self.answer)]
        answers = tuple(answer for answer in listed_answers if answer not in ("", "?"))  # test splits have no answers
        _check_answers(answers, choices)
        subject = re.fullmatch(r"[a-z]+_(.+)_\d+", str(self.id))
        metadata = {"category": subject[1] if subject else "", "subfield": self.subfield, "hard": self.topic_difficulty}
        turns = build_question_turns(self.question, len(images))
        return Sample(id=str(self.id), images=images, turns=turns, answers=answers, choices=choices, metadata=metadata)


class _RealWorldQa(msgspec.Struct):
    """A RealWorldQA question. Its options, if any, are part of the question text; otherwise the answer is a word or a
    number."""

    question: str
    answer: str

    def to_sample(self, images: ImageFiles) -> Sample:
        question, choices = split_inline_options(self.question)
        _check_answers((self.answer,), choices)
        return Sample(
            id="",
            images=images,
            turns=build_question_turns(question, len(images)),
            answers=(self.answer,),
            choices=choices,
        )


def _check_answers(answers: Sequence[str], choices: Mapping[str, str]) -> None:
    """Raise `DataError` if an answer is not among the choices."""
    wrong = next((answer for answer in answers if choices and answer not in choices), None)
    if wrong is not None:
        raise DataError(f"the answer {wrong!r:.80} is none of {', '.join(choices)}", "remove that row")


def _to_choice_sample(row: Mapping[str, Any], images: ImageFiles) -> Sample:
    """Convert a row of a multiple-choice benchmark.

    Options are the columns A, B, … (MMBench), `choice_a`, … (SEED), a list `options` (AI2D) or `choices` (ScienceQA),
    or part of the question (MMStar). The answer is a letter or a number.
    """
    question = str(row["question"])
    if option_list := row.get("options") or row.get("choices"):
        texts = letter_options(parse_option_list(option_list))
    else:
        columns = ((letter, row.get(letter) or row.get(f"choice_{letter.lower()}")) for letter in ascii_uppercase)
        texts = {letter: str(text) for letter, text in columns if text and str(text) != "nan"}
    if not texts:
        question, texts = split_inline_options(question)
    answer_cell = row.get("answer")
    answer = "" if answer_cell is None else str(answer_cell).strip()
    answer = ascii_uppercase[int(answer)] if answer.isdecimal() and int(answer) < len(texts) else answer
    if not texts:
        raise DataError(f"the question {question!r:.80} has no options", "remove that row")
    _check_answers((answer,) if answer else (), texts)
    number = next((row[name] for name in ("index", "question_id") if row.get(name) is not None), "")
    hint = row.get("hint")
    metadata_columns = ("category", "l2_category", "L2-category", "source", "data_type", "subject")
    return Sample(
        id=str(number),
        images=images,
        turns=build_question_turns(question, len(images)),
        answers=(answer,) if answer else (),
        choices=texts,
        hint="" if hint is None or str(hint) == "nan" else str(hint),
        metadata={name: row[name] for name in metadata_columns if row.get(name) is not None},
    )


class _ColumnFormat(NamedTuple):
    """The row type or the question fields of a benchmark, the columns that identify it, and its image columns."""

    row: Any
    columns: str
    image_columns: tuple[str, ...] = ("image",)
    has_optional_images: bool = False  # whether image columns may be missing


# The first match wins.
COLUMN_FORMATS: dict[str, _ColumnFormat] = {
    "messages": _ColumnFormat(MessagesRow, "messages", ("images", "image"), True),
    "llava": _ColumnFormat(ConversationsRow, "conversations", ("images", "image"), True),
    "hallusion": _ColumnFormat(_Hallusion, "visual_input figure_id gt_answer"),
    "winoground": _ColumnFormat(WinogroundRow, "image_0 image_1 caption_0 caption_1", ("image_0", "image_1")),
    "refcoco": _ColumnFormat(_RefCocoRow, "question_id answer bbox image"),
    "gqa": _ColumnFormat(QUESTION_COLUMNS["gqa"], "imageId question", ()),
    "docvqa": _ColumnFormat(QUESTION_COLUMNS["docvqa"], "questionId question image"),
    "textvqa": _ColumnFormat(QUESTION_COLUMNS["textvqa"], "question_id question image_classes image"),
    "vqa": _ColumnFormat(QUESTION_COLUMNS["vqa"], "question_id question question_type image"),
    "ocrbench": _ColumnFormat(QUESTION_COLUMNS["ocrbench"], "dataset question question_type answer image"),
    "ocrvqa": _ColumnFormat(_OcrVqa, "image_id questions answers image"),
    "mmmu": _ColumnFormat(_Mmmu, "id question options question_type image_1", tuple(f"image_{n}" for n in range(1, 8))),
    "mmbench": _ColumnFormat(None, "question image"),
    "pope": _ColumnFormat(QUESTION_COLUMNS["pope"], "question_id question answer image_source category image"),
    "mme": _ColumnFormat(QUESTION_COLUMNS["mme"], "question_id question answer category image"),
    "chartqa": _ColumnFormat(QUESTION_COLUMNS["chartqa"], "type question answer image"),
    "realworldqa": _ColumnFormat(_RealWorldQa, "question answer image"),
    "coco-captions": _ColumnFormat(_CaptionRow, "image"),
    "arc": _ColumnFormat(ArcRow, "id question choices answerKey", ()),
    "hellaswag": _ColumnFormat(HellaSwagRow, "activity_label ctx_a ctx_b endings", ()),
    "piqa": _ColumnFormat(PiqaRow, "goal sol1 sol2", ()),
    "siqa": _ColumnFormat(SiqaRow, "context question answerA answerB answerC", ()),
    "winogrande": _ColumnFormat(WinoGrandeRow, "sentence option1 option2", ()),
}
# the last is MMStar's
_OPTION_COLUMNS = ({"A", "B"}, {"choice_a", "choice_b"}, {"options"}, {"choices"}, {"l2_category"})
_CAPTION_COLUMNS = ("answer", "caption", "annotations_captions")


def detect_columns(path: Path) -> str:
    """Detect which of `COLUMN_FORMATS` the columns of a parquet file are."""
    columns = ParquetTable(path).columns
    for name in COLUMN_FORMATS:
        if _matches(name, columns):
            return name
    raise DataError(
        f"{path}: no known benchmark has the columns {', '.join(sorted(columns))!s:.200}",
        f"known: {', '.join(COLUMN_FORMATS)}",
    )


def _matches(name: str, columns: set[str]) -> bool:
    if name == "mmbench" and not any(some <= columns for some in _OPTION_COLUMNS):
        return False
    if name == "coco-captions" and not any(some in columns for some in _CAPTION_COLUMNS):
        return False
    if name == "realworldqa" and "question_id" in columns:  # caption sets with a constant question
        return False
    return columns.issuperset(COLUMN_FORMATS[name].columns.split())


def open_columns(
    format_name: str,
    path: Path,
    *,
    image_folder: str | Path | None = None,
    allow_outside: bool = False,
    image_pattern: str = "{id}.jpg",
) -> SampleDataset:
    """Open a benchmark in the parquet format of a hub.

    Only GQA stores its images separately: `image_folder` names the parquet files that hold them, or a folder whose file
    names follow `image_pattern`.
    """
    if format_name not in COLUMN_FORMATS:
        raise ConfigError(
            f"{path}: the format {format_name!r} has no parquet version", f"known: {', '.join(COLUMN_FORMATS)}"
        )
    table, column_format = ParquetTable(path), COLUMN_FORMATS[format_name]
    if not _matches(format_name, table.columns):
        raise DataError(
            f"{path} has the columns {', '.join(sorted(table.columns))!r:.200}",
            f"expected for {format_name!r}: {', '.join(column_format.columns.split())}",
        )
    if image_folder is not None and format_name != "gqa":
        raise ConfigError(f"{path} contains its images", "leave `image_folder` out")
    is_separate, image_columns = format_name == "gqa", column_format.image_columns
    if column_format.has_optional_images:
        image_columns = tuple(column for column in image_columns if column in table.image_columns)
    find = (
        _open_separate_images(path, image_folder, allow_outside, image_pattern)
        if is_separate
        else partial(_read_row_images, table, image_columns)
    )
    rows = list(_parse_rows(column_format.row, table))
    # Ids do not depend on images, so no image is read to number the samples.
    ids = _make_unique([_to_sample(table, n, parsed, ()).id for n, parsed in rows])

    def make(number: int) -> Sample:
        n, parsed = rows[number]
        return replace(_to_sample(table, n, parsed, find(n, parsed)), id=ids[number])

    return SampleDataset(format_name, path, range(len(rows)), make)


def _get_parser(kind: Any) -> Callable[[dict[str, Any]], list[Any]]:
    """Return a function that parses a row as one sample, or as several by its method `each`."""
    if kind is None:
        return lambda cells: [cells]
    if isinstance(kind, QuestionFields):
        row_type = kind.define_row()
        return lambda cells: [kind.to_question(msgspec.convert(cells, row_type, strict=False))]

    def parse(cells: dict[str, Any]) -> list[Any]:
        row = msgspec.convert(cells, kind, strict=False)
        return row.each() if hasattr(row, "each") else [row]

    return parse


def _parse_rows(kind: Any, table: ParquetTable) -> Iterator[tuple[int, Any]]:
    """Yield the samples of all rows, with their row numbers."""
    parse = _get_parser(kind)
    for n, cells in enumerate(table):
        try:
            yield from ((n, parsed) for parsed in parse(cells))
        except msgspec.ValidationError as error:
            raise DataError(f"{table.path}, row {n}: {error}", "check that this is the right dataset") from error
        except DataError as error:
            raise DataError(f"{table.path}, row {n}: {error.problem}", error.remedy) from error


def _to_sample(table: ParquetTable, n: int, row: Any, images: ImageFiles) -> Sample:
    try:
        return _to_choice_sample(row, images) if isinstance(row, dict) else row.to_sample(images)
    except DataError as error:
        raise DataError(f"{table.path}, row {n}: {error.problem}", error.remedy) from error


def _make_unique(names: list[str]) -> list[str]:
    """Number rows without an id, and make repeated ids unique (MME has two questions for each image)."""
    counts, seen = Counter(names), Counter()
    unique = []
    for n, name in enumerate(names):
        unique.append(f"{name}/{seen[name]}" if name and counts[name] > 1 else name or str(n))
        seen[name] += 1
    return unique


def _read_row_images(table: ParquetTable, columns: tuple[str, ...], n: int, row: Any) -> ImageFiles:
    mentioned = getattr(row, "image_columns", None)  # image columns that the row mentions
    columns = columns if mentioned is None else tuple(column for column in mentioned if column in table.image_columns)
    images = [table.read_images(n, column) for column in columns]
    if mentioned is not None and (len(columns) < len(mentioned) or not all(images)):
        raise DataError(f"{table.path}, row {n} refers to an image that it does not have", "remove that row")
    return tuple(image for column_images in images for image in column_images)


def _open_separate_images(
    path: Path, image_folder: str | Path | None, allow_outside: bool, image_pattern: str
) -> Callable[[int, ImageQuestion], ImageFiles]:
    """Open images in files of their own: parquet with `id` and `image`, or a folder."""
    if image_folder is None:
        raise ConfigError(f"{path} does not contain its images", "give their files or folder as `image_folder`")
    if not is_parquet(Path(image_folder)):
        folder = open_media_folder(path, image_folder, allow_outside)
        return lambda _n, row: (folder.find_file(image_pattern.format(id=row.image), str(row.id)),)
    table = ParquetTable(Path(image_folder))
    row_of_id = {str(row.get("id")): n for n, row in enumerate(table)}

    def find(n: int, row: ImageQuestion) -> ImageFiles:
        if row.image not in row_of_id:
            raise DataError(
                f"image {row.image} of {path}, row {n}, is not in {image_folder}", "give the images of the same split"
            )
        return table.read_images(row_of_id[row.image])

    return find
