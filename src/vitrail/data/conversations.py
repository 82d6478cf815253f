"""Conversations about pictures and videos as a source of training samples: LLaVA's files, and whatever else has turns.

What cannot be learnt (a picture or video that is not there, a conversation without an answer) is found when a source is
opened, all of it, and not hours later.
"""

import hashlib
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from vitrail.config import Config
from vitrail.data.formats import Part, Sample, Samples, Turn, guess, open_format
from vitrail.data.formats.sample import progress
from vitrail.data.words.pieces import Pieces
from vitrail.errors import ConfigError, DataError, VitrailError

HELD_OUT = 10  # one of ten pictures is kept for judging, with all that is said about it
INSTRUCT = "instruct.jsonl"  # what `vitrail data instruct` leaves in a folder
SHOWN = 3  # conversations that an error names
PIECES = 200_000  # texts that a tokenizer is trained on, at most


class ConversationsConfig(Config, tag="conversations", tag_field="kind"):
    """
    data      a file or folder of any format with turns (`vitrail.data.formats`), or what `vitrail data instruct` wrote
    format    its name, where it shall not be guessed
    pictures  the folder that pictures and videos are named from; beside the file unless given
    anywhere  whether their names may lead out of it
    part      training reads nine of ten, judging the tenth; which it is follows from the names of what is shown, so
              that conversations about the same pictures and videos stay together
    count     the first so many of these; all unless given
    """

    data: str
    format: str | None = None
    pictures: str | None = None
    anywhere: bool = False
    part: Literal["all", "train", "test"] = "all"
    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ConfigError(f"{self.count} conversations", "give at least one, or leave count out")


class ConversationSource:
    """item → `Sample` with its answers among its turns; its pictures and videos are read when they are asked for.

    `extremes` are the items with the most words, pictures and videos, and one with a system's message, if there are
    any: what cannot be learnt under some template or length is most likely one of them.
    """

    def __init__(self, config: ConversationsConfig, name: str = "conversations"):
        self.config, self.name = config, name
        samples = _opened(config)
        for what, count in samples.skipped.items():
            sys.stderr.write(f"{name}: {count:,} {what} of {samples.path} are no conversations and are passed over\n")
        rows, made, wrong, most = [], hashlib.blake2b(digest_size=8), [], {}
        for number in progress(range(len(samples)), f"check {samples.path.name}"):
            if len(rows) == config.count:
                break
            try:
                sample = _answered(samples[number])
            except VitrailError as error:
                wrong.append((error.problem, error.remedy))
                continue
            if config.part != "all" and _held_out(sample) != (config.part == "test"):
                continue
            if problem := _problem(sample):
                wrong.append((f"sample {sample.id:.80}: {problem[0]}", problem[1]))
                continue
            for what, much in _extent(sample).items():
                if much > most.get(what, (0, 0))[0]:
                    most[what] = much, len(rows)
            rows.append(number)
            made.update(_told(sample))
        if wrong:
            few = "; ".join(problem for problem, _ in wrong[:SHOWN]) + "; …" * (len(wrong) > SHOWN)
            raise DataError(
                f"{len(wrong):,} of {len(wrong) + len(rows):,} conversations of {samples.path} cannot be learnt: {few}",
                wrong[0][1],
            )
        if not rows:
            raise DataError(f"{samples.path} has no conversation in its part {config.part!r}", "ask for another part")
        self.samples, self.fingerprint = samples.only(rows), made.hexdigest()
        self.extremes = sorted({item for _, item in most.values()})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, item: int) -> Sample:
        if not 0 <= item < len(self):
            raise IndexError(item)
        return _answered(self.samples[item])

    @property
    def pieces(self) -> Pieces:
        """What is said, to train a tokenizer on."""
        found = Pieces()
        for item in range(len(self)):
            if len(found) > PIECES:
                break
            for turn in self[item].turns:
                found.add(turn.text)
        return found


def _opened(config: ConversationsConfig) -> Samples:
    path = Path(config.data)
    if path.is_dir() and (path / INSTRUCT).is_file():
        path /= INSTRUCT
    options: dict[str, Any] = {"pictures": config.pictures} if config.pictures is not None else {}
    options |= {"anywhere": True} if config.anywhere else {}
    if not path.exists():
        raise DataError(f"{path} does not exist", "check the source's `data` and the folder you are in")
    return open_format(config.format or guess(path), path, **options)


def _answered(sample: Sample) -> Sample:
    """With its answer as the last turn, where the format has it apart: of several the one given most often."""
    if not sample.turns or sample.turns[-1].role != "user" or not sample.answers:
        return sample
    answer = Counter(sample.answers).most_common(1)[0][0]
    return replace(sample, turns=(*sample.turns, Turn("assistant", (Part("text", answer),))))


def _problem(sample: Sample) -> tuple[str, str] | None:
    """What keeps a sample from being learnt, and the remedy."""
    turns = sample.turns[1:] if sample.turns and sample.turns[0].role == "system" else sample.turns
    if not turns:
        return "it has no turns", "a caption or a class is no conversation: use a format with questions and answers"
    if sample.choices:
        return "its options stand apart from its question", "write them into the question, in LLaVA's format"
    for number, turn in enumerate(turns):
        if turn.role != ("user", "assistant")[number % 2]:
            return f"turn {number + 1} is by the {turn.role}", "user and assistant take turns, the user first"
    if not any(turn.text.strip() for turn in turns[1::2]):
        return "the assistant says nothing", "give an answer, or leave it out"
    return None


def _extent(sample: Sample) -> dict[str, int]:
    return {
        "words": sum(len(turn.text) for turn in sample.turns),
        "pictures": len(sample.pictures),
        "videos": len(sample.videos),
        "bytes of a video": max((path.stat().st_size for path in sample.videos), default=0),
        "system": int(sample.turns[0].role == "system"),
    }


def _pictured(sample: Sample) -> list[str]:
    """What its pictures and videos are called, wherever they lie."""
    return [
        hashlib.blake2b(one, digest_size=8).hexdigest() if isinstance(one, bytes) else one.name for one in sample.shown
    ]


def _held_out(sample: Sample) -> bool:
    key = "\n".join(_pictured(sample)) or sample.id
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % HELD_OUT == 0


def _told(sample: Sample) -> bytes:
    """All that a fingerprint depends on: words, places, and names and sizes of pictures and videos."""
    sizes = [len(one) if isinstance(one, bytes) else one.stat().st_size for one in sample.shown]
    return msgspec.json.encode([sample.id, sample.turns, _pictured(sample), sizes])
