"""Choices about words alone: ARC, HellaSwag, PIQA, Social IQa and WinoGrande, in the files of their authors.

The rows are also those of the hubs' parquet. `notes["about"]` is alike for samples about one text, which stand or fall
together. Answers that a file leaves out lie beside it, a line each: `dev-labels.lst` of `dev.jsonl`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar, NamedTuple

import msgspec

from vitrail.data.formats.files import Id, read_rows, read_text
from vitrail.data.formats.sample import Sample, Samples, asked, refuse_twins
from vitrail.errors import DataError

ARC_SETS = ("Easy", "Challenge")


class _Options(msgspec.Struct):
    text: list[str]
    label: list[str]


class ArcColumns(msgspec.Struct, rename={"key": "answerKey"}):
    """ARC as the hubs have it."""

    id: str
    question: str
    choices: _Options
    key: str = ""

    def sample(self, shown: tuple[()] = ()) -> Sample:
        if len(self.choices.text) != len(self.choices.label):
            raise DataError(f"question {self.id} has not one label an option", "mend that row")
        pairs = zip(self.choices.label, self.choices.text, strict=True)
        return _arc(self.id, self.question, list(pairs), self.key)


class _Option(msgspec.Struct):
    text: str
    label: str


class _Stem(msgspec.Struct):
    stem: str
    choices: list[_Option]


class _Arc(msgspec.Struct, rename={"key": "answerKey"}):
    id: str
    question: _Stem
    key: str = ""

    def sample(self) -> Sample:
        pairs = [(option.label, option.text) for option in self.question.choices]
        return _arc(self.id, self.question.stem, pairs, self.key)


def _arc(id: str, question: str, pairs: Sequence[tuple[str, str]], key: str) -> Sample:
    """Options by their own labels, of which some are numbers."""
    options = dict(pairs)
    if len(options) != len(pairs) or (key and key not in options):
        known = ", ".join(label for label, _ in pairs)
        raise DataError(f"question {id} has the options {known} and the answer {key!r:.80}", "mend that row")
    return _choice(id, question, options, key)


class HellaSwag(msgspec.Struct):
    first: ClassVar[int] = 0
    ind: Id
    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: list[str]
    label: Id | None = None
    split_type: str = ""
    source_id: str = ""

    def sample(self, shown: tuple[()] = ()) -> Sample:
        kept = ("activity_label", "ctx_a", "ctx_b", "split_type", "source_id")
        notes = {name: getattr(self, name) for name in kept} | ({"about": self.source_id} if self.source_id else {})
        return _numbered(self, self.ind, f"{self.ctx_a} {self.ctx_b}".strip(), self.endings, self.label, notes=notes)


class Piqa(msgspec.Struct):
    first: ClassVar[int] = 0
    goal: str
    sol1: str
    sol2: str
    label: Id | None = None
    id: Id = ""

    def sample(self, shown: tuple[()] = ()) -> Sample:
        return _numbered(self, self.id, self.goal, [self.sol1, self.sol2], self.label)


class Siqa(msgspec.Struct, rename={"a": "answerA", "b": "answerB", "c": "answerC"}):
    """`correct` is the letter, in files that have it."""

    first: ClassVar[int] = 1
    context: str
    question: str
    a: str
    b: str
    c: str
    label: Id | None = None
    correct: str = ""

    def sample(self, shown: tuple[()] = ()) -> Sample:
        label = self.label if self.label not in (None, "") else "ABC".find(self.correct) + 1 if self.correct else None
        about = {"hint": self.context, "notes": {"about": self.context}}
        return _numbered(self, "", self.question, [self.a, self.b, self.c], label, **about)


class WinoGrande(msgspec.Struct, rename={"id": "qID"}):
    """A sentence with a blank, `_`, that one of two options fills. Ids of a pair of sentences differ in their end."""

    first: ClassVar[int] = 1
    sentence: str
    option1: str
    option2: str
    answer: Id | None = None
    id: str = ""

    def sample(self, shown: tuple[()] = ()) -> Sample:
        if not self.sentence.partition("_")[2].strip():
            raise DataError(
                f"the sentence {self.sentence!r:.80} has no blank (_) with words behind it", "mend that row"
            )
        pair = self.id.rpartition("-")[0]
        notes = {"about": pair} if pair else {}
        return _numbered(self, self.id, self.sentence, [self.option1, self.option2], self.answer, notes=notes)


def letter(label: Id | None, first: int, options: int) -> str:
    """The letter of an option by its number, or nothing where the answer is not told (an empty label, or −1)."""
    text = "" if label is None else str(label).strip()
    if text in ("", "-1"):
        return ""
    at = int(text) - first if text.isdecimal() and len(text) < 3 else -1
    if not 0 <= at < options:
        raise DataError(f"the label {text!r:.80}", f"only {first} to {first + options - 1} are possible here")
    return ascii_uppercase[at]


def _numbered(row: Any, id: Id, question: str, texts: Sequence[str], label: Id | None, **more: Any) -> Sample:
    """Of a row whose answer is the number of an option, counted from its `first`."""
    if len(texts) > len(ascii_uppercase):
        raise DataError(f"{len(texts)} options", "leave that row out")
    options = dict(zip(ascii_uppercase, texts, strict=False))
    return _choice(str(id), question, options, letter(label, row.first, len(options)), **more)


def _choice(id: str, question: str, options: dict[str, str], answer: str, **more: Any) -> Sample:
    if len(options) < 2 or not all(text.strip() for text in (question, *options.values())):
        raise DataError("there are no two options, or there is a text without words", "leave that row out")
    answers = (answer,) if answer else ()
    return Sample(id=id, turns=asked(question, 0), choices=options, answers=answers, **more)


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Row(NamedTuple):
    number: int
    row: Any
    file: Path
    label: str | None  # from a file of labels
    notes: dict[str, str]


def open_arc(path: Path) -> Samples:
    """A file such as `ARC-Easy-Test.jsonl`, or a folder with the test files of both sets; `notes["set"]` is Easy or
    Challenge, from the file's name."""
    rows = []
    for file in _files(path, "ARC-*-Test.jsonl"):
        part = next((part for part in ARC_SETS if f"-{part.lower()}-" in f"-{file.name.lower()}"), "")
        notes = {"set": part} if part else {}
        rows += [_Row(n, row, file, None, notes) for n, row in enumerate(read_rows(file, _Arc))]
    return _opened("arc", path, rows)


