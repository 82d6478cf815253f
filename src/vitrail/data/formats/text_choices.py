"""Multiple choice about text alone: ARC, HellaSwag, PIQA, Social IQa and WinoGrande, in their authors' files.

The row types are also those of the hubs' parquet files. `metadata["about"]` groups samples about the same text, which
are resampled together. Answers may be in a separate file with one label a line: `dev-labels.lst` for `dev.jsonl`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar

import msgspec

from vitrail.data.formats.data_files import Id, read_json_rows, read_text
from vitrail.data.formats.sample import Sample, SampleDataset, build_question_turns, check_unique_ids
from vitrail.errors import DataError

ARC_SETS = ("Easy", "Challenge")


class _OptionColumns(msgspec.Struct):
    text: list[str]
    label: list[str]


class ArcRow(msgspec.Struct, rename={"key": "answerKey"}):
    """A row of ARC in the hubs' columns."""

    id: str
    question: str
    choices: _OptionColumns
    key: str = ""

    def to_sample(self, images: tuple[()] = ()) -> Sample:
        if len(self.choices.text) != len(self.choices.label):
            raise DataError(f"question {self.id} does not have one label for each option", "correct that row")
        pairs = zip(self.choices.label, self.choices.text, strict=True)
        return _to_arc_sample(self.id, self.question, list(pairs), self.key)


class _Option(msgspec.Struct):
    text: str
    label: str


class _ArcQuestion(msgspec.Struct):
    stem: str
    choices: list[_Option]


class _ArcFileRow(msgspec.Struct, rename={"key": "answerKey"}):
    id: str
    question: _ArcQuestion
    key: str = ""

    def to_sample(self) -> Sample:
        pairs = [(option.label, option.text) for option in self.question.choices]
        return _to_arc_sample(self.id, self.question.stem, pairs, self.key)


def _to_arc_sample(id: str, question: str, pairs: Sequence[tuple[str, str]], key: str) -> Sample:
    """Build a sample with the options' own labels, some of which are numbers."""
    options = dict(pairs)
    if len(options) != len(pairs) or (key and key not in options):
        known = ", ".join(label for label, _ in pairs)
        raise DataError(f"question {id} has the options {known} and the answer {key!r:.80}", "correct that row")
    return _to_choice_sample(id, question, options, key)


class HellaSwagRow(msgspec.Struct):
    """A row of HellaSwag. `first` is the number of its first option."""

    first: ClassVar[int] = 0
    ind: Id
    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: list[str]
    label: Id | None = None
    split_type: str = ""
    source_id: str = ""

    def to_sample(self, images: tuple[()] = ()) -> Sample:
        columns = ("activity_label", "ctx_a", "ctx_b", "split_type", "source_id")
        metadata = {name: getattr(self, name) for name in columns} | (
            {"about": self.source_id} if self.source_id else {}
        )
        return _to_numbered_sample(
            self, self.ind, f"{self.ctx_a} {self.ctx_b}".strip(), self.endings, self.label, metadata=metadata
        )


class PiqaRow(msgspec.Struct):
    """A row of PIQA. `first` is the number of its first option."""

    first: ClassVar[int] = 0
    goal: str
    sol1: str
    sol2: str
    label: Id | None = None
    id: Id = ""

    def to_sample(self, images: tuple[()] = ()) -> Sample:
        return _to_numbered_sample(self, self.id, self.goal, [self.sol1, self.sol2], self.label)


class SiqaRow(msgspec.Struct, rename={"a": "answerA", "b": "answerB", "c": "answerC"}):
    """A row of Social IQa. `correct` is the answer's letter, in files that have it. `first` is the number of the first
    option."""

    first: ClassVar[int] = 1
    context: str
    question: str
    a: str
    b: str
    c: str
    label: Id | None = None
    correct: str = ""

    def to_sample(self, images: tuple[()] = ()) -> Sample:
        label = self.label if self.label not in (None, "") else "ABC".find(self.correct) + 1 if self.correct else None
        fields = {"hint": self.context, "metadata": {"about": self.context}}
        return _to_numbered_sample(self, "", self.question, [self.a, self.b, self.c], label, **fields)


class WinoGrandeRow(msgspec.Struct, rename={"id": "qID"}):
    """A row of WinoGrande: a sentence with a blank, `_`, and two options to fill it. Ids of a sentence pair differ in
    their suffix."""

    first: ClassVar[int] = 1
    sentence: str
    option1: str
    option2: str
    answer: Id | None = None
    id: str = ""

    def to_sample(self, images: tuple[()] = ()) -> Sample:
        if not self.sentence.partition("_")[2].strip():
            raise DataError(
                f"the sentence {self.sentence!r:.80} has no blank (_) followed by words", "correct that row"
            )
        pair = self.id.rpartition("-")[0]
        metadata = {"about": pair} if pair else {}
        return _to_numbered_sample(
            self, self.id, self.sentence, [self.option1, self.option2], self.answer, metadata=metadata
        )


def label_to_letter(label: Id | None, first: int, options: int) -> str:
    """Convert the number of an option to a letter. Empty if the label is empty or −1, which means unknown."""
    text = "" if label is None else str(label).strip()
    if text in ("", "-1"):
        return ""
    position = int(text) - first if text.isdecimal() and len(text) < 3 else -1
    if not 0 <= position < options:
        raise DataError(f"the label is {text!r:.80}", f"give {first} to {first + options - 1}")
    return ascii_uppercase[position]


