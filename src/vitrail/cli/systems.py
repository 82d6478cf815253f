"""What `vitrail ledger --all` and `--measure` print."""

from collections.abc import Iterator, Sequence

from vitrail.lab.ledger import DEVICES, Device
from vitrail.lab.measure import Measured
from vitrail.lab.whole import Reach, Whole
from vitrail.show.ledger import si, tokens


def system_tables(rows: Sequence[Whole], lengths: Sequence[int]) -> Iterator[str]:
    """What systems weigh, and for each device how long one output takes and how many a second that is."""
    heads = ["", "output", "parameters", "active", "weights", "picture", "second", *_heads("cache", lengths)]
    yield aligned([heads] + [
        [
            row.name, row.output, _count(row.parameters), _count(row.active), si(row.weights, "B"),
            f"{row.picture:,}", "–" if row.second is None else f"{row.second:,.0f}",
            *(si(row.cache[n], "B") if n in row.cache else "–" for n in lengths),
        ]
        for row in rows
    ])  # fmt: skip
    yield aligned([["FLOPs of an output", "own", *_heads("at", lengths)]] + [
        [row.name, *(si(row.flops[n], "FLOP") if n in row.flops else "–" for n in (row.own, *lengths))] for row in rows
    ])  # fmt: skip
    for device in rows[0].reach:
        yield aligned([[device, "own", "Hz", *(x for n in lengths for x in (f"at {tokens(n)}", "Hz")), "devices"]] + [
            [
                row.name,
                *(cell for n in (row.own, *lengths) for cell in _reached(row.reach[device].get(n))),
                str(row.reach[device][row.own].needed),
            ]
            for row in rows
        ])  # fmt: skip


def system_notes(rows: Sequence[Whole]) -> Iterator[str]:
    for device in rows[0].reach:
        yield f"{device}: {DEVICES[device].origin}"
    yield "an answer: a picture of 640 × 480 and 32 words behind a context that is cached, up to the first token"
    yield "picture, second: tokens of a picture, and of a second of video: 2 frames where it is looked at, else its own"
    yield "own: with no context but its own; others are shown whether the model was made for them or not"
    yield "times are floors, of one device as if it held all; Hz counts frames where the output is video"
    for row in rows:
        told = f"parameters alone are told of {', '.join(row.told)}" if row.told else ""
        said = "; ".join(part for part in (row.note, told) if part)
        if said:
            yield f"{row.name}: {said}"


def measured_table(found: Sequence[Measured], at: Device) -> str:
    head = ["", "pass", "floor", "", "measured", "measured / floor"]
    rows = [
        [one.name, one.what, si(one.floor, "s"), one.bound[0], si(one.seconds, "s"), f"{one.ratio:.2f}"]
        for one in found
    ]
    return f"{aligned([head, *rows])}\n\n{at.origin}: {si(at.flops, 'FLOP/s')}, {si(at.bandwidth, 'B/s')}"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])
        for cells in lines
    )


def _heads(what: str, lengths: Sequence[int]) -> list[str]:
    return [f"{what} {tokens(n)}" for n in lengths]


def _reached(reach: Reach | None) -> tuple[str, str]:
    return ("–", "–") if reach is None else (si(reach.seconds, "s"), f"{reach.hz:.3g}")


def _count(parameters: int) -> str:
    return si(parameters, "").replace("G", "B")
