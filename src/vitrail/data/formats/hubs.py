"""Benchmarks in the columns that the hubs keep them in, as parquet: the same samples as of their own files."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

import msgspec

from vitrail.data.formats import hallusion
from vitrail.data.formats.documents import Cover
from vitrail.data.formats.files import Id, folder_for
from vitrail.data.formats.masks import Instance
from vitrail.data.formats.options import lettered, listed, within
from vitrail.data.formats.parquet import Table, is_parquet
from vitrail.data.formats.sample import Sample, Samples, asked
from vitrail.data.formats.texts import ArcColumns, HellaSwag, Piqa, Siqa, WinoGrande
from vitrail.data.formats.yesno import yes_or_no
from vitrail.errors import ConfigError, DataError

Shown = tuple[bytes | Path, ...]


class _Answered(msgspec.Struct):
    answer: str


class _Vqa(msgspec.Struct):
    question_id: Id
    question: str
    answers: list[_Answered] | None = None
    question_type: str | None = None
    answer_type: str | None = None

    def sample(self, shown: Shown) -> Sample:
        notes = {"question_type": self.question_type or "", "answer_type": self.answer_type or ""}
        return _question(self.question_id, shown, self.question, [one.answer for one in self.answers or ()], **notes)


class _TextVqa(msgspec.Struct):
    question_id: Id
    question: str
    answers: list[str] | None = None
    image_classes: list[str] | None = None
    ocr_tokens: list[str] | None = None

    def sample(self, shown: Shown) -> Sample:
        notes = {"ocr_tokens": self.ocr_tokens or [], "classes": self.image_classes or []}
        return _question(self.question_id, shown, self.question, self.answers, **notes)


class _Gqa(msgspec.Struct, rename={"picture": "imageId", "full": "fullAnswer", "balanced": "isBalanced"}):
    id: Id
    picture: str
    question: str
    answer: str | None = None
    full: str | None = None
    balanced: bool | None = None
    types: dict[str, str | None] = {}

    def sample(self, shown: Shown) -> Sample:
        notes = {"full_answer": self.full, "balanced": self.balanced, "types": self.types}
        return _question(self.id, shown, self.question, [self.answer] if self.answer is not None else None, **notes)


class _DocVqa(msgspec.Struct, rename={"id": "questionId"}):
    id: Id
    question: str
    answers: list[str] | None = None
    question_types: list[str] | None = None

    def sample(self, shown: Shown) -> Sample:
        return _question(self.id, shown, self.question, self.answers, types=self.question_types or [])


class _ChartQa(msgspec.Struct):
    question: str
    answer: str
    type: str = ""

    def sample(self, shown: Shown) -> Sample:
        return _question("", shown, self.question, [self.answer], file=self.type)


class _OcrBench(msgspec.Struct):
    question: str
    answer: str | list[str]
    dataset: str = ""
    question_type: str = ""

    def sample(self, shown: Shown) -> Sample:
        answers = self.answer if isinstance(self.answer, list) else [self.answer]
        return _question("", shown, self.question, answers, dataset=self.dataset, type=self.question_type)


class _OcrVqa(Cover, rename={"author": "authorName"}):
    """Of one cover several questions."""

    image_id: Id

    def each(self) -> list[Any]:
        return self.asked(str(self.image_id))


class _YesNo(msgspec.Struct):
    question_id: Id
    question: str
    answer: str
    category: str

    @property
    def label(self) -> list[str]:
        return [yes_or_no(self.answer, f"question {self.question_id}")]


class _Pope(_YesNo):
    def sample(self, shown: Shown) -> Sample:
        name = f"{self.category}/{self.question_id}"
        return _question(name, shown, self.question, self.label, split=self.category)


class _Mme(_YesNo):
    def sample(self, shown: Shown) -> Sample:
        return _question(self.question_id, shown, self.question, self.label, category=self.category)


class _Hallusion(hallusion.Row):
    def sample(self, shown: Shown) -> Sample:
        return self.told(() if self.visual_input == "0" else shown)


class _Winoground(msgspec.Struct):
    id: Id
    caption_0: str
    caption_1: str
    tag: str | None = None
    collapsed_tag: str | None = None

    def sample(self, shown: Shown) -> Sample:
        notes = {"tag": self.collapsed_tag or self.tag or ""}
        return Sample(id=str(self.id), pictures=shown, captions=(self.caption_0, self.caption_1), notes=notes)


class _Expression(msgspec.Struct):
    """Of the several ways in which people said the same, the first."""

    question_id: Id
    answer: list[str]
    bbox: tuple[float, float, float, float]

    def sample(self, shown: Shown) -> Sample:
        if not self.answer or min(self.bbox[2:]) < 0:
            raise DataError(f"expression {self.question_id} has no words, or a box of no size", "leave that row out")
        x, y, w, h = self.bbox
        said = self.answer[0]
        meant = (Instance(said, (x, y, x + w, y + h)),)
        return Sample(id=str(self.question_id), pictures=shown, turns=asked(said, len(shown)), instances=meant)


class _Captioned(msgspec.Struct):
    """COCO's `answer`, Flickr30k's `caption`, NoCaps' `annotations_captions`."""

    answer: list[str] | None = None
    caption: list[str] | None = None
    annotations_captions: list[str] | None = None
    question_id: Id = ""
    img_id: Id = ""
    image_id: Id = ""

    def sample(self, shown: Shown) -> Sample:
        said = self.answer or self.caption or self.annotations_captions or []
        name = next((str(one) for one in (self.question_id, self.img_id, self.image_id) if one != ""), "")
        return Sample(id=name, pictures=shown, captions=tuple(said))


