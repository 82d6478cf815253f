"""Contact sheets."""

import numpy as np
import pytest
from PIL import Image

from vitrail.plots.contact_sheet import Tile, draw_contact_sheet


@pytest.mark.parametrize("count,columns", [(1, None), (5, 2), (13, None)])
def test_every_image_is_drawn(count, columns):
    colours = [(20 * i % 256, 255 - 15 * i % 256, 128) for i in range(count)]
    tiles = [Tile(Image.new("RGB", (40 + i, 30), c), ["some words"] * (i % 3)) for i, c in enumerate(colours)]
    sheet = np.asarray(draw_contact_sheet(tiles, "A sheet", subtitle="of tiles", columns=columns))
    for colour in colours:
        assert (np.abs(sheet.astype(int) - colour).max(-1) <= 1).sum() > 1000


def test_boxes_are_drawn_at_their_positions():
    black = Image.new("RGB", (100, 100))
    plain, boxed = (
        np.asarray(draw_contact_sheet([Tile(black, (), boxes)], "t")).astype(int)
        for boxes in ((), [((0.25, 0.5, 0.75, 1.0), "")])
    )
    rows, columns = np.nonzero(np.abs(plain - boxed).max(-1) > 60)
    rows_of, columns_of = np.nonzero(plain.max(-1) < 8)  # position of the black image
    top, left, side = rows_of.min(), columns_of.min(), rows_of.max() - rows_of.min()
    assert abs((rows.min() - top) / side - 0.5) < 0.03 and abs((columns.min() - left) / side - 0.25) < 0.03
    assert abs((columns.max() - left) / side - 0.75) < 0.03
