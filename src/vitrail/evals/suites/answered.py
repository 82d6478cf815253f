"""Having a model answer samples one by one, with every answer kept as it comes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from vitrail.data.formats import Sample
from vitrail.data.formats.files import decode, read_bytes
from vitrail.data.formats.sample import progress
from vitrail.errors import ConfigError, DataError
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


def answers(
    asker: Asker,
    samples: Sequence[Sample],
    question: Callable[[Sample], str],
    *,
    blind: bool = False,
    nothing: Any = (),
    keep: Path | None = None,
    model: str = "",
    **how: Any,
) -> list[str]:
    """One answer a sample. `blind` asks without its pictures: what is shown where there are none is `nothing`, or a
    blank picture for a model that must see one. `keep` is a file of JSON lines that answers are added to as they come;
    what it already holds of the same model, question, pictures and `how` is not asked again. `how` goes to the
    model."""
    known, cut = _kept(keep)
    given = []
    with _adding(keep, cut) as add:
        for sample in progress(samples, "blind" if blind else "answers"):
            text, shown = question(sample), () if blind else sample.pictures
            key = tuple(map(key_of, shown))
            asked = Row(model=model, id=sample.id, question=text, pictures=key, blind=blind, how=how, answer="")
            row = known.get(_key(asked))
            if row is None:
                said = asker.ask(shown[0] if len(shown) == 1 else list(shown) if shown else nothing, text, **how)
                if not isinstance(said, str):
                    raise ConfigError(
                        f"sample {sample.id} shows {len(shown)} pictures, and the model answers about one at a time",
                        "give one that reads several",
                    )
                row = msgspec.structs.replace(asked, answer=said)
                add(row)
            given.append(row.answer)
    return given


def _kept(keep: Path | None) -> tuple[dict[bytes, Row], int]:
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
