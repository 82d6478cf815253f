"""Having a model answer samples, several side by side, with every answer kept as it comes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from vitrail.data.formats import Sample
from vitrail.data.formats.files import decode, read_bytes
from vitrail.data.formats.sample import progress
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.evals.suites.sheets import key_of

_BEGINS = b'{"model":'  # every line of a file of answers


class Asker(Protocol):
    """Anything that answers: `vitrail.load(folder)`."""

    def ask(self, pictures: Any, question: str, /, **how: Any) -> str: ...


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, and all that it is the answer to. `pictures` tell those that were shown from others."""

    model: str
    id: str
    question: str
    pictures: tuple[str, ...] = ()
    blind: bool
    how: dict[str, Any]
    answer: str


class Question(NamedTuple):
    """What is asked about a sample, and what is shown with it."""

    sample: Sample
    text: str
    shown: Any


Together = Callable[..., list[str]]
"""what is shown with each question, the questions → the answers that single asking gives; as `Talker.answers`"""


def answers(
    asker: Asker,
    samples: Sequence[Sample],
    question: Callable[[Sample], str],
    *,
    together: Together | None = None,
    batch: int = 1,
    blind: bool = False,
    nothing: Any = (),
    keep: Path | None = None,
    model: str = "",
    **how: Any,
) -> list[str]:
    """One answer a sample. `batch` of them are asked at a time by `together`; where that cannot be, each by itself.
    `blind` asks without its pictures and videos: what is shown where there are none is `nothing`, or a blank picture
    for a model that must see one. `keep` is a file of JSON lines that answers are added to as they come; what it
    already holds of the same model, question, pictures and `how` is not asked again. `how` goes to the model."""

    def ask(asked: Sequence[Question]) -> Iterator[str]:
        if together is not None and len(asked) > 1:
            try:
                said = together([one.shown for one in asked], [one.text for one in asked], **how)
            except VitrailError:
                pass  # videos, say: asked by itself, each either answers or says what is wrong with it
            else:
                yield from said
                return
        for one in asked:
            said = asker.ask(one.shown, one.text, **how)
            if not isinstance(said, str):
                raise ConfigError(
                    f"sample {one.sample.id} shows {len(one.shown)} pictures, and the model answers about one at a "
                    "time",
                    "give one that reads several",
                )
            yield said

    return asked_of(ask, samples, question, batch=batch, blind=blind, nothing=nothing, keep=keep, model=model, how=how)


def asked_of(
    ask: Callable[[Sequence[Question]], Iterator[str]],
    samples: Sequence[Sample],
    question: Callable[[Sample], str],
    *,
    batch: int,
    blind: bool,
    nothing: Any,
    keep: Path | None,
    model: str,
    how: dict[str, Any],
) -> list[str]:
    """What `ask` says to questions, so many at a time, less what the file already holds."""
    if batch < 1:
        raise ConfigError(f"{batch} questions at a time", "ask at least one")
    known, cut = kept(keep)
    given: dict[int, str] = {}
    waiting: dict[bool, list[tuple[int, Row, Question]]] = {False: [], True: []}
    with _adding(keep, cut) as add:

        def settle(some: list[tuple[int, Row, Question]]) -> None:
            try:
                for (n, row, _), said in zip(some, ask([one for *_, one in some]), strict=True):
                    add(msgspec.structs.replace(row, answer=said))
                    given[n] = said
            except torch.OutOfMemoryError:
                raise ConfigError(f"{len(some)} questions at once pass the memory", "give a smaller batch") from None
            some.clear()

        for n, sample in enumerate(progress(samples, "blind" if blind else "answers")):
            text, shown = question(sample), () if blind else sample.shown
            key = tuple(map(key_of, shown))
            asked = Row(model=model, id=sample.id, question=text, pictures=key, blind=blind, how=how, answer="")
            if (row := known.get(_key(asked))) is not None:
                given[n] = row.answer
                continue
            # What looks and what does not are never asked side by side: towers that are skipped are skipped for all.
            some = waiting[bool(shown)]
            one = shown[0] if len(shown) == 1 else list(shown) if shown else nothing
            some.append((n, asked, Question(sample, text, one)))
            if len(some) == batch:
                settle(some)
        for some in filter(None, waiting.values()):
            settle(some)
    return [given[n] for n in range(len(given))]


def kept(keep: Path | None) -> tuple[dict[bytes, Row], int]:
    """What the file holds, and how many bytes at its end a run left that was stopped within a line."""
    if keep is None or not keep.exists() or not keep.stat().st_size:
        return {}, 0
    data = read_bytes(keep)
    whole, cut = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
    lines = enumerate(whole.splitlines(), start=1)
    rows = [decode(line, Row, f"{keep}, line {number}") for number, line in lines if line.strip()]
    if not _BEGINS.startswith(cut[: len(_BEGINS)]):
        raise DataError(f"{keep} ends in something else than an answer: {cut[:40]!r}", "give another file")
    return {_key(row): row for row in rows}, len(cut)


def _key(row: Row) -> bytes:
    """All but the answer."""
    return msgspec.json.encode(msgspec.structs.replace(row, answer=""), order="sorted")


@contextmanager
def _adding(keep: Path | None, cut: int) -> Iterator[Callable[[Row], None]]:
    """A way to add rows to the file, less so many bytes at its end."""
    if keep is None:
        yield lambda row: None
        return
    try:
        keep.parent.mkdir(parents=True, exist_ok=True)
        file = keep.open("ab")
        file.truncate(file.tell() - cut)
    except OSError as error:
        raise DataError(f"{keep} cannot be written: {error.strerror}", "give another file") from None
    with file:

        def add(row: Row) -> None:
            file.write(msgspec.json.encode(row) + b"\n")
            file.flush()

        yield add
