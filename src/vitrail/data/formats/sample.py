"""Samples: the common representation of all dataset formats."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tqdm import tqdm

from vitrail.data.formats.masks import Instance
from vitrail.errors import DataError, ImageError, VitrailError
from vitrail.processing.image_loading import load_image

if TYPE_CHECKING:
    from PIL import Image

    from vitrail.data.video_file import VideoFile

Role = Literal["system", "user", "assistant"]


class ContentPart(NamedTuple):
    """A part of a turn: text, or the position of image or video number `index` of the sample."""

    kind: Literal["text", "image", "video"]
    text: str = ""
    index: int = 0


class Turn(NamedTuple):
    """One turn of a conversation: a role and its parts."""

    role: Role
    parts: tuple[ContentPart, ...]

    @property
    def text(self) -> str:
        """The text of the turn, without images and videos."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of any format. Fields that a format does not have are empty. Images are files, the bytes of one, or
    decoded.

    `answers` are the ground truth (VQA's ten, the letter of a choice) and are not part of `turns`: a question's turns
    end with the user, so training and evaluation read the same prompt. `metadata` holds what only this format has.
    """

    id: str
    images: tuple[Path | bytes | Image.Image, ...] = ()
    videos: tuple[Path, ...] = ()
    turns: tuple[Turn, ...] = ()
    answers: tuple[str, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)  # letter → text
    hint: str = ""
    captions: tuple[str, ...] = ()
    label: str | None = None
    instances: tuple[Instance, ...] = ()
    moments: tuple[tuple[float, float], ...] = ()  # start and end in the first video, in seconds
    size: tuple[int, int] | None = None  # height and width of the first image, as stated by the file
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def media(self) -> tuple[Path | bytes | Image.Image, ...]:
        """Images, then videos."""
        return (*self.images, *self.videos)

    def load_image(self, index: int = 0, **options: Any) -> Image.Image:
        """Load image number `index` as RGB. The options are those of `load_image`."""
        try:
            return load_image(self.images[index], **options)
        except ImageError as error:
            raise ImageError(f"sample {self.id}: {error.problem}", error.remedy) from error

    def open_video(self, index: int = 0) -> VideoFile:
        """Open video number `index`."""
        from vitrail.data.video_file import open_video

        try:
            return open_video(self.videos[index])
        except DataError as error:
            raise DataError(f"sample {self.id}: {error.problem}", error.remedy) from error

    def to_messages(self) -> list[dict[str, Any]]:
        """Convert the turns to the messages that `ChatTemplate` takes."""
        return [
            {
                "role": turn.role,
                "content": [
                    {"type": "text", "text": part.text} if part.kind == "text" else {"type": part.kind}
                    for part in turn.parts
                ],
            }
            for turn in self.turns
        ]


def build_question_turns(question: str, num_images: int = 1) -> tuple[Turn, ...]:
    """Build a question about images as one user turn, images first."""
    image_parts = (ContentPart("image", index=i) for i in range(num_images))
    return (Turn("user", (*image_parts, ContentPart("text", question))),)


class SampleDataset(Sequence[Sample]):
    """A dataset of numbered samples with unique ids.

    `rows` are parsed once; `make_sample` turns a row into a `Sample` on access. `names` are the classes or categories.
    `skipped` counts entries that were found but not read, by reason. `lazy_rows` are the `JsonRows` of a large file,
    whose rows are not checked before they are read.
    """

    def __init__(
        self,
        format_name: str,
        path: Path,
        rows: Sequence[Any],
        make_sample: Callable[[Any], Sample],
        *,
        names: Sequence[str] = (),
        skipped: Mapping[str, int] | None = None,
        lazy_rows: Any = None,
    ):
        if not rows:
            raise DataError(f"{path} holds no samples", f"check that the file has the format {format_name}")
        self.format_name, self.path, self.names, self.skipped = format_name, path, tuple(names), dict(skipped or {})
        self._rows, self._make, self.lazy_rows = rows, make_sample, lazy_rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return self._make(self._rows[operator.index(index)])

    def __iter__(self) -> Iterator[Sample]:
        return map(self._make, self._rows)

    def __repr__(self) -> str:
        skipped = ", ".join(f"{count:,} {what}" for what, count in self.skipped.items())
        return f"<{len(self):,} samples of {self.path} ({self.format_name}{'; skipped ' + skipped if skipped else ''})>"

    def select(self, rows: Iterable[int]) -> SampleDataset:
        """Select samples by number."""
        selected = [self._rows[row] for row in rows]
        return SampleDataset(self.format_name, self.path, selected, self._make, names=self.names, skipped=self.skipped)

    def check(self) -> None:
        """Build every sample once, so that missing images are found before a long run. Raise `DataError` with their
        number."""
        broken: list[VitrailError] = []
        for row in show_progress(self._rows, f"check {self.path.name}"):
            try:
                self._make(row)
            except VitrailError as error:
                broken.append(error)
        if broken:
            first = broken[0]
            raise DataError(
                f"{len(broken):,} of {len(self):,} samples of {self.path} cannot be read; first error: {first.problem}",
                first.remedy,
            )


def show_progress(rows: Iterable[Any], description: str) -> Iterator[Any]:
    """Iterate over rows with a progress bar, if it takes over two seconds."""
    return iter(tqdm(rows, desc=description, delay=2, leave=False, disable=None))


def check_unique_ids(ids: Sequence[str], path: Path) -> None:
    """Check that ids are unique: answers are matched to questions by id."""
    seen: dict[str, int] = {}
    for number, name in enumerate(ids):
        if seen.setdefault(name, number) != number:
            raise DataError(
                f"{path}: samples {seen[name]} and {number} have the same id {name!r:.80}", "give each its own id"
            )