class _Mmmu(msgspec.Struct):
    """Pictures come first, and the words say which is which, <image 1>, as lmms-eval asks it."""

    id: Id
    question: str
    options: list[str] | str
    answer: str | list[str] = ""
    question_type: str = ""
    subfield: str = ""
    topic_difficulty: str = ""

    @property
    def shown(self) -> list[str]:
        """The columns of its pictures: those that the words speak of."""
        said = re.findall(r"<image (\d)>", f"{self.question} {self.options}")
        return [f"image_{n}" for n in sorted(set(said))] or ["image_1"]

    def sample(self, shown: Shown) -> Sample:
        found = {} if self.question_type == "open" else lettered(listed(self.options))
        told = listed(self.answer) if str(self.answer).startswith("[") else [str(self.answer)]
        answers = tuple(answer for answer in told if answer not in ("", "?"))  # that of a test is not told
        _refuse_stranger(answers, found)
        subject = re.fullmatch(r"[a-z]+_(.+)_\d+", str(self.id))
        notes = {"category": subject[1] if subject else "", "subfield": self.subfield, "hard": self.topic_difficulty}
        turns = asked(self.question, len(shown))
        return Sample(id=str(self.id), pictures=shown, turns=turns, answers=answers, choices=found, notes=notes)


class _RealWorldQa(msgspec.Struct):
    """Some questions have options, within them, and others a word or a number for an answer."""

    question: str
    answer: str

    def sample(self, shown: Shown) -> Sample:
        question, found = within(self.question)
        _refuse_stranger((self.answer,), found)
        return Sample(id="", pictures=shown, turns=asked(question, len(shown)), answers=(self.answer,), choices=found)


def _refuse_stranger(answers: Sequence[str], choices: Mapping[str, str]) -> None:
    wrong = next((answer for answer in answers if choices and answer not in choices), None)
    if wrong is not None:
        raise DataError(f"the answer {wrong!r:.80} is none of {', '.join(choices)}", "leave that row out")


