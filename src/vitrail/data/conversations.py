"""Conversations about images and videos as a source of training samples.

Reads any format with turns (`vitrail.data.formats`), such as LLaVA's, or with captions. All samples are checked when
the source is opened: a missing file or a conversation without an answer fails at once, not during training. Of a large
JSON file, some samples are checked at once, the others when they are read: unusable ones are replaced and counted.
"""

import hashlib
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from PIL import Image

from vitrail.config import Config, Fraction, NonNegativeInt, PositiveInt
from vitrail.data.formats import ContentPart, Sample, SampleDataset, Turn, detect_format, open_dataset
from vitrail.data.formats.json_rows import JsonRows
from vitrail.data.formats.sample import show_progress
from vitrail.data.language.text_pieces import PieceTable
from vitrail.data.sample_faults import FaultTracker, SampleFault, SampleReport
from vitrail.data.sampler import sample_indices
from vitrail.data.source_spec import DataSourceSpec
from vitrail.errors import DataError, VitrailError
from vitrail.registry import DATA_SOURCES

TEST_EVERY = 10  # one of ten images goes to the test split, with all of its conversations
INSTRUCT_FILE = "instruct.jsonl"  # written by `vitrail data instruct` into its output folder
MAX_ERRORS_SHOWN = 3  # conversations named in an error message
MAX_TOKENIZER_TEXTS = 200_000  # most texts used to train a tokenizer
NUM_CHECKED = 2_000  # samples of a large file that are checked when it is opened
CAPTION_PROMPT = "Describe the image."


class ConversationsConfig(Config, tag="conversations", tag_field="kind"):
    """Settings of a source of conversations.

    path           a file or folder of any format with turns, or the output folder of `vitrail data instruct`
    format         name of the format; detected if not given
    image_folder   folder of the images and videos; the folder of the file if not given
    allow_outside  whether file names may lead out of that folder
    split          train is nine tenths, test is one tenth. The split depends on the names of the images and videos, so
                   all conversations about the same files are in the same split
    max_samples    use only the first so many conversations; all if not given
    caption_prompt  question about an image or video that has a caption instead of turns
    max_fault_fraction  of a large file: training stops if more than this fraction of the samples read is unusable,
    max_faults          and more than this number
    """

    path: str
    format: str | None = None
    image_folder: str | None = None
    allow_outside: bool = False
    split: Literal["all", "train", "test"] = "all"
    max_samples: PositiveInt | None = None
    caption_prompt: str = CAPTION_PROMPT
    max_fault_fraction: Fraction = 0.01
    max_faults: NonNegativeInt = 10


