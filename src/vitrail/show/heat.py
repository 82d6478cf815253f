"""A grid of shares as a drawing: a cell each, the bluer the larger."""

from collections.abc import Sequence

from vitrail.show.figure import Figure, Line, Shape, Words
from vitrail.show.style import BLUE, FAINT, SOFT, Colour

CELL = 64, 40  # width and height
LEFT, TOP, MARGIN, FOOT = 90, 58, 24, 64
GAP = 2  # of paper between cells


def heat_map(
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    down: str,
    across: str,
) -> Figure:
    """Shares of 0 … 1, a list a row; `down` and `across` say what rows and columns are."""
    wide, high = CELL
    right, bottom = LEFT + wide * len(columns), TOP + high * len(rows)
    shapes: list[Shape] = [Words((MARGIN, 22), title, 15), Words((MARGIN, TOP - 12), down, 12, SOFT)]
    for y, (name, row) in enumerate(zip(rows, values, strict=True)):
        middle = TOP + high * (y + 0.5)
        shapes.append(Words((LEFT - 8, middle), name, 12, anchor="r"))
        for x, value in enumerate(row):
            start = LEFT + wide * x
            # A line as thick as the cell is high.
            shapes.append(Line([(start + GAP, middle), (start + wide - GAP, middle)], _blue(value), high - 2 * GAP))
            shapes.append(Words((start + wide / 2, middle), f"{value:.0%}", 12, anchor="m"))
    for x, name in enumerate(columns):
        shapes.append(Words((LEFT + wide * (x + 0.5), bottom + 14), name, 12, anchor="m"))
    shapes.append(Words(((LEFT + right) / 2, bottom + 36), across, 12, SOFT, anchor="m"))
    return Figure(max(right + MARGIN, 2 * MARGIN + 8 * len(title)), bottom + FOOT, shapes)


def _blue(share: float) -> Colour:
    red, green, blue = (round(none + share * (all_ - none)) for none, all_ in zip(FAINT, BLUE, strict=True))
    return red, green, blue