def _choice(row: Mapping[str, Any], shown: Shown) -> Sample:
    """MMBench's columns A, B, …, SEED's `choice_a`, …, a list of `options` (AI2D) or `choices` (ScienceQA), or options
    within the question (MMStar), whose answer is a letter or a number."""
    question = str(row["question"])
    if several := row.get("options") or row.get("choices"):
        texts = lettered(listed(several))
    else:
        columns = ((letter, row.get(letter) or row.get(f"choice_{letter.lower()}")) for letter in ascii_uppercase)
        texts = {letter: str(text) for letter, text in columns if text and str(text) != "nan"}
    if not texts:
        question, texts = within(question)
    told = row.get("answer")
    answer = "" if told is None else str(told).strip()
    answer = ascii_uppercase[int(answer)] if answer.isdecimal() and int(answer) < len(texts) else answer
    if not texts:
        raise DataError(f"the question {question!r:.80} has no options", "leave that row out")
    _refuse_stranger((answer,) if answer else (), texts)
    number = next((row[name] for name in ("index", "question_id") if row.get(name) is not None), "")
    hint = row.get("hint")
    kept = ("category", "l2_category", "L2-category", "source", "data_type", "subject")
    return Sample(
        id=str(number),
        pictures=shown,
        turns=asked(question, len(shown)),
        answers=(answer,) if answer else (),
        choices=texts,
        hint="" if hint is None or str(hint) == "nan" else str(hint),
        notes={name: row[name] for name in kept if row.get(name) is not None},
    )


def _question(id: Id, shown: Shown, question: str, answers: list[str] | None, **notes: Any) -> Sample:
    return Sample(
        id=str(id), pictures=shown, turns=asked(question, len(shown)), answers=tuple(answers or ()), notes=notes
    )


class _Kind(NamedTuple):
    """What a row is, the columns that it is known by, and those that hold its pictures."""

    row: Any
    known: str
    pictures: tuple[str, ...] = ("image",)


# The first that fits wins.
KINDS: dict[str, _Kind] = {
    "hallusion": _Kind(_Hallusion, "visual_input figure_id gt_answer"),
    "winoground": _Kind(_Winoground, "image_0 image_1 caption_0 caption_1", ("image_0", "image_1")),
    "refcoco": _Kind(_Expression, "question_id answer bbox image"),
    "gqa": _Kind(_Gqa, "imageId question", ()),
    "docvqa": _Kind(_DocVqa, "questionId question image"),
    "textvqa": _Kind(_TextVqa, "question_id question image_classes image"),
    "vqa": _Kind(_Vqa, "question_id question question_type image"),
    "ocrbench": _Kind(_OcrBench, "dataset question question_type answer image"),
    "ocrvqa": _Kind(_OcrVqa, "image_id questions answers image"),
    "mmmu": _Kind(_Mmmu, "id question options question_type image_1", tuple(f"image_{n}" for n in range(1, 8))),
    "mmbench": _Kind(None, "question image"),
    "pope": _Kind(_Pope, "question_id question answer image_source category image"),
    "mme": _Kind(_Mme, "question_id question answer category image"),
    "chartqa": _Kind(_ChartQa, "type question answer image"),
    "realworldqa": _Kind(_RealWorldQa, "question answer image"),
    "coco-captions": _Kind(_Captioned, "image"),
    "arc": _Kind(ArcColumns, "id question choices answerKey", ()),
    "hellaswag": _Kind(HellaSwag, "activity_label ctx_a ctx_b endings", ()),
    "piqa": _Kind(Piqa, "goal sol1 sol2", ()),
    "siqa": _Kind(Siqa, "context question answerA answerB answerC", ()),
    "winogrande": _Kind(WinoGrande, "sentence option1 option2", ()),
}
_OPTIONS = ({"A", "B"}, {"choice_a", "choice_b"}, {"options"}, {"choices"}, {"l2_category"})  # the last: MMStar
_CAPTIONS = ("answer", "caption", "annotations_captions")


def guess_columns(path: Path) -> str:
    """Which of `KINDS` the columns of a parquet file are."""
    columns = Table(path).columns
    for name in KINDS:
        if _fits(name, columns):
            return name
    raise DataError(
        f"no benchmark known here has the columns {', '.join(sorted(columns))!s:.200} of {path}",
        f"known are those of {', '.join(KINDS)}",
    )


def _fits(name: str, columns: set[str]) -> bool:
    if name == "mmbench" and not any(some <= columns for some in _OPTIONS):
        return False
    if name == "coco-captions" and not any(some in columns for some in _CAPTIONS):
        return False
    if name == "realworldqa" and "question_id" in columns:  # captions, whose question is always the same
        return False
    return columns.issuperset(KINDS[name].known.split())


