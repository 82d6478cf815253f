"""Visual question answering: VQA, GQA, TextVQA, ChartQA, DocVQA, OCRBench, POPE, and parquet versions of these and MME.

A format is the names of its fields (`QuestionFields`), in JSON or as parquet columns.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from vitrail.data.formats.data_files import Id, MediaFolder, read_json, read_json_rows
from vitrail.data.formats.sample import Sample, SampleDataset, build_question_turns, check_unique_ids
from vitrail.errors import ConfigError, DataError

_T = TypeVar("_T")

POPE_SPLITS = ("random", "popular", "adversarial")


class ImageQuestion(NamedTuple):
    """A question about an image, and its answers. `image` is a file name or an id."""

    id: str
    question: str
    answers: tuple[str, ...]
    metadata: Mapping[str, Any]
    image: str = ""
    size: tuple[int, int] | None = None

    def to_sample(self, images: tuple[Path | bytes, ...]) -> Sample:
        turns = build_question_turns(self.question, len(images))
        return Sample(
            id=self.id, images=images, turns=turns, answers=self.answers, size=self.size, metadata=self.metadata
        )


class _AnswerEntry(msgspec.Struct):
    answer: str


class QuestionFields(NamedTuple):
    """Names of the fields of a question.

    answers    one answer, a list, or a list of {"answer": …}; may be missing unless `needs_answers`
    id         questions without an id are numbered
    image      file name or id of the image; None if images are columns of the same row
    metadata   key in `Sample.metadata` → field, and its value if it is missing
    id_prefix  key of the metadata that precedes the id
    is_yes_no  answers are yes or no, converted to lower case
    """

    question: str = "question"
    answers: str = "answers"
    id: str | None = "question_id"
    image: str | None = None
    metadata: Mapping[str, tuple[str, Any]] = {}
    id_prefix: str = ""
    is_yes_no: bool = False
    needs_answers: bool = False

    def define_row(self) -> Any:
        """Define the type of a row, for reading JSON and parquet."""
        answers = str | int | float | list[str | _AnswerEntry]
        names = {"question": self.question, "answers": self.answers, "id": self.id, "image": self.image}
        types: dict[str, tuple[Any, ...]] = {
            "question": (str,),
            "answers": (answers,) if self.needs_answers else (answers | None, None),
            "id": (Id | None, None),
            "image": (Id,),
        }
        members: list[Any] = [(member, *types[member]) for member, name in names.items() if name is not None]
        members += [(field, Any, None) for field, _ in self.metadata.values()]
        return msgspec.defstruct("Question", members, rename={k: v for k, v in names.items() if v}, kw_only=True)

    def to_question(self, row: Any, default_id: str = "", where: str = "") -> ImageQuestion:
        """Convert a row."""
        id_ = getattr(row, "id", None)
        name = default_id if id_ is None else str(id_)
        answers = [] if row.answers is None else row.answers if isinstance(row.answers, list) else [row.answers]
        texts = [entry.answer if isinstance(entry, _AnswerEntry) else str(entry) for entry in answers]
        if self.is_yes_no:
            texts = [parse_yes_no(text, f"{where}question {name}") for text in texts]
        found = {key: getattr(row, field) for key, (field, _) in self.metadata.items()}
        metadata = {key: self.metadata[key][1] if value is None else value for key, value in found.items()}
        name = f"{metadata[self.id_prefix]}/{name}" if self.id_prefix else name
        return ImageQuestion(name, row.question, tuple(texts), metadata, str(getattr(row, "image", "")))


def parse_yes_no(text: str, who: str) -> str:
    """Parse a yes-no answer as lower case."""
    if text.strip().lower() not in ("yes", "no"):
        raise DataError(f"{who} has the answer {text!r:.80}", "give yes or no")
    return text.strip().lower()


def build_dataset(kind: str, path: Path, questions: list[ImageQuestion], folder: MediaFolder) -> SampleDataset:
    """Build the dataset of questions, and check that their ids are unique."""
    check_unique_ids([question.id for question in questions], path)
    return SampleDataset(kind, path, questions, partial(_to_sample, folder))


def _to_sample(folder: MediaFolder, question: ImageQuestion) -> Sample:
    return question.to_sample((folder.find_file(question.image, question.id),))


def _format_image_name(pattern: str, **values: Any) -> str:
    """Build the file name of an image from its pattern."""
    try:
        return pattern.format(**values)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"image_pattern={pattern!r} is not valid: {error!r}",
            f"it may use {', '.join(f'{{{k}}}' for k in values)}",
        ) from error


def _read_list(path: Path, key: str, type_: Any) -> list[Any]:
    """Read the list of rows under a key of a JSON object."""
    return getattr(read_json(path, msgspec.defstruct("File", [(key, list[type_])])), key)


# ── ChartQA, DocVQA, OCRBench ──────────────────────────────────────────────────────────────────────────────────

CHARTQA = QuestionFields("query", "label", None, "imgname", needs_answers=True)
DOCVQA = QuestionFields(id="questionId", image="image", metadata={"types": ("question_types", [])})
OCRBENCH = QuestionFields(
    id="id",
    image="image_path",
    metadata={"dataset": ("dataset_name", ""), "type": ("type", "")},
    needs_answers=True,
)


def open_chartqa(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open ChartQA's `test_human.json` or `test_augmented.json`. Its questions have no ids; they are numbered."""
    rows = read_json_rows(path, CHARTQA.define_row())
    questions = [CHARTQA.to_question(row, str(n))._replace(metadata={"file": path.stem}) for n, row in enumerate(rows)]
    return build_dataset("chartqa", path, questions, folder)


