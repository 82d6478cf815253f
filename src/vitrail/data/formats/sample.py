"""What every format gives: numbered samples of one shape."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tqdm import tqdm

from vitrail.data.formats.masks import Instance
from vitrail.errors import DataError, ImageError, VitrailError
from vitrail.processing.images import load_image

if TYPE_CHECKING:
    from PIL import Image

    from vitrail.data.video import Film

Role = Literal["system", "user", "assistant"]


class Part(NamedTuple):
    """A piece of a turn: words, or the place of picture or video number `index` of the sample."""

    kind: Literal["text", "image", "video"]
    text: str = ""
    index: int = 0


class Turn(NamedTuple):
    role: Role
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The words alone."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of any format; what a format does not have stays empty. Pictures are files, or the bytes of one.

    `answers` are the right ones (of VQA all ten, of a multiple choice its letter), apart from `turns`: a question's
    turns end with the user, so that training and judging read the same prompt. `notes` keep what only this format has.
    """

    id: str
    pictures: tuple[Path | bytes, ...] = ()
    videos: tuple[Path, ...] = ()
    turns: tuple[Turn, ...] = ()
    answers: tuple[str, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)  # letter → text
    hint: str = ""
    captions: tuple[str, ...] = ()
    label: str | None = None
    instances: tuple[Instance, ...] = ()
    moments: tuple[tuple[float, float], ...] = ()  # start and end in the first video, in seconds
    size: tuple[int, int] | None = None  # height, width of the first picture, as the file claims
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> tuple[Path | bytes, ...]:
        """Pictures, then videos."""
        return (*self.pictures, *self.videos)

    def image(self, index: int = 0, **how: Any) -> Image.Image:
        """Picture number `index` as RGB; `how` goes to `load_image`."""
        try:
            return load_image(self.pictures[index], **how)
        except ImageError as error:
            raise ImageError(f"sample {self.id}: {error.problem}", error.remedy) from error

    def film(self, index: int = 0) -> Film:
        """Video number `index`, opened."""
        from vitrail.data.video import open_video

        try:
            return open_video(self.videos[index])
        except DataError as error:
            raise DataError(f"sample {self.id}: {error.problem}", error.remedy) from error

    def messages(self) -> list[dict[str, Any]]:
        """The turns as `ChatTemplate` takes them."""
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


def asked(question: str, pictures: int = 1) -> tuple[Turn, ...]:
    """A question about pictures, as one turn of the user: pictures first."""
    shown = (Part("image", index=i) for i in range(pictures))
    return (Turn("user", (*shown, Part("text", question))),)


class Samples(Sequence[Sample]):
    """A data set: `rows` as parsed once, and `make`, which turns one of them into a `Sample` when it is asked for.

    Ids are unique. `names` are the classes or categories, `skipped` counts what was seen and not read, by its kind.
    """

    def __init__(
        self,
        kind: str,
        path: Path,
        rows: Sequence[Any],
        make: Callable[[Any], Sample],
        *,
        names: Sequence[str] = (),
        skipped: Mapping[str, int] | None = None,
    ):
        if not rows:
            raise DataError(f"{path} holds no samples", f"is it the right file? {kind} was expected")
        self.kind, self.path, self.names, self.skipped = kind, path, tuple(names), dict(skipped or {})
        self._rows, self._make = rows, make

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return self._make(self._rows[operator.index(index)])

    def __iter__(self) -> Iterator[Sample]:
        return map(self._make, self._rows)

    def __repr__(self) -> str:
        skipped = ", ".join(f"{count:,} {what}" for what, count in self.skipped.items())
        return f"<{len(self):,} samples of {self.path} ({self.kind}{'; skipped ' + skipped if skipped else ''})>"

    def only(self, rows: Iterable[int]) -> Samples:
        """Some of the samples, by number."""
        some = [self._rows[row] for row in rows]
        return Samples(self.kind, self.path, some, self._make, names=self.names, skipped=self.skipped)

    def check(self) -> None:
        """Make every sample once, so that a missing picture is known before a long run; says how many cannot be."""
        broken: list[VitrailError] = []
        for row in progress(self._rows, f"check {self.path.name}"):
            try:
                self._make(row)
            except VitrailError as error:
                broken.append(error)
        if broken:
            first = broken[0]
            raise DataError(
                f"{len(broken):,} of {len(self):,} samples of {self.path} cannot be read; the first: {first.problem}",
                first.remedy,
            )


def progress(rows: Iterable[Any], what: str) -> Iterator[Any]:
    """The rows, with a bar for what takes over two seconds."""
    return iter(tqdm(rows, desc=what, delay=2, leave=False, disable=None))


def refuse_twins(ids: Sequence[str], path: Path) -> None:
    """Answers are matched to questions by id, so no two samples may share one."""
    seen: dict[str, int] = {}
    for number, name in enumerate(ids):
        if seen.setdefault(name, number) != number:
            raise DataError(
                f"{path}: samples {seen[name]} and {number} have the same id {name!r:.80}", "give each its own"
            )
