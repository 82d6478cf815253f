"""Conversations about images and videos as a source of training samples.

Reads any format with turns (`vitrail.data.formats`), such as LLaVA's. All samples are checked when the source is
opened: a missing file or a conversation without an answer fails at once, not during training.
"""

import hashlib
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from vitrail.config import Config, PositiveInt
from vitrail.data.formats import ContentPart, Sample, SampleDataset, Turn, detect_format, open_dataset
from vitrail.data.formats.sample import show_progress
from vitrail.data.language.text_pieces import PieceTable
from vitrail.data.source_spec import DataSourceSpec
from vitrail.errors import DataError, VitrailError
from vitrail.registry import DATA_SOURCES

TEST_EVERY = 10  # one of ten images goes to the test split, with all of its conversations
INSTRUCT_FILE = "instruct.jsonl"  # written by `vitrail data instruct` into its output folder
MAX_ERRORS_SHOWN = 3  # conversations named in an error message
MAX_TOKENIZER_TEXTS = 200_000  # most texts used to train a tokenizer


class ConversationsConfig(Config, tag="conversations", tag_field="kind"):
    """Settings of a source of conversations.

    path           a file or folder of any format with turns, or the output folder of `vitrail data instruct`
    format         name of the format; detected if not given
    image_folder   folder of the images and videos; the folder of the file if not given
    allow_outside  whether file names may lead out of that folder
    split          train is nine tenths, test is one tenth. The split depends on the names of the images and videos, so
                   all conversations about the same files are in the same split
    max_samples    use only the first so many conversations; all if not given
    """

    path: str
    format: str | None = None
    image_folder: str | None = None
    allow_outside: bool = False
    split: Literal["all", "train", "test"] = "all"
    max_samples: PositiveInt | None = None


class ConversationSource:
    """Map an item to a `Sample` whose answer is its last turn. Images and videos are read on access.

    `extreme_items` are the samples with the longest text, the most images, the most videos, the largest video, and a
    system message. They are the first to check against a chat template or a length limit.
    """

    def __init__(self, config: ConversationsConfig, name: str = "conversations"):
        self.config, self.name = config, name
        samples = _open_samples(config)
        for reason, count in samples.skipped.items():
            sys.stderr.write(f"{name}: skipped {count:,} {reason} of {samples.path}: not conversations\n")
        rows, digest, problems, largest = [], hashlib.blake2b(digest_size=8), [], {}
        for number in show_progress(range(len(samples)), f"check {samples.path.name}"):
            if len(rows) == config.max_samples:
                break
            try:
                sample = _with_answer(samples[number])
            except VitrailError as error:
                problems.append((error.problem, error.remedy))
                continue
            if config.split != "all" and _is_test(sample) != (config.split == "test"):
                continue
            if problem := _find_problem(sample):
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
        if not rows:
            raise DataError(
                f"{samples.path} has no conversation in split {config.split!r}", "use another split, or more data"
            )
        self.samples, self.fingerprint = samples.select(rows), digest.hexdigest()
        self.extreme_items = sorted({item for _, item in largest.values()})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, item: int) -> Sample:
        if not 0 <= item < len(self):
            raise IndexError(item)
        return _with_answer(self.samples[item])

    @property
    def pieces(self) -> PieceTable:
        """Texts of the conversations, for tokenizer training."""
        found = PieceTable()
        for item in range(len(self)):
            if len(found) > MAX_TOKENIZER_TEXTS:
                break
            for turn in self[item].turns:
                found.add(turn.text)
        return found


def _open_samples(config: ConversationsConfig) -> SampleDataset:
    path = Path(config.path)
    if path.is_dir() and (path / INSTRUCT_FILE).is_file():
        path /= INSTRUCT_FILE
    options: dict[str, Any] = {"image_folder": config.image_folder} if config.image_folder is not None else {}
    options |= {"allow_outside": True} if config.allow_outside else {}
    if not path.exists():
        raise DataError(f"{path} does not exist", "check the source's `path` and the current folder")
    return open_dataset(config.format or detect_format(path), path, **options)


def _with_answer(sample: Sample) -> Sample:
    """Append the answer as the last turn if the format stores it separately. Of several answers, use the
    most frequent."""
    if not sample.turns or sample.turns[-1].role != "user" or not sample.answers:
        return sample
    answer = Counter(sample.answers).most_common(1)[0][0]
    return replace(sample, turns=(*sample.turns, Turn("assistant", (ContentPart("text", answer),))))


def _find_problem(sample: Sample) -> tuple[str, str] | None:
    """Return what makes a sample unusable for training, and the remedy."""
    turns = sample.turns[1:] if sample.turns and sample.turns[0].role == "system" else sample.turns
    if not turns:
        return "it has no turns", "use a format with questions and answers, not one with captions or classes only"
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
        hashlib.blake2b(item, digest_size=8).hexdigest() if isinstance(item, bytes) else item.name
        for item in sample.media
    ]


def _is_test(sample: Sample) -> bool:
    key = "\n".join(_media_names(sample)) or sample.id
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % TEST_EVERY == 0


def _fingerprint_data(sample: Sample) -> bytes:
    """Everything that the fingerprint depends on: ids, turns, and names and sizes of images and videos."""
    sizes = [len(item) if isinstance(item, bytes) else item.stat().st_size for item in sample.media]
    return msgspec.json.encode([sample.id, sample.turns, _media_names(sample), sizes])


DATA_SOURCES.register(
    "conversations",
    DataSourceSpec(
        ConversationsConfig, lambda config, context: ConversationSource(config, context.name), ("conversations",)
    ),
)