def open_docvqa(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open DocVQA and formats like it (InfographicVQA). The test split has no answers."""
    questions = [DOCVQA.to_question(row) for row in _read_list(path, "data", DOCVQA.define_row())]
    return build_dataset("docvqa", path, questions, folder)


def open_ocrbench(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open OCRBench. Questions without ids are numbered. The task of each question is in its metadata."""
    rows = read_json_rows(path, OCRBENCH.define_row())
    questions = [OCRBENCH.to_question(row, str(n)) for n, row in enumerate(rows)]
    return build_dataset("ocrbench", path, questions, folder)


# ── VQA ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _VqaQuestion(msgspec.Struct):
    question_id: Id
    image_id: int
    question: str


class _VqaQuestions(msgspec.Struct):
    questions: list[_VqaQuestion]
    data_subtype: str = "val2014"


class _VqaAnswers(msgspec.Struct):
    question_id: Id
    image_id: int
    answers: list[_AnswerEntry]
    question_type: str = ""
    answer_type: str = ""


def open_vqa(
    path: Path,
    folder: MediaFolder,
    *,
    annotation_file: str | Path | None = None,
    image_pattern: str = "COCO_{subset}_{id:012d}.jpg",
) -> SampleDataset:
    """Open VQA's questions, with answers if `annotation_file` is given."""
    file = read_json(path, _VqaQuestions)
    subset = file.data_subtype.replace("test-dev", "test")  # both splits share their images
    answers_by_id: dict[Id, _VqaAnswers] = {}
    if annotation_file is not None:
        annotations = _read_list(Path(annotation_file), "annotations", _VqaAnswers)
        check_unique_ids([str(answer.question_id) for answer in annotations], Path(annotation_file))
        answers_by_id = {answer.question_id: answer for answer in annotations}
        _check_same_questions(file.questions, answers_by_id, path, annotation_file)
    questions = []
    for row in file.questions:
        answer = answers_by_id.get(row.question_id)
        questions.append(
            ImageQuestion(
                id=str(row.question_id),
                question=row.question,
                answers=tuple(entry.answer for entry in answer.answers) if answer else (),
                metadata={"question_type": answer.question_type, "answer_type": answer.answer_type} if answer else {},
                image=_format_image_name(image_pattern, subset=subset, id=row.image_id),
            )
        )
    return build_dataset("vqa", path, questions, folder)


def _check_same_questions(
    questions: list[_VqaQuestion], answers: Mapping[Id, _VqaAnswers], path: Path, other: str | Path
) -> None:
    """Check that both files cover the same questions and images."""
    remedy = "give the two files of the same split"
    images = {question.question_id: question.image_id for question in questions}
    if missing := [name for name in images if name not in answers]:
        raise DataError(f"question {missing[0]} of {path} has no answer in {other}", remedy)
    for name, answer in answers.items():
        if name not in images:
            raise DataError(f"{other} answers question {name}, which is not in {path}", remedy)
        if images[name] != answer.image_id:
            raise DataError(f"question {name} has image {images[name]}, its answer has image {answer.image_id}", remedy)


# ── GQA ────────────────────────────────────────────────────────────────────────────────────────────────────────

GQA = QuestionFields(
    answers="answer",
    id=None,
    image="imageId",
    metadata={"full_answer": ("fullAnswer", None), "balanced": ("isBalanced", None), "types": ("types", {})},
)


class _TrackedKey(str):
    """A key decoded through a hook, so that duplicate keys are detected."""


def read_by_id(path: Path, type_: type[_T]) -> dict[str, _T]:
    """Read an object with one row for each id, and refuse duplicate ids."""
    keys: list[str] = []

    def record_key(kind: type, key: Any) -> Any:
        keys.append(key)
        return kind(key)

    file: dict[str, _T] = read_json(path, dict[_TrackedKey, type_], dec_hook=record_key)
    check_unique_ids(keys, path)
    return {str(name): row for name, row in file.items()}


def open_gqa(path: Path, folder: MediaFolder, *, image_pattern: str = "{id}.jpg") -> SampleDataset:
    """Open GQA's questions: one object with an entry for each question id."""
    questions = []
    for name, row in read_by_id(path, GQA.define_row()).items():
        question = GQA.to_question(row, name)
        questions.append(question._replace(image=_format_image_name(image_pattern, id=question.image)))
    return build_dataset("gqa", path, questions, folder)


# ── TextVQA ────────────────────────────────────────────────────────────────────────────────────────────────────

TEXTVQA = QuestionFields(
    image="image_id",
    metadata={
        "ocr_tokens": ("ocr_tokens", []),
        "classes": ("image_classes", []),
        "height": ("image_height", None),
        "width": ("image_width", None),
    },
)


class _OcrRow(msgspec.Struct):
    image_id: str
    ocr_tokens: list[str]


def open_textvqa(
    path: Path,
    folder: MediaFolder,
    *,
    ocr_file: str | Path | None = None,
    image_pattern: str = "{id}.jpg",
) -> SampleDataset:
    """Open TextVQA's questions.

    OCR tokens of the image are in `metadata["ocr_tokens"]`, from the file itself or from `ocr_file`.
    """
    ocr_rows = [] if ocr_file is None else _read_list(Path(ocr_file), "data", _OcrRow)
    tokens = {row.image_id: row.ocr_tokens for row in ocr_rows}
    questions = []
    for row in _read_list(path, "data", TEXTVQA.define_row()):
        question = TEXTVQA.to_question(row)
        image, metadata = question.image, dict(question.metadata)
        if ocr_file is not None and image not in tokens:
            raise DataError(f"image {image} of {path} is not in {ocr_file}", "give the OCR file of the same split")
        size = metadata.pop("height"), metadata.pop("width")
        questions.append(
            question._replace(
                image=_format_image_name(image_pattern, id=image),
                metadata=metadata | ({"ocr_tokens": tokens[image]} if tokens else {}),
                size=size if all(isinstance(side, int) for side in size) else None,
            )
        )
    return build_dataset("textvqa", path, questions, folder)


# ── POPE ───────────────────────────────────────────────────────────────────────────────────────────────────────

POPE = QuestionFields("text", "label", image="image", is_yes_no=True, needs_answers=True)


def open_pope(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open one POPE file, or a folder of the three.

    The split comes from the file name and is part of id and metadata.
    """
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix in (".json", ".jsonl") and _split_of(f))
        if not files:
            raise DataError(
                f"{path} holds no POPE file", f"give .json files named after their split: {', '.join(POPE_SPLITS)}"
            )
    questions = []
    for file in files:
        split = _split_of(file)
        for row in read_json_rows(file, POPE.define_row()):
            question = POPE.to_question(row, where=f"{file}, ")
            name = f"{split}/{question.id}" if split else question.id
            questions.append(question._replace(id=name, metadata={"split": split}))
    return build_dataset("pope", path, questions, folder)


def _split_of(file: Path) -> str:
    return next((split for split in POPE_SPLITS if split in file.name.lower()), "")


# ── columns of the hubs' parquet files ─────────────────────────────────────────────────────────────────────────

QUESTION_COLUMNS = {
    "vqa": QuestionFields(metadata={"question_type": ("question_type", ""), "answer_type": ("answer_type", "")}),
    "textvqa": QuestionFields(metadata={"ocr_tokens": ("ocr_tokens", []), "classes": ("image_classes", [])}),
    "gqa": GQA._replace(id="id"),
    "docvqa": DOCVQA._replace(image=None),
    "chartqa": QuestionFields(answers="answer", id=None, metadata={"file": ("type", "")}, needs_answers=True),
    "ocrbench": QuestionFields(
        answers="answer",
        id=None,
        metadata={"dataset": ("dataset", ""), "type": ("question_type", "")},
        needs_answers=True,
    ),
    "pope": QuestionFields(
        answers="answer",
        metadata={"split": ("category", "")},
        id_prefix="split",
        is_yes_no=True,
        needs_answers=True,
    ),
    "mme": QuestionFields(
        answers="answer", metadata={"category": ("category", "")}, is_yes_no=True, needs_answers=True
    ),
}


class _NeedleRow(msgspec.Struct):
    path: str
    prompt: str
    answer: str


def open_needles(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open needle images of the visual haystack test (LongVA's V-NIAH), each with a question that only it answers.

    The file is a JSON list with `path` of an image, `prompt` and `answer`. Images default to the folder `images` next
    to the file.
    """
    if folder.root == path.parent and (path.parent / "images").is_dir():
        folder = folder._replace(root=path.parent / "images")
    rows = read_json_rows(path, _NeedleRow)
    for row in rows:
        if not row.prompt.strip() or not row.answer.strip():
            raise DataError(f"{path}: the needle {row.path!r:.80} has no prompt or no answer", "add both")
    questions = [  # an image may have two questions, so ids are numbered
        ImageQuestion(f"{n}/{row.path}", row.prompt.strip(), (row.answer.strip(),), {}, row.path)
        for n, row in enumerate(rows)
    ]
    return build_dataset("v-niah", path, questions, folder)