class ConversationSource:
    """Map an item to a `Sample` whose answer is its last turn. Images and videos are read on access.

    `extreme_items` are the samples with the longest text, the most images, the most videos, the largest video, and a
    system message. They are the first to check against a chat template or a length limit.
    """

    def __init__(self, config: ConversationsConfig, name: str = "conversations"):
        self.config, self.name = config, name
        samples = _open_samples(config)
        self.samples = samples
        self.rows: Sequence[int] = range(min(len(samples), config.max_samples or len(samples)))
        for reason, count in samples.skipped.items():
            sys.stderr.write(f"{name}: skipped {count:,} {reason} of {samples.path}: not conversations\n")
        self.faults: FaultTracker | None = None
        if samples.lazy_rows is not None:
            self._check_some(samples.lazy_rows)
        else:
            self._check_all()

    def _check_all(self) -> None:
        """Check every sample, and select those of the split."""
        samples, rows, digest, problems = self.samples, [], hashlib.blake2b(digest_size=8), []
        largest: dict[str, tuple[int, int]] = {}
        for number in show_progress(range(len(samples)), f"check {samples.path.name}"):
            if len(rows) == self.config.max_samples:
                break
            try:
                sample = self._read_sample(number)
            except VitrailError as error:
                problems.append((error.problem, error.remedy))
                continue
            if self.config.split != "all" and _is_test(sample) != (self.config.split == "test"):
                continue
            if problem := find_problem(sample):
                problems.append((f"sample {sample.id:.80}: {problem[0]}", problem[1]))
                continue
            for measure, amount in _measure(sample).items():
                if amount > largest.get(measure, (0, 0))[0]:
                    largest[measure] = amount, len(rows)
            rows.append(number)
            digest.update(_fingerprint_data(sample))
        if problems:
            few = "; ".join(problem for problem, _ in problems[:MAX_ERRORS_SHOWN]) + "; …" * (
                len(problems) > MAX_ERRORS_SHOWN
            )
            raise DataError(
                f"{samples.path}: {len(problems):,} of {len(problems) + len(rows):,} conversations are not usable for "
                f"training: {few}",
                problems[0][1],
            )
        self._select(rows)
        self.fingerprint = digest.hexdigest()
        self.extreme_items = sorted({item for _, item in largest.values()})

    def _select(self, rows: Sequence[int]) -> None:
        if not len(rows):
            raise DataError(
                f"{self.samples.path} has no conversation in split {self.config.split!r}",
                "use another split, or more data",
            )
        self.rows = rows

    def _check_some(self, lazy_rows: JsonRows[Any]) -> None:
        """Check some samples of a large file. The others are checked when they are read."""
        if self.config.split != "all":
            self._select(self._split_rows())
        num_samples = len(self.rows)
        lengths = lazy_rows.lengths[np.asarray(self.rows)]
        checked = {*sample_indices(num_samples, NUM_CHECKED, 0), int(lengths.argmax())}
        self.faults = FaultTracker(
            num_samples, self.config.max_fault_fraction, self.config.max_faults, self._read_or_fault
        )
        largest = {"bytes": (int(lengths.max()), int(lengths.argmax()))}
        for item in show_progress(sorted(checked), f"check {self.samples.path.name}"):
            sample = self._read_or_fault(item, (item,))
            if isinstance(sample, SampleFault):
                self.faults.mark_unreadable(item)
                continue
            for measure, amount in _measure(sample).items():
                if amount > largest.get(measure, (0, 0))[0]:
                    largest[measure] = amount, item
        message = (
            f"{self.name}: checked {len(checked):,} of {num_samples:,} samples of {self.samples.path}; the others are "
            "checked when they are read\n"
        )
        sys.stderr.write(message if len(checked) < num_samples else "")
        self.fingerprint = lazy_rows.fingerprint
        self.extreme_items = sorted({item for _, item in largest.values()})

    def _split_rows(self) -> Sequence[int]:
        """Select the rows of the split. Samples without a problem decide by their images."""
        rows = []
        for number in show_progress(range(len(self.samples)), f"split {self.samples.path.name}"):
            if len(rows) == self.config.max_samples:
                break
            try:
                is_selected = _is_test(self.samples[number]) == (self.config.split == "test")
            except VitrailError:  # counted when it is read
                is_selected = self.config.split == "train"
            if is_selected:
                rows.append(number)
        return array("q", rows)

    def _read_or_fault(self, item: int, seed: tuple[int, ...]) -> Sample | SampleFault:
        number = self.rows[item]
        try:
            sample = self._read_sample(number, seed)
        except VitrailError as error:
            return SampleFault(self.samples.path.name, f"sample {number}:", error.problem)
        problem = find_problem(sample)
        return (
            sample if problem is None else SampleFault(self.samples.path.name, f"sample {sample.id:.80}:", problem[0])
        )

    def _read_sample(self, number: int, seed: tuple[int, ...] = ()) -> Sample:
        return complete_conversation(self.samples[number], self.config.caption_prompt, seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> Sample:
        return self.sample(item, ())

    def sample(self, item: int, seed: tuple[int, ...]) -> Sample:
        """Return a sample. `seed` selects one of several captions."""
        if not 0 <= item < len(self):
            raise IndexError(item)
        return self._read_sample(self.rows[item], seed) if self.faults is None else self.faults.read(item, seed)

    def report(self) -> SampleReport | None:
        """Report the samples that could not be read; None if all were checked when the source was opened."""
        return None if self.faults is None else self.faults.report()

    @property
    def format_name(self) -> str:
        """Name of the format of the data."""
        return self.samples.format_name

    @property
    def pieces(self) -> PieceTable:
        """Texts of the conversations, for tokenizer training."""
        return collect_turn_texts(self[item] for item in range(len(self)))


def _open_samples(config: ConversationsConfig) -> SampleDataset:
    path = Path(config.path)
    if path.is_dir() and (path / INSTRUCT_FILE).is_file():
        path /= INSTRUCT_FILE
    options: dict[str, Any] = {"image_folder": config.image_folder} if config.image_folder is not None else {}
    options |= {"allow_outside": True} if config.allow_outside else {}
    if not path.exists():
        raise DataError(f"{path} does not exist", "check the source's `path` and the current folder")
    format_name = config.format or detect_format(path)
    options |= {"with_classes": False} if format_name in ("images", "videos") else {}
    return open_dataset(format_name, path, **options)


def collect_turn_texts(samples: Iterable[Sample]) -> PieceTable:
    """Return the texts of the first conversations, for tokenizer training."""
    found = PieceTable()
    for sample in samples:
        if len(found) > MAX_TOKENIZER_TEXTS:
            break
        for turn in sample.turns:
            found.add(turn.text)
    return found


def complete_conversation(sample: Sample, caption_prompt: str, seed: tuple[int, ...] = ()) -> Sample:
    """Append the answer as the last turn if the format stores it separately, or a caption as the answer to a prompt.

    Of several answers, use the most frequent; of several captions, one drawn by `seed`, or the first without it.
    """
    if not sample.turns and sample.captions and sample.media:
        kind = "video" if sample.videos else "image"
        parts = [ContentPart(kind, index=n) for n in range(len(sample.media))]
        drawn = int(np.random.default_rng(seed).integers(len(sample.captions))) if seed else 0
        caption = (ContentPart("text", sample.captions[drawn]),)
        question = Turn("user", (*parts, ContentPart("text", caption_prompt)))
        return replace(sample, turns=(question, Turn("assistant", caption)))
    if not sample.turns or sample.turns[-1].role != "user" or not sample.answers:
        return sample
    answer = Counter(sample.answers).most_common(1)[0][0]
    return replace(sample, turns=(*sample.turns, Turn("assistant", (ContentPart("text", answer),))))


def find_problem(sample: Sample) -> tuple[str, str] | None:
    """Return what makes a sample unusable for training, and the remedy."""
    turns = sample.turns[1:] if sample.turns and sample.turns[0].role == "system" else sample.turns
    if not turns:
        return "it has no turns and no caption", "use a format with questions and answers or with captions"
    if sample.choices:
        return "its options are not part of its question", "write the options into the question, in LLaVA's format"
    for number, turn in enumerate(turns):
        if turn.role != ("user", "assistant")[number % 2]:
            return f"turn {number + 1} is by the {turn.role}", "let user and assistant alternate, the user first"
    shown = [part.index for turn in turns for part in turn.parts if part.kind == "image"]
    if any(index >= len(sample.images) for index in shown):
        return (
            f"its turns show {len(shown)} images, but it has {len(sample.images)}",
            "write one placeholder for each image, where it is shown",
        )
    if not any(turn.text.strip() for turn in turns[1::2]):
        return "the assistant's turns are empty", "add an answer, or remove the sample"
    return None


def _measure(sample: Sample) -> dict[str, int]:
    """Measure what makes a sample large: the candidates for `extreme_items`."""
    return {
        "words": sum(len(turn.text) for turn in sample.turns),
        "pictures": len(sample.images),
        "videos": len(sample.videos),
        "bytes of a video": max((path.stat().st_size for path in sample.videos), default=0),
        "system": int(sample.turns[0].role == "system"),
    }


def _media_names(sample: Sample) -> list[str]:
    """Names of the images and videos, without their folders. Images given as bytes are named by their hash."""
    return [
        item.name if isinstance(item, Path) else hashlib.blake2b(_to_bytes(item), digest_size=8).hexdigest()
        for item in sample.media
    ]


def _to_bytes(image: bytes | Image.Image) -> bytes:
    return image if isinstance(image, bytes) else image.tobytes()


def _is_test(sample: Sample) -> bool:
    key = "\n".join(_media_names(sample)) or sample.id
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % TEST_EVERY == 0


def _fingerprint_data(sample: Sample) -> bytes:
    """Everything that the fingerprint depends on: ids, turns, and names and sizes of images and videos."""
    sizes = [item.stat().st_size if isinstance(item, Path) else len(_to_bytes(item)) for item in sample.media]
    return msgspec.json.encode([sample.id, sample.turns, _media_names(sample), sizes])


DATA_SOURCES.register(
    "conversations",
    DataSourceSpec(
        ConversationsConfig, lambda config, context: ConversationSource(config, context.name), ("conversations",)
    ),
)