def open_columns(
    kind: str, path: Path, *, pictures: str | Path | None = None, anywhere: bool = False, picture: str = "{id}.jpg"
) -> Samples:
    """A benchmark of a hub. Only GQA's pictures are not in its rows: `pictures` are the parquet files that hold them,
    or a folder in which `picture` says how they are called."""
    if kind not in KINDS:
        raise ConfigError(f"{path} is parquet, which {kind!r} is not read from", f"known so: {', '.join(KINDS)}")
    table, row = Table(path), KINDS[kind]
    if not _fits(kind, table.columns):
        raise DataError(
            f"{path} has the columns {', '.join(sorted(table.columns))!r:.200}",
            f"{', '.join(row.known.split())} were expected of {kind!r}",
        )
    if pictures is not None and kind != "gqa":
        raise ConfigError(f"the pictures of {path} lie in it", "leave `pictures` out")
    find = _apart(path, pictures, anywhere, picture) if kind == "gqa" else partial(_inside, table, row.pictures)
    rows = [(n, one) for n in range(len(table)) for one in _parsed(row.row, table, n)]
    # Ids are made of words alone, so that no picture is read to number the samples.
    ids = _distinct([_made(table, n, one, ()).id for n, one in rows])

    def make(number: int) -> Sample:
        n, one = rows[number]
        return replace(_made(table, n, one, find(n, one)), id=ids[number])

    return Samples(kind, path, range(len(rows)), make)


def _parsed(kind: Any, table: Table, n: int) -> list[Any]:
    """What a row says: one sample, or `each` of several."""
    if kind is None:
        return [table[n]]
    try:
        row = msgspec.convert(table[n], kind, strict=False)
        return row.each() if hasattr(row, "each") else [row]
    except msgspec.ValidationError as error:
        raise DataError(f"{table.path}, row {n}: {error}", "check that it is the data set you think") from error
    except DataError as error:
        raise DataError(f"{table.path}, row {n}: {error.problem}", error.remedy) from error


def _made(table: Table, n: int, row: Any, shown: Shown) -> Sample:
    try:
        return _choice(row, shown) if isinstance(row, dict) else row.sample(shown)
    except DataError as error:
        raise DataError(f"{table.path}, row {n}: {error.problem}", error.remedy) from error


def _distinct(names: list[str]) -> list[str]:
    """Rows without an id are numbered, and those that share one (MME's two about a picture) are told apart."""
    counts, seen = Counter(names), Counter()
    found = []
    for n, name in enumerate(names):
        found.append(f"{name}/{seen[name]}" if name and counts[name] > 1 else name or str(n))
        seen[name] += 1
    return found


def _inside(table: Table, columns: tuple[str, ...], n: int, row: Any) -> Shown:
    spoken_of = getattr(row, "shown", None)  # which of them a row speaks of
    columns = columns if spoken_of is None else tuple(column for column in spoken_of if column in table.pictured)
    found = [table.pictures(n, column) for column in columns]
    if spoken_of is not None and (len(columns) < len(spoken_of) or not all(found)):
        raise DataError(f"{table.path}, row {n} speaks of a picture that it has not", "leave that row out")
    return tuple(one for some in found for one in some)


def _apart(path: Path, pictures: str | Path | None, anywhere: bool, picture: str) -> Callable[[int, _Gqa], Shown]:
    """Pictures in files of their own: parquet with `id` and `image`, or a folder."""
    if pictures is None:
        raise ConfigError(f"the pictures of {path} lie in files of their own", "give them as `pictures`")
    if not is_parquet(Path(pictures)):
        folder = folder_for(path, pictures, anywhere)
        return lambda n, row: (folder.find(picture.format(id=row.picture), str(row.id)),)
    table = Table(Path(pictures))
    place = {str(row.get("id")): n for n, row in enumerate(table)}

    def find(n: int, row: _Gqa) -> Shown:
        if row.picture not in place:
            raise DataError(f"picture {row.picture} of {path}, row {n}, is not in {pictures}", "give the same split's")
        return table.pictures(place[row.picture])

    return find
