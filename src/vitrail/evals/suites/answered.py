"""Having a model answer samples one by one, with every answer kept as it comes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from vitrail.data.formats import Sample
from vitrail.data.formats.files import read_rows
from vitrail.data.formats.sample import progress
from vitrail.errors import ConfigError, DataError


class Asker(Protocol):
    """Anything that answers: `vitrail.load(folder)`."""

    def ask(self, pictures: Any, question: str, /, **how: Any) -> str: ...


class Row(msgspec.Struct, frozen=True):
    """An answer, and all that it is the answer to."""

    model: str
    id: str
    question: str
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
    what it already holds of the same model, question and `how` is not asked again. `how` goes to the model."""
    known = _kept(keep)
    given = []
    with _adding(keep) as add:
        for sample in progress(samples, "blind" if blind else "answers"):
            text = question(sample)
            row = known.get(_key(Row(model, sample.id, text, blind, how, "")))
            if row is None:
                shown = () if blind else sample.pictures
                said = asker.ask(shown[0] if len(shown) == 1 else list(shown) if shown else nothing, text, **how)
                if not isinstance(said, str):
                    raise ConfigError(
                        f"sample {sample.id} shows {len(shown)} pictures, and the model answers about one at a time",
                        "give one that reads several",
                    )
                row = Row(model, sample.id, text, blind, how, said)
                add(row)
            given.append(row.answer)
    return given


def _kept(keep: Path | None) -> dict[bytes, Row]:
    if keep is None or not keep.exists() or not keep.stat().st_size:
        return {}
    return {_key(row): row for row in read_rows(keep, Row)}


def _key(row: Row) -> bytes:
    """All but the answer."""
    return msgspec.json.encode(msgspec.structs.replace(row, answer=""), order="sorted")


@contextmanager
def _adding(keep: Path | None) -> Iterator[Callable[[Row], None]]:
    if keep is None:
        yield lambda row: None
        return
    try:
        keep.parent.mkdir(parents=True, exist_ok=True)
        file = keep.open("ab")
    except OSError as error:
        raise DataError(f"{keep} cannot be written: {error.strerror}", "give another file") from None
    with file:

        def add(row: Row) -> None:
            file.write(msgspec.json.encode(row) + b"\n")
            file.flush()

        yield add
