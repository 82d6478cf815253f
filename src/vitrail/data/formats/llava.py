"""Conversations about pictures, as LLaVA keeps them: `<image>` stands in the words where a picture is shown."""

import re
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec

from vitrail.data.formats.files import Folder, Id, folder_for, read_rows
from vitrail.data.formats.sample import Part, Role, Sample, Samples, Turn, progress
from vitrail.errors import DataError

Shown = Literal["image", "video"]

SPEAKERS: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_PLACE = re.compile(r"\n*<(image|video)>\n*")  # line ends beside it belong to the mark, not to the words


class _Said(msgspec.Struct, rename={"speaker": "from"}):
    speaker: str
    value: str


class _Row(msgspec.Struct):
    conversations: list[_Said]
    id: Id | None = None
    image: str | list[str] | None = None
    video: str | list[str] | None = None


def open_llava(path: Path, *, pictures: str | Path | None = None, anywhere: bool = False) -> Samples:
    """LLaVA's JSON list, or the same as JSON lines.

    Ids repeat in LLaVA's own files (one picture, several conversations); the further ones get `#2`, `#3`, …
    """
    folder = folder_for(path, pictures, anywhere)
    rows, taken, repeats = [], set(), {}
    for number, row in enumerate(progress(read_rows(path, _Row), path.name)):
        name = given = str(number if row.id is None else row.id)
        while name in taken:
            repeats[given] = repeats.get(given, 1) + 1
            name = f"{given}#{repeats[given]}"
        taken.add(name)
        if problem := _problem(row):  # said now, not hours later
            raise DataError(f"{path}, sample {number} ({name:.80}): {problem[0]}", problem[1])
        rows.append((name, row))
    return Samples("llava", path, rows, partial(_sample, folder))


def _sample(folder: Folder, named: tuple[str, _Row]) -> Sample:
    name, row = named
    return Sample(
        id=name,
        pictures=tuple(folder.find(picture, name) for picture in _listed(row.image)),
        videos=tuple(folder.find(video, name, "video") for video in _listed(row.video)),
        turns=_turns(row),
    )


def _problem(row: _Row) -> tuple[str, str] | None:
    """What keeps a row from being a conversation, and the remedy: there must be as many places as files."""
    if not row.conversations:
        return "nothing is said", "give at least one turn, or leave the sample out"
    for said in row.conversations:
        if said.speaker not in SPEAKERS:
            return f"nobody knows the speaker {said.speaker!r:.80}", f"known: {', '.join(SPEAKERS)}"
    meant, shown = _meant(row), {"image": 0, "video": 0}
    for mark, kind in meant.items():
        shown[kind] += sum(said.value.count(f"<{mark}>") for said in row.conversations)
    for kind, files in (("image", _listed(row.image)), ("video", _listed(row.video))):
        if len(files) != shown[kind]:
            return (
                f"the words show {shown[kind]} × <{kind}>, but {len(files)} {kind} files are named",
                "write one mark for each file, at the place where it is shown",
            )
    return None


def _meant(row: _Row) -> dict[str, Shown]:
    """What the marks stand for: LLaVA-Video writes <image> for videos too."""
    return {"image": "video", "video": "video"} if row.video and not row.image else {"image": "image", "video": "video"}


def _turns(row: _Row) -> tuple[Turn, ...]:
    """The turns, each place numbered in reading order."""
    meant, turns = _meant(row), []
    numbers = {"image": count(), "video": count()}
    for said in row.conversations:
        parts = []
        for at, piece in enumerate(_PLACE.split(said.value)):
            if at % 2:  # the marks stand between the words
                parts.append(Part(meant[piece], index=next(numbers[meant[piece]])))
            elif piece:
                parts.append(Part("text", piece))
        turns.append(Turn(SPEAKERS[said.speaker], tuple(parts)))
    return tuple(turns)


def _listed(names: str | list[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else names or []
