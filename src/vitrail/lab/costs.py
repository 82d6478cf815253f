"""What whole systems cost, as tables: for the terminal and for pages."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vitrail.lab.ledger import DEVICES
from vitrail.lab.whole import Reach, Whole
from vitrail.show.ledger import si, tokens
from vitrail.show.page import Number


class Table(NamedTuple):
    title: str
    head: list[str]
    rows: list[list[str]]


NONE = "–"


def system_tables(rows: Sequence[Whole], lengths: Sequence[int]) -> Iterator[Table]:
    """What systems weigh, the FLOPs of one output, for each device how long it takes and how many a second that is, and
    for the first one what its passes take where there are several; a row a system."""
    heads = ["output", "parameters", "active", "weights", "picture", "second", *_heads("cache", lengths)]
    yield Table("", heads, [
        [
            row.name, row.output, count(row.parameters), count(row.active), measure(row.weights, "B"),
            Number(f"{row.picture:,}", row.picture),
            NONE if row.second is None else Number(f"{row.second:,.0f}", row.second),
            *(measure(row.cache[n], "B") if n in row.cache else NONE for n in lengths),
        ]
        for row in rows
    ])  # fmt: skip
    yield Table("FLOPs of an output", ["own", *_heads("at", lengths)], [
        [row.name, *(measure(row.flops[n], "FLOP") if n in row.flops else NONE for n in (row.own, *lengths))]
        for row in rows
    ])  # fmt: skip
    for device in rows[0].reach:
        heads = ["own", "Hz", *(x for n in lengths for x in (f"at {tokens(n)}", "Hz")), "devices"]
        yield Table(device, heads, [
            [
                row.name,
                *(cell for n in (row.own, *lengths) for cell in _reached(row.reach[device].get(n))),
                Number(str(row.reach[device][row.own].needed), row.reach[device][row.own].needed),
            ]
            for row in rows
        ])  # fmt: skip
    device = next(iter(rows[0].reach))
    several = [(row, row.reach[device][row.own].passes) for row in rows if len(row.reach[device][row.own].passes) > 1]
    if several:
        yield Table(f"passes, {device}", ["first", "", "then", ""], [
            [row.name, *(cell for name, seconds in passes.items() for cell in (name, measure(seconds, "s")))]
            for row, passes in several
        ])  # fmt: skip


def system_notes(rows: Sequence[Whole]) -> Iterator[str]:
    for device in rows[0].reach:
        yield f"{device}: {DEVICES[device].origin}"
    yield "an answer: a picture of 640 × 480 and 32 words behind a context that is cached, up to the first token"
    yield "picture, second: tokens of a picture, and of a second of video: 2 frames where it is looked at, else its own"
    yield "own: with no context but its own; others are shown whether the model was made for them or not"
    yield f"{NONE}: no video, or no context but its own: a codec's picture, a policy's window, a clip that is denoised"
    yield "times are floors, of one device as if it held all; Hz counts frames where the output is video"
    for row in rows:
        told = f"parameters alone are told of {', '.join(row.told)}" if row.told else ""
        said = "; ".join(part for part in (row.note, told) if part)
        if said:
            yield f"{row.name}: {said}"


def measure(value: float, unit: str) -> Number:
    return Number(si(value, unit), value)


def count(parameters: int) -> Number:
    """Billions, as everybody says."""
    return Number(si(parameters, "").replace("G", "B"), parameters)


def _heads(what: str, lengths: Sequence[int]) -> list[str]:
    return [f"{what} {tokens(n)}" for n in lengths]


def _reached(reach: Reach | None) -> tuple[str, str]:
    if reach is None:
        return NONE, NONE
    return measure(reach.seconds, "s"), Number(f"{reach.hz:.3g}", reach.hz)