def _to_numbered_sample(
    row: Any, id: Id, question: str, texts: Sequence[str], label: Id | None, **fields: Any
) -> Sample:
    """Build a sample from a row whose answer is the number of an option, counted from its `first`."""
    if len(texts) > len(ascii_uppercase):
        raise DataError(f"{len(texts)} options are more than there are letters", "remove that row")
    options = dict(zip(ascii_uppercase, texts, strict=False))
    return _to_choice_sample(str(id), question, options, label_to_letter(label, row.first, len(options)), **fields)


def _to_choice_sample(id: str, question: str, options: dict[str, str], answer: str, **fields: Any) -> Sample:
    if len(options) < 2 or not all(text.strip() for text in (question, *options.values())):
        raise DataError("there are fewer than two options, or a text is empty", "remove that row")
    answers = (answer,) if answer else ()
    return Sample(id=id, turns=build_question_turns(question, 0), choices=options, answers=answers, **fields)


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────


def open_arc(path: Path) -> SampleDataset:
    """Open a file such as `ARC-Easy-Test.jsonl`, or a folder with the test files of both sets.

    `metadata["set"]` is Easy or Challenge, from the file name.
    """
    samples = []
    for file in _find_files(path, "ARC-*-Test.jsonl"):
        set_name = next((name for name in ARC_SETS if f"-{name.lower()}-" in f"-{file.name.lower()}"), "")
        metadata = {"set": set_name} if set_name else {}
        rows = read_json_rows(file, _ArcFileRow)
        samples += [replace(_to_sample(file, n, row), metadata=metadata) for n, row in enumerate(rows)]
    return _build_dataset("arc", path, samples)


def open_hellaswag(path: Path) -> SampleDataset:
    """Open `hellaswag_val.jsonl`, or the folder that holds it."""
    return _open_with_labels("hellaswag", HellaSwagRow, path, None, "hellaswag_val.jsonl")


def open_piqa(path: Path, *, label_file: str | Path | None = None) -> SampleDataset:
    """Open `valid.jsonl` and `valid-labels.lst`, or their folder."""
    return _open_with_labels("piqa", PiqaRow, path, label_file, "valid.jsonl", "dev.jsonl")


def open_siqa(path: Path, *, label_file: str | Path | None = None) -> SampleDataset:
    """Open `dev.jsonl` and `dev-labels.lst`, or their folder."""
    return _open_with_labels("siqa", SiqaRow, path, label_file, "*dev.jsonl")


def open_winogrande(path: Path, *, label_file: str | Path | None = None) -> SampleDataset:
    """Open `dev.jsonl`, with the answers in it or in `dev-labels.lst`, or their folder."""
    return _open_with_labels("winogrande", WinoGrandeRow, path, label_file, "dev.jsonl")


def _find_files(path: Path, *patterns: str) -> list[Path]:
    """Return the file itself, or the files of a folder that match a pattern."""
    if not path.is_dir():
        return [path]
    found = sorted({file for pattern in patterns for file in path.rglob(pattern) if file.is_file()})
    if not found:
        raise DataError(f"{path} holds no {' or '.join(patterns)}", "give the path of the file")
    return found


def _open_with_labels(kind: str, row: Any, path: Path, labels: str | Path | None, *patterns: str) -> SampleDataset:
    files = _find_files(path, *patterns)
    if len(files) > 1:
        raise DataError(f"{path} holds {', '.join(str(file.relative_to(path)) for file in files)}", "give one of them")
    (file,) = files
    rows = read_json_rows(file, row)
    label_path = file.with_name(f"{file.stem}-labels.lst") if labels is None else Path(labels)
    texts: list[str | None] = [None] * len(rows)
    if labels is not None or label_path.is_file():
        texts = [line.strip() for line in read_text(label_path).splitlines()]
    if len(texts) != len(rows):
        raise DataError(
            f"{label_path} has {len(texts):,} labels for the {len(rows):,} rows of {file}",
            "give the labels of the same split",
        )
    pairs = zip(rows, texts, strict=True)
    return _build_dataset(kind, path, [_to_sample(file, n, parsed, label) for n, (parsed, label) in enumerate(pairs)])


def _build_dataset(kind: str, path: Path, samples: list[Sample]) -> SampleDataset:
    check_unique_ids([sample.id for sample in samples], path)
    return SampleDataset(kind, path, samples, _identity)


def _identity(sample: Sample) -> Sample:
    return sample


def _to_sample(file: Path, number: int, row: Any, label: str | None = None) -> Sample:
    """Convert row `number` of a file, with its label from a label file. Rows without an id are numbered."""
    try:
        sample = row.to_sample()
        if label is not None:
            answer = label_to_letter(label, row.first, len(sample.choices))
            if sample.answers and sample.answers != (answer,):
                raise DataError(
                    f"the file has the answer {sample.answers[0]}, its label file {answer}",
                    "give the labels of the same split",
                )
            sample = replace(sample, answers=(answer,) if answer else ())
    except DataError as error:
        raise DataError(f"{file}, row {number}: {error.problem}", error.remedy) from error
    return replace(sample, id=sample.id or str(number))
