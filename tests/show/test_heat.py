"""A grid of shares: a cell each, darker where there is more."""

import numpy as np

from vitrail.show.figure import Line, Words
from vitrail.show.heat import CELL, LEFT, TOP, heat_map
from vitrail.show.style import BLUE, FAINT


def test_cells_show_their_shares(tmp_path):
    values = [[0.0, 1.0, 0.5], [0.25, 0.0, 1.0]]
    drawn = heat_map(values, ["0%", "100%"], ["8", "32", "64"], title="Found", down="depth", across="frames")
    cells = [shape for shape in drawn.shapes if isinstance(shape, Line)]
    assert len(cells) == 6 and cells[0].colour == FAINT and cells[1].colour == BLUE
    said = [shape.words for shape in drawn.shapes if isinstance(shape, Words)]
    assert {"Found", "depth", "frames", "0%", "100%", "8", "32", "64", "25%", "50%"} <= set(said)
    pixels = np.asarray(drawn.picture())
    wide, high = CELL
    corners = [[pixels[TOP + high * y + 6, LEFT + wide * x + 6] for x in range(3)] for y in range(2)]
    assert tuple(corners[0][0]) == FAINT and tuple(corners[0][1]) == BLUE and tuple(corners[1][2]) == BLUE
    assert drawn.svg().count("<polyline") == 6