def open_hellaswag(path: Path) -> Samples:
    """`hellaswag_val.jsonl`, or the folder that holds it."""
    return _labelled("hellaswag", HellaSwag, path, None, "hellaswag_val.jsonl")


def open_piqa(path: Path, *, labels: str | Path | None = None) -> Samples:
    """`valid.jsonl` and `valid-labels.lst`, or their folder."""
    return _labelled("piqa", Piqa, path, labels, "valid.jsonl", "dev.jsonl")


def open_siqa(path: Path, *, labels: str | Path | None = None) -> Samples:
    """`dev.jsonl` and `dev-labels.lst`, or their folder."""
    return _labelled("siqa", Siqa, path, labels, "*dev.jsonl")


def open_winogrande(path: Path, *, labels: str | Path | None = None) -> Samples:
    """`dev.jsonl`, with the answers in it or in `dev-labels.lst`, or their folder."""
    return _labelled("winogrande", WinoGrande, path, labels, "dev.jsonl")


def _files(path: Path, *patterns: str) -> list[Path]:
    """The file, or those of a folder that have such a name."""
    if not path.is_dir():
        return [path]
    found = sorted({file for pattern in patterns for file in path.rglob(pattern) if file.is_file()})
    if not found:
        raise DataError(f"{path} holds no {' or '.join(patterns)}", "name the file")
    return found


def _labelled(kind: str, row: Any, path: Path, labels: str | Path | None, *patterns: str) -> Samples:
    files = _files(path, *patterns)
    if len(files) > 1:
        raise DataError(f"{path} holds {', '.join(str(file.relative_to(path)) for file in files)}", "name one of them")
    (file,) = files
    rows = read_rows(file, row)
    beside = file.with_name(f"{file.stem}-labels.lst") if labels is None else Path(labels)
    if labels is None and not beside.is_file():
        return _opened(kind, path, [_Row(n, one, file, None, {}) for n, one in enumerate(rows)])
    told = [line.strip() for line in read_text(beside).splitlines()]
    if len(told) != len(rows):
        raise DataError(f"{beside} has {len(told):,} lines for the {len(rows):,} of {file}", "give those of one split")
    pairs = zip(rows, told, strict=True)
    return _opened(kind, path, [_Row(n, one, file, label, {}) for n, (one, label) in enumerate(pairs)])


def _opened(kind: str, path: Path, rows: list[_Row]) -> Samples:
    """Rows without an id go by their number."""
    refuse_twins(
        [str(getattr(one.row, "ind", "") or getattr(one.row, "id", "")) or str(one.number) for one in rows], path
    )
    return Samples(kind, path, rows, _made)


def _made(one: _Row) -> Sample:
    try:
        sample = one.row.sample()
        if one.label is not None:
            answer = letter(one.label, one.row.first, len(sample.choices))
            if sample.answers and sample.answers != (answer,):
                raise DataError(
                    f"the file says {sample.answers[0]}, and its labels {answer}", "give those of one split"
                )
            sample = replace(sample, answers=(answer,) if answer else ())
    except DataError as error:
        raise DataError(f"{one.file}, row {one.number}: {error.problem}", error.remedy) from error
    return replace(sample, id=sample.id or str(one.number), notes={**sample.notes, **one.notes})
