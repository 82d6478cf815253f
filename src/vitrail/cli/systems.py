"""What `vitrail ledger --all` and `--measure` print."""

from collections.abc import Sequence

from vitrail.lab.costs import Table
from vitrail.lab.ledger import Device
from vitrail.lab.measure import Measured
from vitrail.show.ledger import si


def printed(table: Table) -> str:
    return aligned([[table.title, *table.head], *table.rows])


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
