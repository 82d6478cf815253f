"""LLaVA's conversation format, and ShareGPT's, which has the keys images and videos.

`<image>` and `<video>` in the text mark where an image or video is shown.
"""

import re
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec

from vitrail.data.formats.data_files import Id, MediaFolder
from vitrail.data.formats.json_rows import build_row_dataset, open_json_rows
from vitrail.data.formats.sample import ContentPart, Role, Sample, SampleDataset, Turn

MediaKind = Literal["image", "video"]

ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_PLACEHOLDER = re.compile(r"\n*<(image|video)>\n*")  # line ends next to it belong to the placeholder


class _Message(msgspec.Struct, rename={"speaker": "from"}):
    speaker: str
    value: str


class _Row(msgspec.Struct):
    conversations: list[_Message]
    id: Id | None = None
    image: str | list[str] | None = None
    video: str | list[str] | None = None
    images: str | list[str] | None = None
    videos: str | list[str] | None = None
    system: str | None = None  # a system message, as LLaMA-Factory writes it

    def __post_init__(self) -> None:
        self.image = self.images if self.image is None else self.image
        self.video = self.videos if self.video is None else self.video


def open_llava(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open LLaVA's format, as a JSON list or JSON lines.

    LLaVA's own files repeat ids, with several conversations about one image. Repeated ids get `#2`, `#3`, ….
    """
    return build_row_dataset("llava", path, open_json_rows(path, _Row), _find_problem, partial(_sample, folder))


def _sample(folder: MediaFolder, numbered_row: tuple[str, _Row]) -> Sample:
    name, row = numbered_row
    return Sample(
        id=name,
        images=tuple(folder.find_file(picture, name) for picture in _to_list(row.image)),
        videos=tuple(folder.find_file(video, name, "video") for video in _to_list(row.video)),
        turns=_parse_turns(row),
    )


def _find_problem(row: _Row) -> tuple[str, str] | None:
    """Return what is wrong with a row, and the remedy. The text must have one placeholder for each file."""
    if not row.conversations:
        return "it has no turns", "give at least one turn, or remove the sample"
    for message in row.conversations:
        if message.speaker not in ROLES:
            return f"unknown speaker {message.speaker!r:.80}", f"known: {', '.join(ROLES)}"
    media_kinds, placeholders = _media_kinds(row), {"image": 0, "video": 0}
    for placeholder, kind in media_kinds.items():
        placeholders[kind] += sum(message.value.count(f"<{placeholder}>") for message in row.conversations)
    for kind, files in (("image", _to_list(row.image)), ("video", _to_list(row.video))):
        if len(files) != placeholders[kind]:
            return (
                f"the text has {placeholders[kind]} × <{kind}>, but the sample names {len(files)} {kind} files",
                "write one placeholder for each file, where it is shown",
            )
    return None


def _media_kinds(row: _Row) -> dict[str, MediaKind]:
    """What each placeholder stands for: LLaVA-Video writes <image> for videos too."""
    return {"image": "video", "video": "video"} if row.video and not row.image else {"image": "image", "video": "video"}


def _parse_turns(row: _Row) -> tuple[Turn, ...]:
    """Parse the turns, and number placeholders in reading order."""
    media_kinds, turns = _media_kinds(row), build_system_turns(row.system)
    numbers = {"image": count(), "video": count()}
    for message in row.conversations:
        parts = []
        for position, text in enumerate(_PLACEHOLDER.split(message.value)):
            if position % 2:  # odd positions are placeholders
                parts.append(ContentPart(media_kinds[text], index=next(numbers[media_kinds[text]])))
            elif text:
                parts.append(ContentPart("text", text))
        turns.append(Turn(ROLES[message.speaker], tuple(parts)))
    return tuple(turns)


def build_system_turns(text: str | None) -> list[Turn]:
    """Build the turn of a system message that is stored beside the conversation; none if it is empty."""
    return [Turn("system", (ContentPart("text", text),))] if text else []


def _to_list(names: str | list[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else names or []
