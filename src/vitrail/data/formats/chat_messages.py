"""OpenAI's messages: `{"messages": [{"role": …, "content": …}]}`, as a JSON list, JSON lines or parquet.

Content is a text, or a list of parts: `{"type": "text", "text": …}` and
`{"type": "image_url", "image_url": {"url": …}}` with the name of a file or a data URL.

A text may also mark with `<image>` where an image of the key `images` is shown, as ms-swift and LLaMA-Factory write it.
The key `system` may hold a system message.
"""

import base64
import binascii
import re
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vitrail.data.formats.data_files import Id, MediaFolder
from vitrail.data.formats.json_rows import build_row_dataset, open_json_rows
from vitrail.data.formats.llava_conversations import ROLES, build_system_turns
from vitrail.data.formats.sample import ContentPart, Sample, SampleDataset, Turn
from vitrail.errors import DataError

_PLACEHOLDER = re.compile(r"\n*<image>\n*")  # line ends next to it belong to the placeholder
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,(.*)", re.DOTALL)


class _ImageUrl(msgspec.Struct):
    url: str


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    image_url: _ImageUrl | str | None = None
    image: str | None = None

    @property
    def file(self) -> str | None:
        """Name or data URL of its image; None if the image is one of the row's."""
        return self.image_url.url if isinstance(self.image_url, _ImageUrl) else self.image_url or self.image


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part]


class MessagesRow(msgspec.Struct):
    """A conversation. In parquet, its images are those of the columns `images` or `image`."""

    messages: list[_Message]
    id: Id | None = None
    images: list[str] | str | None = None
    image: str | None = None
    system: str | None = None  # a system message, as LLaMA-Factory writes it

    def to_sample(self, images: tuple[bytes | Path, ...]) -> Sample:
        """Convert a row of a parquet file."""
        parsed = self.parse()
        if images and len(images) != len(parsed.files):
            raise DataError(
                f"its messages show {len(parsed.files)} images, but the row has {len(images)}",
                "write one placeholder for each image, where it is shown",
            )
        if any(file is not None for file in parsed.files):
            raise DataError("its messages name image files", "store the images in the column images")
        return Sample(id="" if self.id is None else str(self.id), images=images, turns=parsed.turns)

    @property
    def listed_files(self) -> list[str]:
        listed = self.images if self.images is not None else self.image
        return [listed] if isinstance(listed, str) else listed or []

    def parse(self) -> "_ParsedRow":
        """Number the images in reading order."""
        turns, files, numbers = build_system_turns(self.system), list[str | None](), count()
        for message in self.messages:
            if message.role not in ROLES:
                raise DataError(f"unknown role {message.role!r:.80}", f"known: {', '.join(ROLES)}")
            parts: list[ContentPart] = []
            for part in [_Part("text", message.content)] if isinstance(message.content, str) else message.content:
                if part.type in ("image_url", "image"):
                    parts.append(ContentPart("image", index=next(numbers)))
                    files.append(part.file)
                    continue
                if part.type != "text" or part.text is None:
                    raise DataError(f"unknown part of type {part.type!r:.80}", "use text and image_url")
                for position, text in enumerate(_PLACEHOLDER.split(part.text)):
                    if position:
                        parts.append(ContentPart("image", index=next(numbers)))
                        files.append(None)
                    if text:
                        parts.append(ContentPart("text", text))
            turns.append(Turn(ROLES[message.role], tuple(parts)))
        if not self.messages:
            raise DataError("it has no turns", "give at least one turn, or remove the sample")
        return _ParsedRow(tuple(turns), files)


class _ParsedRow(NamedTuple):
    turns: tuple[Turn, ...]
    files: list[str | None]  # of each image; None for the next image of the row


def open_messages(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open messages as a JSON list or JSON lines."""
    rows = open_json_rows(path, MessagesRow)
    return build_row_dataset("messages", path, rows, _find_problem, partial(_make_sample, folder))


def _find_problem(row: MessagesRow) -> tuple[str, str] | None:
    """Return what is wrong with a row, and the remedy."""
    try:
        shown = sum(file is None for file in row.parse().files)
    except DataError as error:
        return error.problem, error.remedy
    if shown != len(row.listed_files):
        return (
            f"the text has {shown} × <image>, but the sample names {len(row.listed_files)} images",
            "write one placeholder for each file, where it is shown",
        )
    return None


def _make_sample(folder: MediaFolder, named_row: tuple[str, MessagesRow]) -> Sample:
    name, row = named_row
    turns, files = row.parse()
    listed = iter(row.listed_files)
    images = tuple(_find_image(folder, next(listed) if file is None else file, name) for file in files)
    return Sample(id=name, images=images, turns=turns)


def _find_image(folder: MediaFolder, file: str, name: str) -> Any:
    """Return the bytes of a data URL, or the path of a file."""
    if (found := _DATA_URL.fullmatch(file)) is None:
        return folder.find_file(file.removeprefix("file://"), name)
    try:
        return base64.b64decode(found[1], validate=True)
    except binascii.Error as error:
        raise DataError(f"sample {name:.80}: a data URL is no base64: {error}", "write it again") from None


class ConversationsRow(msgspec.Struct):
    """A row of LLaVA's or ShareGPT's turns in parquet."""

    conversations: list["_Turn"]
    id: Id | None = None
    system: str | None = None

    def to_messages(self) -> MessagesRow:
        """Convert the turns to messages."""
        return MessagesRow(
            [_Message(turn.speaker, turn.value) for turn in self.conversations], self.id, system=self.system
        )

    def to_sample(self, images: tuple[bytes | Path, ...]) -> Sample:
        return self.to_messages().to_sample(images)


class _Turn(msgspec.Struct, rename={"speaker": "from"}):
    speaker: str
    value: str
